"""Handles: the library's plans, one for each problem and device, made once and kept.

A handle of one rank is kept in a cache of the process. Those of a process group are kept with the group: making one is
a collective, and all ranks of a group make the same calls in the same order, so their caches stay alike.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import weakref

import torch

from . import _library as c
from ._spec import Spec

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MOST_HANDLES = 256
MOST_VIEWS = 64  # a handle


class Sizes(collections.namedtuple("Sizes", "batch tokens heads kv_heads head_dim")):
    """Of the whole problem: tokens over all ranks."""


def make_problem(spec: Spec, sizes: Sizes, dtype: torch.dtype) -> c.Problem:
    branches = (c.Branch * len(spec.segments))()
    for i, (segment, dilation) in enumerate(zip(spec.segments, spec.dilations, strict=True)):
        branches[i].segment, branches[i].dilation = segment, dilation
        if spec.classes:
            branches[i].classes = c.integers(spec.classes[i])
            branches[i].class_count = len(spec.classes[i])
    return c.Problem(
        **sizes._asdict(),
        branches=branches,
        branch_count=len(branches),
        documents=c.integers(spec.documents) if spec.documents else None,
        document_bounds=len(spec.documents),
        scale=None if spec.scale is None else ctypes.pointer(ctypes.c_double(spec.scale)),
        dtype=DTYPES.get(dtype, 0),
        preset=c.PRESETS[spec.preset],
        phase=c.PHASES[spec.phase],
        gradient=c.GRADIENTS[spec.gradient],
        causal=spec.causal,
        pad_like_torchscale=spec.pad,
    )


def make_options(device: torch.device, threads: int, deterministic: bool = False) -> c.Options:
    if device.type == "cpu":
        return c.Options(threads=threads)  # always deterministic
    index = 0 if device.index is None else device.index
    return c.Options(device=f"{device.type}:{index}".encode(), deterministic=deterministic)


def make_sharding(ranks: int, layout: str, shard_lengths: tuple[int, ...]) -> c.Sharding:
    """Lengths are boundaries to the library; the other layouts know them from the number of tokens."""
    sharding = c.Sharding(ranks=ranks, layout=c.LAYOUTS[layout])
    if shard_lengths and layout == "contiguous":
        bounds = [0]
        for length in shard_lengths:
            bounds.append(bounds[-1] + length)
        sharding.boundaries, sharding.boundary_count = c.integers(bounds), len(bounds)
    return sharding


class Handle:
    """One rank's attention. `_prefix` is that of the C functions."""

    _prefix = "annulus"

    def __init__(self, pointer: int, dtype: torch.dtype):
        self._pointer = pointer
        self._dtype_code = DTYPES.get(dtype, 0)
        call = functools.partial(getattr, c.library())
        self._forward, self._backward = call(f"{self._prefix}_forward"), call(f"{self._prefix}_backward")
        weakref.finalize(
            self, call("annulus_rank_destroy" if self._prefix != "annulus" else "annulus_destroy"), pointer
        )
        self._workspace: dict[int, int] = {}
        self._views: dict[tuple, tuple[bytes, ...]] = {}

    def _check(self, status: int) -> None:
        c.check(status)

    def _ask(self, question: str, *arguments) -> None:
        self._check(getattr(c.library(), f"{self._prefix}_{question}")(self._pointer, *arguments))

    def workspace_bytes(self, which: int) -> int:
        if which not in self._workspace:
            bytes_ = ctypes.c_size_t()
            self._ask("workspace_bytes", which, ctypes.byref(bytes_))
            self._workspace[which] = bytes_.value
        return self._workspace[which]

    def memory(self, which: int) -> dict[str, int]:
        count = ctypes.c_size_t()
        self._ask("memory", which, None, 0, ctypes.byref(count))
        components = (c.MemoryComponent * count.value)()
        self._ask("memory", which, components, count.value, ctypes.byref(count))
        named: dict[str, int] = {}
        for each in components:
            named[each.name.decode()] = named.get(each.name.decode(), 0) + each.bytes
        return named

    def explain(self) -> str:
        length = ctypes.c_size_t()
        self._ask("explain", None, 0, ctypes.byref(length))
        buffer = ctypes.create_string_buffer(length.value + 1)
        self._ask("explain", buffer, len(buffer), None)
        return buffer.value.decode()

    def forward(self, q, k, v) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse."""
        key = (q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride())
        views = self._views.get(key) or self._remember(key, (q, k, v), (q,))
        if not views:
            return self.forward(_readable(q), _readable(k), _readable(v))
        out, lse, room = _empty_like(q), _empty_lse(q), self._room(c.FORWARD, q.device)
        arguments = c.FORWARD_ARGS.pack(
            c.FORWARD_ARGS.size,
            q.data_ptr(), views[0], k.data_ptr(), views[1], v.data_ptr(), views[2], out.data_ptr(), views[3],
            lse.data_ptr(), lse.numel(), room.data_ptr(), room.numel(), _stream(q),
        )  # fmt: skip
        self._check(self._forward(self._pointer, arguments))
        return out, lse

    def backward(self, dout, q, k, v, out, lse) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk and dv."""
        key = (
            q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), out.shape, out.stride(), dout.shape,
            dout.stride(),
        )  # fmt: skip
        views = self._views.get(key) or self._remember(key, (q, k, v, out, dout), (q, k, v))
        if not views:
            return self.backward(*(_readable(each) for each in (dout, q, k, v, out)), lse)
        lse, room = lse.contiguous(), self._room(c.BACKWARD, q.device)
        dq, dk, dv = _empty_like(q), _empty_like(k), _empty_like(v)
        arguments = c.BACKWARD_ARGS.pack(
            c.BACKWARD_ARGS.size,
            q.data_ptr(), views[0], k.data_ptr(), views[1], v.data_ptr(), views[2], out.data_ptr(), views[3],
            dout.data_ptr(), views[4], dq.data_ptr(), views[5], dk.data_ptr(), views[6], dv.data_ptr(), views[7],
            lse.data_ptr(), lse.numel(), room.data_ptr(), room.numel(), _stream(q),
        )  # fmt: skip
        self._check(self._backward(self._pointer, arguments))
        return dq, dk, dv

    def _room(self, which: int, device: torch.device) -> torch.Tensor:
        return torch.empty(self.workspace_bytes(which), dtype=torch.uint8, device=device)

    def _remember(self, key: tuple, read: tuple, written: tuple) -> tuple[bytes, ...]:
        """What the library is told of tensors beside their data: of those that it reads, then of new ones like
        `written`. Nothing where it cannot read one of them as it lies."""
        if not all(_is_readable(tensor) for tensor in read):
            return ()
        if len(self._views) >= MOST_VIEWS:
            self._views.clear()
        views = [self._view(tensor) for tensor in read]
        views += [c.VIEW.pack(self._dtype_code, *tensor.shape, 0, 0, 0, 0) for tensor in written]  # dense
        self._views[key] = tuple(views)
        return self._views[key]

    def _view(self, tensor: torch.Tensor) -> bytes:
        return c.VIEW.pack(self._dtype_code, *tensor.shape, *tensor.stride()[:3], 1)


