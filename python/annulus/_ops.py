"""The custom operators annulus::forward and annulus::backward: what autograd, torch.compile and FakeTensors see.

Both take tensors [batch, tokens, heads, head_dim] and a spec (see _spec.py). A tensor whose heads are not contiguous is
copied once; every other layout is read where it lies.
"""

from typing import Sequence  # noqa: UP035  # torch 2.4 reads no other in a schema

import torch
from torch import Tensor

from . import sharding
from ._groups import group_of, telling, total_tokens
from ._handles import DTYPES, Sizes, one_rank, reference
from ._spec import Spec


def _handle(q: Tensor, k: Tensor, text: str):
    spec = Spec.read(text)
    batch, rows, heads, head_dim = q.shape
    if not spec.group:
        return one_rank(text, Sizes(batch, rows, heads, k.shape[2], head_dim), q.dtype, q.device)
    with telling(spec.group):
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


def check_tensors(q: Tensor, k: Tensor, v: Tensor, replicated: bool = False) -> None:
    a, b = q.shape, k.shape
    fit = (
        len(a) == len(b) == 4
        and b == v.shape
        and a[0] == b[0]
        and (replicated or a[1] == b[1])
        and a[3] == b[3]
        and b[2] > 0
        and a[2] % b[2] == 0
        and q.device == k.device == v.device
        and q.dtype == k.dtype == v.dtype
        and (q.dtype in DTYPES or q.dtype == torch.float64)
    )
    if not fit:
        _refuse(q, k, v, replicated)


def _refuse(q: Tensor, k: Tensor, v: Tensor, replicated: bool) -> None:
    """The first rule that the tensors break."""
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(
            "q, k and v must have the shape [batch, tokens, heads, head_dim]; got "
            f"{q.dim()}, {k.dim()} and {v.dim()} dimensions: use view or unflatten"
        )
    if k.shape != v.shape:
        raise ValueError(
            f"k and v must have the same shape; got {list(k.shape)} and {list(v.shape)}: project them alike"
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or (q.shape[1] != k.shape[1] and not replicated):
        raise ValueError(
            f"q and k must agree in batch, tokens and head_dim; got {list(q.shape)} and {list(k.shape)}: heads alone "
            "may differ"
        )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2] != 0:
        raise ValueError(
            f"the heads of q must be a multiple of those of k and v; got {q.shape[2]} and {k.shape[2]}: choose a "
            "number of key/value heads that divides the heads"
        )
    if q.device != k.device or q.device != v.device:
        raise ValueError(f"q, k and v must be on one device; got {q.device}, {k.device} and {v.device}: move them")
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise ValueError(f"q, k and v must be of one type; got {q.dtype}, {k.dtype} and {v.dtype}: convert them")
    raise ValueError(
        f"q, k and v must be of torch.float32, bfloat16, float16 or (CPU) float64; got {q.dtype}: convert them"
    )


def _check_results(dout: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> None:
    batch, tokens, heads, _ = q.shape
    fit = (
        dout.shape == out.shape == q.shape
        and dout.dtype == out.dtype == q.dtype
        and lse.shape == (batch, heads, tokens)
        and lse.dtype == _lse_dtype(q)
        and dout.device == out.device == lse.device == q.device
    )
    if not fit:
        shown = ", ".join(f"{list(x.shape)} in {x.dtype} on {x.device}" for x in (q, dout, out, lse))
        raise ValueError(
            f"dout and out must be like q, and lse [batch, heads, tokens] in {_lse_dtype(q)}; got {shown} for q, dout, "
            "out and lse: give those of annulus::forward"
        )


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


# custom_op, as for backward, would be shorter, and every call 3 to 8 us longer.
_library = torch.library.Library("annulus", "DEF")
_library.define("forward(Tensor q, Tensor k, Tensor v, str spec) -> (Tensor, Tensor)")


def _replicated(text: str) -> bool:
    spec = Spec.read(text)
    return bool(spec.group) and spec.strategy == "replicated"


def _forward(q: Tensor, k: Tensor, v: Tensor, spec: str) -> tuple[Tensor, Tensor]:
    check_tensors(q, k, v, _replicated(spec))
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
    check_tensors(q, k, v, _replicated(spec))
    return _like_results(q)


@torch.library.custom_op("annulus::backward", mutates_args=())
def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: str
) -> tuple[Tensor, Tensor, Tensor]:
    check_tensors(q, k, v, _replicated(spec))
    _check_results(dout, q, out, lse)
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
def positions(x: Tensor, group: str, layout: str, shard_lengths: Sequence[int]) -> Tensor:
    """The positions of this rank's rows ``x``, ``[batch, rows, ...]``: an operator, so that it can be compiled."""
    with telling(group):
        tokens = total_tokens(group, x.shape[1], tuple(shard_lengths))  # says what does not fit
        return sharding.positions(tokens, group, layout=layout, shard_lengths=shard_lengths or None, device=x.device)


@positions.register_fake
def _(x, group, layout, shard_lengths):
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


class Transformed(torch.autograd.Function):
    """annulus::forward once more, in the form in which torch.func's transforms (grad, vjp, jacrev, vmap) can use it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, spec):
        return forward(q, k, v, spec)

    setup_context = staticmethod(_setup_context)

    @staticmethod
    def backward(ctx, dout, dlse):
        return *_TransformedBackward.apply(dout, *ctx.saved_tensors, ctx.spec), None


class _TransformedBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(dout, q, k, v, out, lse, spec):
        return backward(dout, q, k, v, out, lse, spec)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError("dilated attention has no second derivative: detach the first, or take it outside")
