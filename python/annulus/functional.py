"""dilated_attention: the one function."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from . import _eager, _ops
from ._groups import name_of
from ._handles import DTYPES, MOST_HANDLES, Handle, Sizes, one_rank, wants_determinism
from ._spec import make_spec

if TYPE_CHECKING:
    import torch.distributed as dist

_cached_spec = functools.lru_cache(maxsize=1024)(make_spec)


@overload
def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Any,
) -> Tensor: ...
@overload
def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    *,
    return_lse: Literal[True],
    **options: Any,
) -> tuple[Tensor, Tensor]: ...
def dilated_attention(  # type: ignore[misc]  # the overloads name what decides the type of the result
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    phase: str | None = None,
    gradient: str | None = None,
    preset: str | None = None,
    classes: Sequence[Sequence[int]] | None = None,
    pad_like_torchscale: bool = False,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    group: dist.ProcessGroup | str | None = None,
    layout: str = "contiguous",
    shard_lengths: Sequence[int] | None = None,
    strategy: str = "auto",
    reproducible: bool = False,
    segment_length: Sequence[int] | None = None,
    dilated_ratio: Sequence[int] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact dilated attention: one softmax over the keys of all branches, for any sizes.

    Args:
        q: ``[batch, tokens, heads, head_dim]`` in float32, bfloat16 or float16; float64 on the CPU, through the slow
            reference, for gradcheck. Any strides, as long as the elements of a head are contiguous; a tensor whose
            are not is copied once.
        k, v: ``[batch, tokens, kv_heads, head_dim]``; ``kv_heads`` divides ``heads`` (grouped queries).
        segment_lengths, dilation_rates: one number a branch: a query sees every ``dilation_rates[i]``-th key of its
            segment of ``segment_lengths[i]`` positions. Nothing needs to divide anything. torchscale's names
            ``segment_length`` and ``dilated_ratio`` are taken too.
        causal: a query sees no key behind itself.
        softmax_scale: of the logits; ``1 / sqrt(head_dim)`` unless given.
        phase: which classes of positions a head takes: ``"by_head"``, ``"by_head_block"``, ``"every"`` or ``"table"``
            (then ``classes`` has the class of every head, a list a branch). None: the preset's.
        gradient: ``"exact"``, or ``"detached"`` as torchscale trains. None: the preset's.
        preset: ``"longnet"`` (None is the same), ``"torchscale"``, ``"residue"`` or ``"head_groups"``.
        pad_like_torchscale: the zero keys that torchscale leaves in a short last segment.
        cu_seqlens: ``[documents + 1]``, 0 to tokens: documents packed into the sequence, for every element of the batch
            alike. A list, or a tensor on the CPU.
        deterministic: the same bits run after run, gradients included; so is
            ``torch.use_deterministic_algorithms(True)``. On the CPU that is always so.
        return_lse: also return the log of the softmax denominators, which carry no gradient.
        group: a torch.distributed process group over which the sequence is spread: all ranks call with their own rows
            of ``q``, ``k`` and ``v`` and get their own rows back, those that one rank alone would have computed. Of
            gloo or NCCL, on CPUs or GPUs.
        layout: who has which positions: ``"contiguous"``, ``"zigzag"`` or ``"striped"``; see `annulus.shard`.
        shard_lengths: the rows of every rank; None: all ranks have as many.
        strategy: how keys meet queries: ``"auto"``, ``"exchange"``, ``"reshard"``, ``"ring"``, ``"gather"`` or
            ``"replicated"`` (all ranks have all of ``q``, and their own rows of ``k`` and ``v``).
        reproducible: the same bits for every number of ranks.

    Returns:
        ``out`` like ``q``; with ``return_lse`` also ``lse``, ``[batch, heads, tokens]`` in float32 (natural log; -inf
        where no branch reaches a query).

    Raises:
        ValueError: sizes, shapes or options that do not fit.
        NotImplementedError: right in principle, but not on this device or in this version.
        annulus.TransportError: a rank of the group was lost, gave up or was given something else.
    """
    if segment_lengths is None:
        segment_lengths = segment_length
    if dilation_rates is None:
        dilation_rates = dilated_ratio
    if isinstance(cu_seqlens, Tensor):
        cu_seqlens = cu_seqlens.tolist()
    name = "" if group is None else name_of(group)
    compiling = torch.compiler.is_compiling()
    if not compiling:  # lists become keys of caches
        segment_lengths, dilation_rates = _hashable(segment_lengths), _hashable(dilation_rates)
        cu_seqlens, shard_lengths = _hashable(cu_seqlens), _hashable(shard_lengths)
        classes = None if classes is None else tuple([_hashable(each) for each in classes])
    # In the order of make_spec.
    options = (
        segment_lengths, dilation_rates, causal, softmax_scale, phase, gradient, preset, classes, pad_like_torchscale,
        cu_seqlens, deterministic, name, layout, shard_lengths, strategy, reproducible,
    )  # fmt: skip
    if not name and not compiling and _eager.is_plain(q, k, v) and not torch.is_autocast_enabled(q.device.type):
        handle, spec = _handle_of(q, k, v, options)
        if handle is not None:
            return _eager.attend(q, k, v, handle, spec, return_lse)
    _check_tensors(q, k, v, replicated=strategy == "replicated" and group is not None)
    spec = make_spec(*options) if compiling else _cached_spec(*options)
    q, k, v = _autocast(q, k, v)
    out, lse = _ops.forward(q, k, v, spec)
    return (out, lse.detach()) if return_lse else out


def _hashable(values):
    return tuple(values) if type(values) is list else values


# What has been checked once: by all that the checks look at, and all that decides which handle it is.
_known: dict[tuple, tuple[Handle | None, str]] = {}


def _handle_of(q: Tensor, k: Tensor, v: Tensor, options: tuple) -> tuple[Handle | None, str]:
    """None where an operator has to say what is wrong, or to call the reference."""
    key = (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, torch.get_num_threads(),
        wants_determinism(), options,
    )  # fmt: skip
    found = _known.get(key)
    if found is None:
        _check_tensors(q, k, v, replicated=False)
        spec = _cached_spec(*options)
        sizes = Sizes(*q.shape[:3], k.shape[2], q.shape[3])
        found = (one_rank(spec, sizes, q.dtype, q.device) if q.dtype in DTYPES else None), spec
        if len(_known) >= MOST_HANDLES:
            _known.clear()
        _known[key] = found
    return found


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast as matrix products are: in its type, but for float64."""
    device = q.device.type
    if not torch.is_autocast_enabled(device) or q.dtype == torch.float64:
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, replicated: bool) -> None:
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
        and (q.dtype == k.dtype == v.dtype or torch.is_autocast_enabled(q.device.type))
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
    raise ValueError(f"q, k and v must be of one type; got {q.dtype}, {k.dtype} and {v.dtype}: convert them")
