"""The custom operators annulus::forward and annulus::backward: what autograd, torch.compile and FakeTensors see.

Both take tensors [batch, tokens, heads, head_dim] and a spec (see _spec.py). A tensor whose heads are not contiguous is
copied once; every other layout is read where it lies.
"""

from typing import Sequence  # noqa: UP035  # torch 2.4 reads no other in a schema

import torch
from torch import Tensor

from . import sharding
from ._groups import group_of, process_group, total_tokens
from ._handles import DTYPES, Sizes, one_rank, reference
from ._spec import Spec


def _handle(q: Tensor, k: Tensor, text: str):
    spec = Spec.read(text)
    batch, rows, heads, head_dim = q.shape
    if not spec.group:
        return one_rank(text, Sizes(batch, rows, heads, k.shape[2], head_dim), q.dtype, q.device)
    tokens = total_tokens(spec.group, k.shape[1], spec.shard_lengths)
    return group_of(spec.group).handle(text, Sizes(batch, tokens, heads, k.shape[2], head_dim), q.dtype, q.device)


def _fp64_spec(q: Tensor, text: str) -> Spec:
    spec = Spec.read(text)
    if spec.group or q.device.type != "cpu":
        raise NotImplementedError(
            "torch.float64 goes through the reference, on the CPU and on one rank; got "
            + (f"tensors on {q.device}" if q.device.type != "cpu" else f"the group {spec.group}")
            + ": use torch.float32 there"
        )
    return spec


def _check_dtype(q: Tensor) -> None:
    if q.dtype not in DTYPES and q.dtype != torch.float64:
        raise ValueError(
            f"q, k and v must be of torch.float32, bfloat16, float16 or (CPU) float64; got {q.dtype}: convert them"
        )


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


# custom_op, as for backward, would be shorter, and every call 3 to 8 us longer.
_library = torch.library.Library("annulus", "DEF")
_library.define("forward(Tensor q, Tensor k, Tensor v, str spec) -> (Tensor, Tensor)")


def _forward(q: Tensor, k: Tensor, v: Tensor, spec: str) -> tuple[Tensor, Tensor]:
    _check_dtype(q)
    if q.dtype == torch.float64:
        problem = _fp64_spec(q, spec)
        if q.numel() > 0:
            out, lse = reference(problem, q, k, v)
            return out, lse
        return _like_results(q)
    return _handle(q, k, spec).forward(q, k, v)


_library.impl("forward", _forward, "CompositeExplicitAutograd")
forward = torch.ops.annulus.forward.default


def _like_results(q: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=_lse_dtype(q))


@torch.library.register_fake("annulus::forward", lib=_library)
def _(q, k, v, spec):
    return _like_results(q)


@torch.library.custom_op("annulus::backward", mutates_args=())
def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: str
) -> tuple[Tensor, Tensor, Tensor]:
    if q.dtype == torch.float64:
        problem = _fp64_spec(q, spec)
        if q.numel() > 0:
            dq, dk, dv = reference(problem, q, k, v, dout)
            return dq, dk, dv
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    return _handle(q, k, spec).backward(dout, q, k, v, out, lse)


@backward.register_fake
def _(dout, q, k, v, out, lse, spec):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.custom_op("annulus::positions", mutates_args=())
def positions(x: Tensor, tokens: int, group: str, layout: str, shard_lengths: Sequence[int]) -> Tensor:
    """The positions of this rank's rows ``x``, ``[batch, rows, ...]``: an operator, so that it can be compiled."""
    total_tokens(group, x.shape[1], tuple(shard_lengths))  # says what does not fit
    return sharding.positions(
        tokens, process_group(group), layout=layout, shard_lengths=shard_lengths or None, device=x.device
    )


@positions.register_fake
def _(x, tokens, group, layout, shard_lengths):
    return x.new_empty((x.shape[1],), dtype=torch.int64)


def _setup_context(ctx, inputs, output):
    q, k, v, spec = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.spec = spec


def _differentiate(ctx, dout, dlse):
    """lse is handed out without a gradient (see dilated_attention), so dlse is nothing."""
    q, k, v, out, lse = ctx.saved_tensors
    dq, dk, dv = backward(dout, q, k, v, out, lse, ctx.spec)
    return dq, dk, dv, None


torch.library.register_autograd("annulus::forward", _differentiate, setup_context=_setup_context, lib=_library)
