"""Process groups as Annulus sees them: a transport over each, and the handles that its ranks have made together.

What ranks have to tell each other goes through memory of the host. A group that does not serve that (NCCL) gets one
beside it that does, of the same ranks, when it is first used.
"""

from __future__ import annotations

import collections
import ctypes
import os
import weakref

import torch
import torch.distributed as dist

from . import _library as c
from ._courier import Courier, timeout_on
from ._handles import MOST_HANDLES, RankHandle, Sizes, make_rank, wants_determinism
from ._spec import Spec, check_choice

LONGEST_NCCL_SECONDS = 60  # without a byte; a killed rank is noticed in a quarter of it


class Group:
    def __init__(self, process_group: dist.ProcessGroup):
        self.process_group = weakref.ref(process_group)
        self.size = dist.get_world_size(process_group)
        self._courier = Courier(_control_of(process_group))
        wanted = os.environ.get("ANNULUS_PAYLOAD", "auto")
        self._payload = c.PAYLOADS[check_choice("ANNULUS_PAYLOAD", wanted, c.PAYLOADS)]
        self._handles: collections.OrderedDict[tuple, RankHandle] = collections.OrderedDict()
        transport = ctypes.c_void_p()
        c.check(c.library().annulus_transport_create(self._courier.callbacks, ctypes.byref(transport)))
        self._transport = transport.value

    def close(self) -> None:
        """The process group is gone, and nobody can ask for a handle of it any more."""
        self._handles.clear()  # before their transport
        c.library().annulus_transport_destroy(self._transport)
        self._courier.end()

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
        key = (text, sizes, dtype, device, torch.get_num_threads(), wants_determinism())
        found = self._handles.get(key)
        if found is None:
            seconds = min(self._courier.timeout_s or LONGEST_NCCL_SECONDS, LONGEST_NCCL_SECONDS)
            moves = {"payload": self._payload, "timeout_ms": int(1000 * seconds)}
            found = make_rank(self._transport, self, Spec.read(text), sizes, dtype, device, self.size, **moves)
            self._handles[key] = found
            if len(self._handles) > MOST_HANDLES:
                self._handles.popitem(last=False)
        else:
            self._handles.move_to_end(key)
        return found


_groups: dict[str, Group] = {}


def _control_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group itself where it moves memory of the host, else a new one of gloo: then a collective."""
    try:
        if group._get_backend(torch.device("cpu")).name() != "nccl":
            return group
    except RuntimeError:  # none for the CPU
        pass
    more = {"timeout": timeout_on(group, "cuda"), "use_local_synchronization": True}  # others need not take part
    return dist.new_group(dist.get_process_group_ranks(group), backend="gloo", **more)


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
        found = _groups[name] = Group(there)
        weakref.finalize(there, _close, name, found).atexit = False
    return found


def _close(name: str, group: Group) -> None:
    if _groups.get(name) is group:
        del _groups[name]
    group.close()


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
