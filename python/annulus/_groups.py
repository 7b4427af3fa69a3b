"""Process groups as Annulus sees them: a transport over each, and the handles that its ranks have made together."""

from __future__ import annotations

import collections
import ctypes
import weakref

import torch
import torch.distributed as dist

from . import _library as c
from ._courier import Courier
from ._handles import MOST_HANDLES, RankHandle, Sizes, make_rank
from ._spec import Spec


class Group:
    def __init__(self, process_group: dist.ProcessGroup):
        self.process_group = weakref.ref(process_group)
        self.size = dist.get_world_size(process_group)
        self._courier = Courier(process_group)
        self._handles: collections.OrderedDict[tuple, RankHandle] = collections.OrderedDict()
        transport = ctypes.c_void_p()
        c.check(c.library().annulus_transport_create(self._courier.callbacks, ctypes.byref(transport)))
        self._transport = transport.value

    def check(self, status: int) -> None:
        """As the library's, but an exception that came from a callback is the cause, and Ctrl-C stays what it is."""
        cause = self._courier.failure
        if status != 0 and cause is not None and not isinstance(cause, Exception):
            raise cause
        try:
            c.check(status)
        except c.TransportError as error:
            raise error from cause

    def handle(self, text: str, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> RankHandle:
        key = (text, sizes, dtype, device, torch.get_num_threads())
        found = self._handles.get(key)
        if found is None:
            found = make_rank(self._transport, self, Spec.read(text), sizes, dtype, device, self.size)
            self._handles[key] = found
            if len(self._handles) > MOST_HANDLES:
                self._handles.popitem(last=False)
        else:
            self._handles.move_to_end(key)
        return found


_groups: dict[str, Group] = {}


def process_group(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def process_group_of(group: dist.ProcessGroup | str | None) -> dist.ProcessGroup | None:
    return process_group(group) if isinstance(group, str) else group


def name_of(group: dist.ProcessGroup | str | None) -> str:
    """The name of a group of several ranks; "" for one rank alone."""
    if group is None:
        return ""
    if isinstance(group, str):
        return group
    return group.group_name if dist.get_world_size(group) > 1 else ""


def group_of(name: str) -> Group:
    there = process_group(name)
    found = _groups.get(name)
    if found is None or found.process_group() is not there:
        backend = dist.get_backend(there)
        if backend == "nccl":
            raise ValueError(
                "sequences over several ranks move through host memory in this version, which the backend nccl does "
                "not serve; got a group of nccl: pass a group of gloo, by torch.distributed.new_group(backend='gloo')"
            )
        found = _groups[name] = Group(there)
    return found


def total_tokens(name: str, rows: int, shard_lengths: tuple[int, ...]) -> int:
    """Tokens of the whole sequence, when this rank has `rows` of them."""
    if not name:
        return rows
    there = process_group(name)
    rank, ranks = dist.get_rank(there), dist.get_world_size(there)
    if not shard_lengths:
        return rows * ranks
    if len(shard_lengths) != ranks:
        raise ValueError(
            f"shard_lengths must have one length a rank, {ranks} of them; got {len(shard_lengths)}: give the rows of "
            "every rank, in order"
        )
    if shard_lengths[rank] != rows:
        raise ValueError(
            f"this rank, {rank}, must have as many rows as shard_lengths says, {shard_lengths[rank]}; got {rows}: "
            "shard the sequence by annulus.shard with the same shard_lengths"
        )
    return sum(shard_lengths)
