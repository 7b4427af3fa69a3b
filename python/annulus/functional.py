"""dilated_attention: the one function."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _eager, _ops
from ._groups import name_of, tell
from ._handles import DTYPES, MOST_HANDLES, Handle, Sizes, one_rank, wants_determinism
from ._spec import Options, make_spec, number, whole_numbers

if TYPE_CHECKING:
    import torch.distributed as dist
    from typing_extensions import Unpack

_cached_spec = functools.lru_cache(maxsize=1024)(make_spec)


@overload
def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int] | Tensor | None = None,
    dilation_rates: Sequence[int] | Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    group: dist.ProcessGroup | dist.DeviceMesh | str | None = None,
    segment_length: Sequence[int] | Tensor | None = None,
    dilated_ratio: Sequence[int] | Tensor | None = None,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int] | Tensor | None = None,
    dilation_rates: Sequence[int] | Tensor | None = None,
    *,
    return_lse: Literal[True],
    group: dist.ProcessGroup | dist.DeviceMesh | str | None = None,
    segment_length: Sequence[int] | Tensor | None = None,
    dilated_ratio: Sequence[int] | Tensor | None = None,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
def dilated_attention(  # type: ignore[misc]  # the overloads name what decides the type of the result
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int] | Tensor | None = None,
    dilation_rates: Sequence[int] | Tensor | None = None,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    phase: str | None = None,
    gradient: str | None = None,
    preset: str | None = None,
    classes: Sequence[Sequence[int]] | Tensor | None = None,
    pad_like_torchscale: bool = False,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    group: dist.ProcessGroup | dist.DeviceMesh | str | None = None,
    layout: str = "contiguous",
    shard_lengths: Sequence[int] | Tensor | None = None,
    strategy: str = "auto",
    reproducible: bool = False,
    segment_length: Sequence[int] | Tensor | None = None,
    dilated_ratio: Sequence[int] | Tensor | None = None,
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
            gloo or NCCL, on CPUs or GPUs. Its name will do, or a DeviceMesh of one dimension.
        layout: who has which positions: ``"contiguous"``, ``"zigzag"`` or ``"striped"``; see `annulus.shard`.
        shard_lengths: the rows of every rank; None: all ranks have as many.
        strategy: how keys meet queries: ``"auto"``, ``"exchange"``, ``"reshard"``, ``"ring"``, ``"gather"`` or
            ``"replicated"``: all ranks have all of ``q``, and their own rows of ``k`` and ``v``. All get the same
            ``out``, and the same gradient of it has to come back on all; then so is that of ``q``, whole on every rank
            and not to be summed over them.
        reproducible: the same bits for every number of ranks.

    Returns:
        ``out`` like ``q``; with ``return_lse`` also ``lse``, ``[batch, heads, tokens]`` in float32 (natural log; -inf
        where no branch reaches a query).

    Raises:
        ValueError: sizes, shapes or options that do not fit.
        NotImplementedError: right in principle, but not on this device or in this version.
        annulus.TransportError: a rank of the group was lost, gave up or was given something else.
    """
    compiling = torch.compiler.is_compiling()
    name = "" if group is None else name_of(group)
    try:
        if segment_length is not None or dilated_ratio is not None:
            segment_lengths = _either("segment_lengths", segment_lengths, "segment_length", segment_length)
            dilation_rates = _either("dilation_rates", dilation_rates, "dilated_ratio", dilated_ratio)
        if not name and (shard_lengths is not None or strategy == "replicated"):
            shard_lengths = _on_one_rank(k, group is not None, shard_lengths, strategy)
        # In the order of make_spec.
        options = (
            _hashable(segment_lengths), _hashable(dilation_rates), causal, softmax_scale, phase, gradient, preset,
            _hashable_lists(classes), pad_like_torchscale, _hashable(cu_seqlens), deterministic, name, layout,
            shard_lengths, strategy, reproducible,
        )  # fmt: skip
        if not name and not compiling and _eager.is_plain(q, k, v) and not torch.is_autocast_enabled(q.device.type):
            handle, spec = _handle_of(q, k, v, options)
            if handle is not None:
                return _eager.attend(q, k, v, handle, spec, return_lse)
        if not compiling:
            _check_forward_mode(q, k, v)
        spec = make_spec(*options) if compiling else _cached_spec(*_by_value(*options))
        q, k, v = _autocast(q, k, v)
        transformed = not compiling and torch._C._are_functorch_transforms_active()
        out, lse = (_ops.Transformed.apply if transformed else _ops.forward)(q, k, v, spec)
        return (out, lse.detach()) if return_lse else out
    except Exception as error:
        if name and not compiling:  # the other ranks must not wait for this one
            tell(name, error)
        raise


