"""The C ABI (include/annulus/annulus.h and annulus_ranks.h) through ctypes: its structs, its errors, and the library.

Structs that are filled on every call are packed by `struct` formats, which is several times as fast as assigning to the
fields of ctypes structures; the library checks their size.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import struct
from ctypes import POINTER, c_char, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p

FORWARD, BACKWARD = 0, 1

PRESETS = {"longnet": 0, "torchscale": 1, "residue": 2, "head_groups": 3}
PHASES = {"": 0, "by_head": 1, "by_head_block": 2, "every": 3, "table": 4}
GRADIENTS = {"": 0, "exact": 1, "detached": 2}
LAYOUTS = {"contiguous": 0, "zigzag": 1, "striped": 2}
STRATEGIES = {"auto": 0, "exchange": 1, "reshard": 2, "ring": 3, "gather": 4, "replicated": 5}
PAYLOADS = {"auto": 0, "staged": 1, "nccl": 2}


class TransportError(RuntimeError):
    """A rank was lost, gave up or disagrees: every rank of the group gets one, and the group computes no more."""


class Sized(ctypes.Structure):
    """A struct that begins with its own size; all other fields start out as zeros."""

    def __init__(self, **fields):
        super().__init__(struct_size=ctypes.sizeof(type(self)), **fields)


class Branch(ctypes.Structure):
    _fields_ = [
        ("segment", c_int64),
        ("dilation", c_int64),
        ("first_head", c_int64),
        ("head_count", c_int64),
        ("classes", POINTER(c_int64)),
        ("class_count", c_int64),
    ]


class Problem(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("batch", c_int64),
        ("tokens", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("branches", POINTER(Branch)),
        ("branch_count", c_int64),
        ("documents", POINTER(c_int64)),
        ("document_bounds", c_int64),
        ("scale", POINTER(c_double)),
        ("output_scale", POINTER(c_double)),
        ("dtype", c_int32),
        ("preset", c_int32),
        ("phase", c_int32),
        ("gradient", c_int32),
        ("causal", c_int32),
        ("pad_like_torchscale", c_int32),
    ]


class Options(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("instruction_set", c_char_p),
        ("threads", c_int32),
        ("deterministic", c_int32),
        ("device", c_char_p),
    ]


class ReferenceArgs(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        *((name, c_void_p) for name in ("q", "k", "v", "dout", "out", "lse", "dq", "dk", "dv")),
        ("threads", c_int32),
        ("reserved", c_int32),
    ]


class MemoryComponent(ctypes.Structure):
    _fields_ = [("name", c_char * 32), ("bytes", c_int64)]


class Sharding(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("ranks", c_int32),
        ("layout", c_int32),
        ("boundaries", POINTER(c_int64)),
        ("boundary_count", c_int64),
    ]


class RankOptions(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("device", POINTER(Options)),
        ("strategy", c_int32),
        ("reproducible", c_int32),
        ("slot_bytes", c_int64),
        ("timeout_ms", c_int64),
        ("payload", c_int32),
        ("reserved", c_int32),
    ]


class Message(ctypes.Structure):
    _fields_ = [("peer", c_int32), ("reserved", c_int32), ("data", c_void_p), ("bytes", c_int64)]


class Exchange(ctypes.Structure):
    _fields_ = [
        ("plan", c_uint64),
        ("step", c_int64),
        ("sends", POINTER(Message)),
        ("send_count", c_int64),
        ("receives", POINTER(Message)),
        ("receive_count", c_int64),
    ]


Post = ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(Exchange), c_void_p, c_size_t)
Progress = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t)
Abort = ctypes.CFUNCTYPE(None, c_void_p, c_char_p)


class TransportCallbacks(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("context", c_void_p),
        ("rank", c_int32),
        ("size", c_int32),
        ("post", Post),
        ("wait", Progress),
        ("poll", Progress),
        ("abort", Abort),
        ("arrived", POINTER(c_int32)),
    ]


VIEW = struct.Struct("@i4x8q")  # what a tensor has beside its data: dtype, shape, stride
_TENSOR = f"P{VIEW.size}s"
_REST = "PNPNP"  # lse and its count, workspace and its bytes, stream
FORWARD_ARGS = struct.Struct("@N" + 4 * _TENSOR + _REST)  # q, k, v, out
BACKWARD_ARGS = struct.Struct("@N" + 8 * _TENSOR + _REST)  # q, k, v, out, dout, dq, dk, dv


def integers(values) -> ctypes.Array:
    return (c_int64 * len(values))(*values)


def _find() -> pathlib.Path:
    named = os.environ.get("ANNULUS_LIBRARY")
    if named:
        return pathlib.Path(named)
    return pathlib.Path(__file__).with_name("libannulus.so")


_FUNCTIONS = {  # all return a status but those named below
    "annulus_create": [POINTER(Problem), POINTER(Options), POINTER(c_void_p)],
    "annulus_destroy": [c_void_p],
    "annulus_forward": [c_void_p, c_char_p],
    "annulus_backward": [c_void_p, c_char_p],
    "annulus_workspace_bytes": [c_void_p, c_int, POINTER(c_size_t)],
    "annulus_explain": [c_void_p, c_char_p, c_size_t, POINTER(c_size_t)],
    "annulus_memory": [c_void_p, c_int, POINTER(MemoryComponent), c_size_t, POINTER(c_size_t)],
    "annulus_reference": [POINTER(Problem), POINTER(ReferenceArgs)],
    "annulus_transport_create": [POINTER(TransportCallbacks), POINTER(c_void_p)],
    "annulus_transport_destroy": [c_void_p],
    "annulus_rank_create": [POINTER(Problem), POINTER(Sharding), c_void_p, POINTER(RankOptions), POINTER(c_void_p)],
    "annulus_rank_destroy": [c_void_p],
    "annulus_rank_forward": [c_void_p, c_char_p],
    "annulus_rank_backward": [c_void_p, c_char_p],
    "annulus_rank_workspace_bytes": [c_void_p, c_int, POINTER(c_size_t)],
    "annulus_rank_explain": [c_void_p, c_char_p, c_size_t, POINTER(c_size_t)],
    "annulus_rank_memory": [c_void_p, c_int, POINTER(MemoryComponent), c_size_t, POINTER(c_size_t)],
    "annulus_rank_traffic": [c_void_p, c_int, POINTER(c_int64), POINTER(c_int64)],
    "annulus_positions": [POINTER(Sharding), c_int64, c_int32, c_void_p, c_size_t, POINTER(c_size_t)],
    "annulus_version": [],
    "annulus_last_error": [],
}


@functools.cache
def library() -> ctypes.CDLL:
    """The shared library, loaded once: ANNULUS_LIBRARY if that is set, else the one in this package."""
    path = _find()
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise RuntimeError(
            f"annulus needs its shared library; got '{error}' for {path}: install the package by `pip install .`, "
            "install libhwy where that is what is missing, or set ANNULUS_LIBRARY to a libannulus.so"
        ) from error
    for name, arguments in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.argtypes = arguments
        function.restype = None if name.endswith("_destroy") else c_int
    loaded.annulus_version.restype = loaded.annulus_last_error.restype = c_char_p
    return loaded


_ERRORS = {1: ValueError, 2: NotImplementedError, 5: TransportError}


def check(status: int) -> None:
    """Raises what a status means: ValueError for bad input, else a RuntimeError or one of its subclasses."""
    if status != 0:
        raise _ERRORS.get(status, RuntimeError)(library().annulus_last_error().decode(errors="replace"))
