"""Which rank has which rows of a sequence: positions, shard, unshard."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from . import _library as c
from ._groups import process_group_of
from ._handles import make_sharding
from ._spec import check_choice, whole_numbers


def positions(
    tokens: int,
    group: dist.ProcessGroup | dist.DeviceMesh | str | None = None,
    *,
    layout: str = "contiguous",
    shard_lengths: Sequence[int] | Tensor | None = None,
    rank: int | None = None,
    ranks: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The global positions of a rank's rows, ``[rows]`` in int64, in their order: what rotary embeddings need.

    Args:
        tokens: of the whole sequence.
        group: whose rank this process is, or its name; or give ``rank`` and ``ranks``. None of them: one rank.
        layout: ``"contiguous"`` blocks, ``"zigzag"`` (rank g has blocks g and 2p - 1 - g of 2p: a causal load that is
            even) or ``"striped"`` (t mod p).
        shard_lengths: the rows of every rank, contiguous layout; None: as even as whole rows allow.
    """
    rank, ranks = _place(group, rank, ranks)
    if tokens < 0:
        raise ValueError(f"tokens must be at least 0; got {tokens}: give those of the whole sequence")
    check_choice("layout", layout, c.LAYOUTS)
    lengths = checked_lengths(tokens, ranks, layout, shard_lengths)
    sharding = make_sharding(ranks, layout, lengths)
    count = ctypes.c_size_t()
    found = torch.empty(tokens // ranks + 2 if not lengths else lengths[rank], dtype=torch.int64)
    call = c.library().annulus_positions
    c.check(call(sharding, tokens, rank, found.data_ptr() or None, found.numel(), ctypes.byref(count)))
    return found[: count.value].to(device)


def _place(group, rank, ranks) -> tuple[int, int]:
    if group is not None:
        if ranks is not None:
            raise ValueError(f"ranks are those of the group where one is given; got ranks = {ranks} too: leave it out")
        there = process_group_of(group)
        return dist.get_rank(there) if rank is None else rank, dist.get_world_size(there)
    if (rank is None) != (ranks is None):
        raise ValueError(f"rank and ranks go together; got {rank} and {ranks}: give both, or a group")
    if rank is None or ranks is None:
        return 0, 1
    check_place(rank, ranks)
    return rank, ranks


def check_place(rank: int, ranks: int) -> None:
    if ranks < 1 or not 0 <= rank < ranks:
        raise ValueError(
            f"ranks must be at least 1, and rank lies in [0, ranks); got rank {rank} of {ranks}: count from 0"
        )


def checked_lengths(tokens: int, ranks: int, layout: str, shard_lengths) -> tuple[int, ...]:
    """Empty where the layout says them."""
    if shard_lengths is None:
        return ()
    lengths = whole_numbers("shard_lengths", shard_lengths)
    if len(lengths) != ranks or sum(lengths) != tokens or min(lengths) < 0:
        raise ValueError(
            f"shard_lengths must be {ranks} numbers, one a rank, that sum to tokens = {tokens}; got {list(lengths)}: "
            "give the rows of every rank, in order"
        )
    if layout != "contiguous":
        even = tuple(positions(tokens, rank=rank, ranks=ranks, layout=layout).numel() for rank in range(ranks))
        if lengths != even:
            raise ValueError(
                f"the layout {layout} has shards of {list(even)} rows for {tokens} tokens; got {list(lengths)}: leave "
                "shard_lengths out, or use the layout contiguous"
            )
        return ()
    return lengths


def shard(
    x: Tensor,
    group: dist.ProcessGroup | dist.DeviceMesh | str,
    *,
    dim: int = 1,
    layout: str = "contiguous",
    shard_lengths: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """This rank's rows of a tensor that all ranks have whole: ``[..., tokens, ...]`` to ``[..., rows, ...]``.

    A view where the layout is contiguous, else a copy. Differentiable.
    """
    mine = positions(x.shape[dim], group, layout=layout, shard_lengths=shard_lengths)
    if layout == "contiguous":
        return x.narrow(dim, int(mine[0]) if mine.numel() > 0 else 0, mine.numel())
    return x.index_select(dim, mine.to(x.device))


def unshard(
    x: Tensor,
    group: dist.ProcessGroup | dist.DeviceMesh | str,
    *,
    dim: int = 1,
    layout: str = "contiguous",
    shard_lengths: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """The whole tensor on every rank from each one's rows, the inverse of `shard`. A collective.

    Differentiable, under the rule that the loss is the sum of the losses of all ranks: the gradients that the ranks
    have for a row are summed.
    """
    return _Unshard.apply(x, process_group_of(group), dim, layout, shard_lengths)


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, dim, layout, shard_lengths):
        ranks = dist.get_world_size(group)
        rows = _all_rows(x.shape[dim], group, x.device)
        tokens = sum(rows)
        shared = dict(ranks=ranks, layout=layout, shard_lengths=rows if layout == "contiguous" else shard_lengths)
        order = [positions(tokens, rank=rank, **shared) for rank in range(ranks)]
        ctx.group, ctx.dim, ctx.mine = group, dim, order[dist.get_rank(group)].to(x.device)
        moved = x.movedim(dim, 0)
        padded = moved.new_zeros((max(rows), *moved.shape[1:]))
        padded[: moved.shape[0]] = moved
        gathered = [torch.empty_like(padded) for _ in range(ranks)]
        dist.all_gather(gathered, padded, group=group)
        whole = moved.new_empty((tokens, *moved.shape[1:]))
        for each, count, place in zip(gathered, rows, order, strict=True):
            whole[place.to(x.device)] = each[:count]
        return whole.movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.index_select(ctx.dim, ctx.mine), None, None, None, None


def _all_rows(own: int, group: dist.ProcessGroup, device: torch.device) -> list[int]:
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, torch.tensor([own], device=device), group=group)
    return [int(count) for count in counts]