def _either(name: str, values, other_name: str, other):
    if values is not None and other is not None:
        raise ValueError(f"{name} and torchscale's {other_name} are the same; got both: give one of them")
    return other if values is None else values


def _on_one_rank(k: Tensor, has_group: bool, shard_lengths, strategy: str) -> None:
    """What is for ranks alone must not be dropped in silence."""
    if not has_group:
        given = "shard_lengths" if shard_lengths is not None else f"strategy={strategy!r}"
        raise ValueError(f"{given} is for a sequence over ranks; got it without a group: give group, or leave it out")
    if shard_lengths is not None and whole_numbers("shard_lengths", shard_lengths) != (k.shape[1],):
        raise ValueError(
            f"shard_lengths must be [{k.shape[1]}] for the {k.shape[1]} rows of a group of one rank; got "
            f"{shard_lengths}: give the rows of every rank, in order"
        )


def _by_value(
    segment_lengths, dilation_rates, causal, softmax_scale, phase, gradient, preset, classes, pad_like_torchscale,
    cu_seqlens, deterministic, name, layout, shard_lengths, *rest,
) -> tuple:  # fmt: skip
    """The options of a call as keys of a cache, which tensors and arrays are not: their numbers may change."""
    return (
        None if segment_lengths is None else whole_numbers("segment_lengths", segment_lengths),
        None if dilation_rates is None else whole_numbers("dilation_rates", dilation_rates),
        bool(causal),
        number("softmax_scale", softmax_scale),
        phase,
        gradient,
        preset,
        None if classes is None else tuple([whole_numbers("classes", each) for each in classes]),
        pad_like_torchscale,
        None if cu_seqlens is None else whole_numbers("cu_seqlens", cu_seqlens),
        deterministic,
        name,
        layout,
        None if shard_lengths is None else whole_numbers("shard_lengths", shard_lengths),
        *rest,
    )


def _hashable(values):
    return tuple(values) if type(values) is list else values


def _hashable_lists(lists):
    return tuple([_hashable(each) for each in lists]) if type(lists) is list else lists


def _check_forward_mode(q: Tensor, k: Tensor, v: Tensor) -> None:
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in (q, k, v)):
        raise NotImplementedError(
            "dilated attention has no forward-mode derivative; got an input with a tangent: use reverse mode, as "
            "torch.autograd.grad, torch.func.vjp and jacrev do"
        )


# What has been checked once: by all that the checks look at, and all that decides which handle it is.
_known: dict[tuple, tuple[Handle | None, str]] = {}


def _handle_of(q: Tensor, k: Tensor, v: Tensor, options: tuple) -> tuple[Handle | None, str]:
    """None where an operator has to say what is wrong, or to call the reference."""
    facts = (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, torch.get_num_threads(),
        wants_determinism(),
    )  # fmt: skip
    try:
        found = _known.get((facts, options))
    except TypeError:  # an array, or a list in a list
        found = None
    if found is None:
        _ops.check_tensors(q, k, v)
        options = _by_value(*options)
        spec = _cached_spec(*options)
        sizes = Sizes(*q.shape[:3], k.shape[2], q.shape[3])
        found = (one_rank(spec, sizes, q.dtype, q.device) if q.dtype in DTYPES else None), spec
        if len(_known) >= MOST_HANDLES:
            _known.clear()
        _known[facts, options] = found  # what is not a number is looked at again
    return found


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast as matrix products are: each in its type, but for float64."""
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    return q, k, v
