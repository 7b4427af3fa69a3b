"""Process groups as Annulus sees them: a transport over each, and the handles that its ranks have made together.

What ranks have to tell each other goes through memory of the host. A group that does not serve that (NCCL) gets one
beside it that does, of the same ranks, when it is first used.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import weakref

import torch
import torch.distributed as dist

from . import _library as c
from ._courier import Courier, timeout_on
from ._handles import MOST_HANDLES, RankHandle, Sizes, make_rank, wants_determinism
from ._spec import Spec, check_choice

if dist.is_available():
    # Functions of this module take the world's group of the moment of import for a default, and keep it to the end of
    # Python, when its threads may take the process down. torch imports it when a custom operator first runs; here it is
    # imported while there is no group yet, unless the program has made one before it imported annulus.
    import torch.distributed.nn.functional  # noqa: F401

LONGEST_NCCL_SECONDS = 60  # without a byte; a killed rank is noticed in a quarter of it


class Group:
    def __init__(self, process_group: dist.ProcessGroup):
        self.process_group = weakref.ref(process_group)
        self.size = dist.get_world_size(process_group)
        self._courier = Courier(_control_of(process_group))
        self._handles: collections.OrderedDict[tuple, RankHandle] = collections.OrderedDict()
        transport = ctypes.c_void_p()
        c.check(c.library().annulus_transport_create(self._courier.callbacks, ctypes.byref(transport)))
        self._transport = transport.value

    def close(self) -> None:
        """The process group is gone, and nobody can ask for a handle of it any more."""
        self._handles.clear()  # before their transport
        c.library().annulus_transport_destroy(self._transport)
        self._courier.end()

    def tell(self, error: BaseException) -> None:
        """The other ranks, why this one does not take part. A TransportError they have, or get, by themselves."""
        if not isinstance(error, c.TransportError):
            self._courier.tell(f"rank {self._courier.rank} gave up: {error}")

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
            wanted = check_choice("ANNULUS_PAYLOAD", os.environ.get("ANNULUS_PAYLOAD", "auto"), c.PAYLOADS)
            moves = {"payload": c.PAYLOADS[wanted], "timeout_ms": int(1000 * seconds)}
            spec = Spec.read(text)
            try:
                found = make_rank(self._transport, self, spec, sizes, dtype, device, self.size, **moves)
            except c.TransportError as error:
                if spec.shard_lengths or not ("'boundaries = " in str(error) or "'tokens = " in str(error)):
                    raise
                raise c.TransportError(
                    f"{error}; without shard_lengths all ranks must have as many rows, and this one, "
                    f"{self._courier.rank}, has {sizes.tokens // self.size}: give shard_lengths, the rows of every rank"
                ) from error
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


def process_group_of(group: dist.ProcessGroup | dist.DeviceMesh | str) -> dist.ProcessGroup:
    """Of which this process is a rank: given itself, by its name or as a DeviceMesh of one dimension."""
    if isinstance(group, str):
        try:
            group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
        except (LookupError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"group must be a process group that there is; got the name {group!r}, and this process has none of "
                "that name: it was destroyed, or is made in other processes alone; make it here, and give that one"
            ) from error
    elif isinstance(group, dist.DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group must be of one dimension; got a DeviceMesh of {group.ndim}: give the one along which the "
                "sequence is spread, mesh['name']"
            )
        group = group.get_group()
    is_group = isinstance(group, dist.ProcessGroup)
    if is_group and _rank_in(group) >= 0:
        return group
    if is_group or group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"this process must be one of the group's ranks; got a group that rank {dist.get_rank()} of the world is "
            "not in: make the call on the group's ranks alone"
        )
    raise ValueError(
        f"group must be a torch.distributed process group, its name or a DeviceMesh; got {group!r}: give, for example, "
        "dist.group.WORLD"
    )


def _rank_in(group: dist.ProcessGroup) -> int:
    try:
        return dist.get_rank(group)
    except ValueError as error:
        raise ValueError(
            "group must be a process group that there is; got one that was destroyed: make another, and give that one"
        ) from error


def name_of(group: dist.ProcessGroup | dist.DeviceMesh | str) -> str:
    """The name of a group of several ranks; "" for one rank alone."""
    there = group if torch.compiler.is_compiling() else process_group_of(group)
    if isinstance(there, str):
        return there  # the operator looks it up
    return there.group_name if dist.get_world_size(there) > 1 else ""


def tell(name: str, error: BaseException) -> None:
    """The other ranks of a group, that this one has failed and why. Where they still have to meet over it, in their
    first call, they do so here."""
    group_of(name).tell(error)


@contextlib.contextmanager
def telling(name: str):
    try:
        yield
    except Exception as error:
        tell(name, error)
        raise


def group_of(name: str) -> Group:
    there = process_group_of(name)
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
    there = process_group_of(name)
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
