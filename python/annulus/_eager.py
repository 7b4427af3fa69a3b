"""The short way of a call: plain tensors on one rank, in eager mode.

It computes what the operators of _ops.py compute, without what torch puts in front of an operator: its dispatcher calls
Python back, twice with a gradient, which takes longer than all the rest. Whoever has to see an operator gets one:
torch.compile, dispatch modes, transforms, tracers, profilers and subclasses of Tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _ops
from ._handles import Handle

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def is_plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return (
        type(q) in _PLAIN
        and type(k) in _PLAIN
        and type(v) in _PLAIN
        and not (q.is_neg() or k.is_neg() or v.is_neg())  # views that mean -x
        and not q.is_meta
        and forward_ad._current_level < 0
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and not torch.autograd._profiler_enabled()
        and torch._C._get_tracing_state() is None
    )


def attend(q: Tensor, k: Tensor, v: Tensor, handle: Handle, spec: str, with_lse: bool):
    """out, or out and lse."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attend.apply(q, k, v, handle, spec, with_lse)
    out, lse = handle.forward(q, k, v)
    return (out, lse) if with_lse else out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, handle, spec, with_lse):
        out, lse = handle.forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.handle, ctx.spec = handle, spec
        if not with_lse:
            return out
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # none for lse
        return out, lse

    @staticmethod
    def backward(ctx, dout, *_):
        q, k, v, out, lse = ctx.saved_tensors
        # The operator says that there is no second derivative, and sees the tensors of a batch of gradients.
        batched = torch._C._functorch.is_legacy_batchedtensor(dout)
        if torch.is_grad_enabled() or batched or not is_plain(dout, q, k):
            dq, dk, dv = _ops.backward(dout, q, k, v, out, lse, ctx.spec)
        else:
            dq, dk, dv = ctx.handle.backward(dout, q, k, v, out, lse)
        return dq, dk, dv, None, None, None
