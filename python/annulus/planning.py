"""plan: what a call will hold and move, before anything does."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from . import _library as c
from ._handles import DTYPES, Sizes, make_rank, one_rank
from ._spec import Options, Spec, check_names, make_spec
from .sharding import check_place, checked_lengths

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclasses.dataclass(frozen=True)
class PassPlan:
    """Of one pass of one rank."""

    memory: dict[str, int]  # bytes by name: tensors (q, k, v, out, lse, dout, dq, dk, dv) and parts of the workspace
    workspace_bytes: int
    sent_bytes: int
    received_bytes: int

    @property
    def bytes(self) -> int:
        """All of it: tensors and workspace."""
        return sum(self.memory.values())


@dataclasses.dataclass(frozen=True)
class Plan:
    forward: PassPlan
    backward: PassPlan | None  # None: the device has no backward in this version
    text: str  # branches, tasks and, on several ranks, the strategy and why

    def __str__(self) -> str:
        lines = [self.text.rstrip()]
        for name, each in (("forward", self.forward), ("backward", self.backward)):
            if each is None:
                lines.append(f"{name}: not on this device in this version")
                continue
            lines.append(
                f"{name}: {each.bytes:,} bytes, {each.workspace_bytes:,} of them workspace; "
                f"sends {each.sent_bytes:,}, receives {each.received_bytes:,}"
            )
        return "\n".join(lines)


class _Foresight:
    """Stands for a group that is not there."""

    @staticmethod
    def check(status: int) -> None:
        c.check(status)


def plan(
    tokens: int,
    heads: int,
    head_dim: int,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    batch: int = 1,
    kv_heads: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    ranks: int = 1,
    rank: int = 0,
    **options: Unpack[Options],
) -> Plan:
    """Memory and traffic of one rank's forward and backward, to the byte, without allocating or sending anything.

    Args:
        tokens: of the whole sequence; the other sizes are those of ``q`` and ``k``.
        ranks, rank: how many ranks share the sequence, and which of them is asked about.
        options: the pattern, layout, shard_lengths and strategy, by the names of `annulus.dilated_attention`.
    """
    check_names("annulus.plan", options)
    text = make_spec(segment_lengths, dilation_rates, **options)
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be torch.float32, bfloat16 or float16; got {dtype}: plan for one of these")
    check_place(rank, ranks)
    spec = Spec.read(text)
    checked_lengths(tokens, ranks, spec.layout, spec.shard_lengths or None)
    sizes = Sizes(batch, tokens, heads, heads if kv_heads is None else kv_heads, head_dim)
    where = torch.device(device)
    if ranks == 1:
        handle = one_rank(text, sizes, dtype, where)
        return _plan_of(handle, lambda which: (0, 0))
    transport = ctypes.c_void_p()
    callbacks = c.TransportCallbacks(rank=rank, size=ranks)
    c.check(c.library().annulus_transport_create(callbacks, ctypes.byref(transport)))
    try:
        ahead = make_rank(transport, _Foresight(), spec, sizes, dtype, where, ranks)
        result = _plan_of(ahead, ahead.traffic)
        del ahead  # before its transport
        return result
    finally:
        c.library().annulus_transport_destroy(transport)


def _plan_of(handle, traffic) -> Plan:
    def of(which: int) -> PassPlan:
        return PassPlan(handle.memory(which), handle.workspace_bytes(which), *traffic(which))

    try:
        backward = of(c.BACKWARD)
    except NotImplementedError:
        backward = None
    return Plan(of(c.FORWARD), backward, handle.explain())
