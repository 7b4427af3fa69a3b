"""A spec: all that decides a result beside the tensors themselves, as one string.

Custom ops take strings and tensors, torch.compile holds strings as constants, and caches of handles want a key: so what
users give as twenty arguments is written down once, and read back where a handle is made.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import TypedDict

from torch import Tensor

from . import _library as c


class Options(TypedDict, total=False):
    """Of the pattern, and of how ranks do it: those of make_spec that users give by name, everywhere alike."""

    causal: bool
    softmax_scale: float | None
    phase: str | None
    gradient: str | None
    preset: str | None
    classes: Sequence[Sequence[int]] | Tensor | None
    pad_like_torchscale: bool
    cu_seqlens: Sequence[int] | Tensor | None
    deterministic: bool
    layout: str
    shard_lengths: Sequence[int] | Tensor | None
    strategy: str
    reproducible: bool


@dataclasses.dataclass(frozen=True)
class Spec:
    segments: tuple[int, ...]
    dilations: tuple[int, ...]
    classes: tuple[tuple[int, ...], ...]  # phase table alone: the class of each head, by branch
    documents: tuple[int, ...]  # cu_seqlens; empty: one document
    causal: bool
    scale: float | None
    phase: str  # "": the preset's
    gradient: str  # "": the preset's
    preset: str
    pad: bool
    deterministic: bool
    group: str  # "": one rank
    layout: str
    shard_lengths: tuple[int, ...]  # empty: even
    strategy: str
    reproducible: bool

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def read(text: str) -> Spec:
        fields = text.split(";")
        return Spec(
            segments=_read_list(fields[0]),
            dilations=_read_list(fields[1]),
            classes=tuple(_read_list(each) for each in fields[2].split("/")) if fields[2] else (),
            documents=_read_list(fields[3]),
            causal=fields[4] == "1",
            scale=float(fields[5]) if fields[5] else None,
            phase=fields[6],
            gradient=fields[7],
            preset=fields[8],
            pad=fields[9] == "1",
            deterministic=fields[10] == "1",
            layout=fields[11],
            shard_lengths=_read_list(fields[12]),
            strategy=fields[13],
            reproducible=fields[14] == "1",
            group=";".join(fields[15:]),  # the one field whose text is not ours
        )


def _read_list(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",")) if text else ()


def _list(numbers: Sequence[int]) -> str:
    return ",".join([f"{number}" for number in numbers])  # not str(), which torch.compile has for no symbol


def _write(
    segments, dilations, classes, documents, causal, scale, phase, gradient, preset, pad, deterministic, group, layout,
    shard_lengths, strategy, reproducible,
) -> str:  # fmt: skip
    """Plain string work, so that torch.compile can trace it."""
    return ";".join(
        [
            _list(segments),
            _list(dilations),
            "/".join([_list(each) for each in classes]),
            _list(documents),
            "1" if causal else "0",
            "" if scale is None else f"{scale}",
            phase,
            gradient,
            preset,
            "1" if pad else "0",
            "1" if deterministic else "0",
            layout,
            _list(shard_lengths),
            strategy,
            "1" if reproducible else "0",
            group,
        ]
    )


def check_choice(what: str, value: str, known) -> str:
    if value not in known:
        names = ", ".join(name for name in known if name)
        raise ValueError(f"{what} must be one of {names}; got {value!r}: give one of these names")
    return value


def check_names(who: str, options, elsewhere: dict[str, str] | None = None) -> None:
    """Options that were given by name must have a name that there is; `elsewhere` says where else others belong."""
    for name in options:
        if elsewhere is not None and name in elsewhere:
            raise TypeError(f"{who} takes no {name}: {elsewhere[name]}")
        if name not in Options.__annotations__:
            raise TypeError(f"{who} has no option {name!r}: its options are {', '.join(Options.__annotations__)}")


def whole_numbers(what: str, values) -> tuple[int, ...]:
    """As ints. A tensor must not become the key of a cache: it would be one by its identity, and its numbers change."""
    if not isinstance(values, (list, tuple)):
        if hasattr(values, "tolist"):  # of torch or numpy
            values = values.tolist()
        if isinstance(values, int):
            return (values,)
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        raise ValueError(
            f"{what} must be whole numbers, in one list; got {values!r}: give a list of ints, such as [2048, 4096]"
        ) from None


def number(what: str, value) -> float | None:
    if value is None:
        return None
    if isinstance(value, Tensor) and value.requires_grad:
        raise ValueError(
            f"{what} must be a number, to which no gradient goes; got a tensor that requires one: multiply q by it, "
            f"and give {what}=1.0"
        )
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{what} must be one number; got {value!r}: give a float, or None") from None


def _in_range(what: str, values) -> tuple[int, ...]:
    """Of int64, which ctypes would cut them down to."""
    found = whole_numbers(what, values)
    for value in found:
        if not -(1 << 63) <= value < 1 << 63:
            raise ValueError(f"{what} must be numbers that fit into 64 bits; got {value}: give smaller ones")
    return tuple([int(value) for value in found])  # True is 1


def make_spec(
    segment_lengths,
    dilation_rates,
    causal: bool = False,
    softmax_scale: float | None = None,
    phase: str | None = None,
    gradient: str | None = None,
    preset: str | None = None,
    classes=None,
    pad_like_torchscale: bool = False,
    cu_seqlens=None,
    deterministic: bool = False,
    group: str = "",
    layout: str = "contiguous",
    shard_lengths=None,
    strategy: str = "auto",
    reproducible: bool = False,
) -> str:
    """The spec of the arguments that users give, as text; what the library itself checks is left to it."""
    if segment_lengths is None or dilation_rates is None:
        raise ValueError(
            "segment_lengths and dilation_rates must both be given, one number a branch; got "
            f"{segment_lengths} and {dilation_rates}: give, for example, [2048, 4096] and [1, 2]"
        )
    segments, dilations = _in_range("segment_lengths", segment_lengths), _in_range("dilation_rates", dilation_rates)
    if len(segments) != len(dilations):
        raise ValueError(
            "segment_lengths and dilation_rates must have the same length, one entry a branch; got "
            f"{len(segments)} and {len(dilations)}: give as many of each"
        )
    table = () if classes is None else tuple([_in_range("classes", each) for each in classes])
    if classes is not None and (len(table) != len(segments) or phase != "table"):
        raise ValueError(
            f"classes must be one list a branch, with phase='table'; got {len(table)} for {len(segments)} branches, "
            f"with phase={phase!r}: give both or neither"
        )
    scale = number("softmax_scale", softmax_scale)
    if preset == "head_groups" and phase:
        raise ValueError(f"the preset head_groups has its own phases; got phase={phase!r}: leave phase out")
    documents = () if cu_seqlens is None else _in_range("cu_seqlens", cu_seqlens)
    if cu_seqlens is not None and len(documents) < 2:
        raise ValueError(
            f"cu_seqlens must run from 0 to tokens; got {list(documents)}: leave it out for one document, or give "
            "[0, tokens]"
        )
    lengths = () if shard_lengths is None else _in_range("shard_lengths", shard_lengths)
    if shard_lengths is not None and (not lengths or min(lengths) < 0):
        raise ValueError(
            f"shard_lengths must be the rows of every rank, in order; got {list(lengths)}: leave it out where all "
            "ranks have as many"
        )
    return _write(
        segments,
        dilations,
        table,
        documents,
        causal,
        scale,
        check_choice("phase", phase or "", c.PHASES),
        check_choice("gradient", gradient or "", c.GRADIENTS),
        check_choice("preset", preset or "longnet", c.PRESETS),
        pad_like_torchscale,
        deterministic,
        group,
        check_choice("layout", layout, c.LAYOUTS),
        lengths,
        check_choice("strategy", strategy, c.STRATEGIES),
        reproducible,
    )
