"""Annulus: exact dilated attention for very long sequences, for PyTorch.

    out = annulus.dilated_attention(q, k, v, segment_lengths=[2048, 16384], dilation_rates=[1, 4], causal=True)

on ``[batch, tokens, heads, head_dim]``, on one rank or, with ``group=``, on many. docs/pytorch.md is the guide;
``python -m annulus.info`` says what works here.
"""

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError("annulus needs PyTorch 2.4 or newer, and there is none: pip install torch") from error

from ._library import TransportError, library
from .functional import dilated_attention
from .modules import DilatedAttention, MultiheadDilatedAttention
from .planning import PassPlan, Plan, plan
from .rotary import rotate
from .sharding import positions, shard, unshard

__version__ = library().annulus_version().decode()

__all__ = [
    "DilatedAttention",
    "MultiheadDilatedAttention",
    "PassPlan",
    "Plan",
    "TransportError",
    "dilated_attention",
    "plan",
    "positions",
    "rotate",
    "shard",
    "unshard",
]