class RankHandle(Handle):
    """The attention of one rank of several. Keeps what it was made with."""

    _prefix = "annulus_rank"

    def __init__(self, pointer: int, dtype: torch.dtype, group):
        super().__init__(pointer, dtype)
        self._group = group

    def _check(self, status: int) -> None:
        self._group.check(status)

    def forward(self, *tensors):
        try:
            return super().forward(*tensors)
        except Exception as error:  # no memory, say
            self._group.tell(error)
            raise

    def backward(self, *tensors):
        try:
            return super().backward(*tensors)
        except Exception as error:
            self._group.tell(error)
            raise

    def traffic(self, which: int) -> tuple[int, int]:
        sent, received = ctypes.c_int64(), ctypes.c_int64()
        self._ask("traffic", which, ctypes.byref(sent), ctypes.byref(received))
        return sent.value, received.value


def _stream(tensor: torch.Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(tensor.get_device()) if tensor.is_cuda else 0


def _is_readable(tensor: torch.Tensor) -> bool:
    """By the library, as it lies: the elements of a head are contiguous."""
    return tensor.stride(-1) == 1 or tensor.shape[-1] == 1 or tensor.numel() == 0


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if _is_readable(tensor) else tensor.contiguous()


# Of the ways to ask torch for memory these are the fastest, by microseconds: see bench/torch_overhead.py.
def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor) if tensor.is_contiguous() else tensor.new_empty(tensor.shape)


def _empty_lse(q: torch.Tensor) -> torch.Tensor:
    batch, tokens, heads, _ = q.shape
    return torch.empty_strided(
        (batch, heads, tokens), (heads * tokens, tokens, 1), dtype=torch.float32, device=q.device
    )


@functools.lru_cache(maxsize=MOST_HANDLES)
def _one_rank(
    text: str, sizes: Sizes, dtype: torch.dtype, device: torch.device, threads: int, deterministic: bool
) -> Handle:
    pointer = ctypes.c_void_p()
    spec = Spec.read(text)
    options = make_options(device, threads, spec.deterministic or deterministic)
    c.check(c.library().annulus_create(make_problem(spec, sizes, dtype), options, ctypes.byref(pointer)))
    return Handle(pointer.value or 0, dtype)


def one_rank(spec: str, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Handle:
    return _one_rank(spec, sizes, dtype, device, torch.get_num_threads(), wants_determinism())


def wants_determinism() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def make_rank(transport, group, spec: Spec, sizes: Sizes, dtype, device, ranks: int, **moves) -> RankHandle:
    """A collective of the ranks of the transport. `group` turns a status into an exception. `moves`: how GPUs do."""
    device_options = make_options(device, torch.get_num_threads(), spec.deterministic or wants_determinism())
    options = c.RankOptions(
        device=ctypes.pointer(device_options),
        strategy=c.STRATEGIES[spec.strategy],
        reproducible=spec.reproducible,
        **moves,
    )
    problem, sharding = make_problem(spec, sizes, dtype), make_sharding(ranks, spec.layout, spec.shard_lengths)
    pointer = ctypes.c_void_p()
    group.check(c.library().annulus_rank_create(problem, sharding, transport, options, ctypes.byref(pointer)))
    return RankHandle(pointer.value or 0, dtype, group)


def reference(spec: Spec, q, k, v, dout=None) -> tuple[torch.Tensor, ...]:
    """fp64 by the reference: out and lse, or with dout the three gradients. Dense tensors on the CPU."""
    batch, tokens, heads, head_dim = q.shape
    problem = make_problem(spec, Sizes(batch, tokens, heads, k.shape[2], head_dim), q.dtype)
    dense = {"q": q.contiguous(), "k": k.contiguous(), "v": v.contiguous()}
    names: tuple[str, ...]
    results: tuple[torch.Tensor, ...]
    if dout is None:
        names, results = ("out", "lse"), (torch.empty_like(dense["q"]), q.new_empty(batch, heads, tokens))
    else:
        dense["dout"] = dout.contiguous()
        names, results = ("dq", "dk", "dv"), tuple(torch.empty_like(dense[name]) for name in "qkv")
    pointers = {name: tensor.data_ptr() for name, tensor in (*dense.items(), *zip(names, results, strict=True))}
    c.check(c.library().annulus_reference(problem, c.ReferenceArgs(**pointers, threads=torch.get_num_threads())))
    return results
