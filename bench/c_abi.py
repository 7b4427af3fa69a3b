"""The structs and functions of include/annulus/annulus.h that the benchmarks use."""

import ctypes


class Branch(ctypes.Structure):
    _fields_ = [
        ("segment", ctypes.c_int64),
        ("dilation", ctypes.c_int64),
        ("first_head", ctypes.c_int64),
        ("head_count", ctypes.c_int64),
        ("classes", ctypes.c_void_p),
        ("class_count", ctypes.c_int64),
    ]


class Problem(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("batch", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("branches", ctypes.POINTER(Branch)),
        ("branch_count", ctypes.c_int64),
        ("documents", ctypes.c_void_p),
        ("document_bounds", ctypes.c_int64),
        ("scale", ctypes.c_void_p),
        ("output_scale", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("preset", ctypes.c_int32),
        ("phase", ctypes.c_int32),
        ("gradient", ctypes.c_int32),
        ("causal", ctypes.c_int32),
        ("pad_like_torchscale", ctypes.c_int32),
    ]


class Options(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("instruction_set", ctypes.c_char_p),
        ("threads", ctypes.c_int32),
        ("deterministic", ctypes.c_int32),
        ("device", ctypes.c_char_p),
    ]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 4),
        ("stride", ctypes.c_int64 * 4),
    ]


class ForwardArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("q", Tensor),
        ("k", Tensor),
        ("v", Tensor),
        ("out", Tensor),
        ("lse", ctypes.c_void_p),
        ("lse_count", ctypes.c_size_t),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
    ]


class BackwardArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("q", Tensor),
        ("k", Tensor),
        ("v", Tensor),
        ("out", Tensor),
        ("dout", Tensor),
        ("dq", Tensor),
        ("dk", Tensor),
        ("dv", Tensor),
        ("lse", ctypes.c_void_p),
        ("lse_count", ctypes.c_size_t),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
    ]


def sized(struct, **fields):
    return struct(struct_size=ctypes.sizeof(struct), **fields)


def load_library(path):
    library = ctypes.CDLL(path)
    library.annulus_last_error.restype = ctypes.c_char_p
    library.annulus_version.restype = ctypes.c_char_p
    library.annulus_destroy.restype = None
    library.annulus_destroy.argtypes = [ctypes.c_void_p]
    for name in "create", "explain", "forward", "backward", "workspace_bytes":
        getattr(library, f"annulus_{name}").restype = ctypes.c_int
    library.annulus_create.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    library.annulus_forward.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.annulus_backward.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.annulus_explain.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    library.annulus_workspace_bytes.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    return library
