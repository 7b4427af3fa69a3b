"""A spec: all that decides a result beside the tensors themselves, as one string.

Custom ops take strings and tensors, torch.compile holds strings as constants, and caches of handles want a key: so what
users give as twenty arguments is written down once, and read back where a handle is made.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from . import _library as c


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
    return ",".join([str(number) for number in numbers])


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
            "" if scale is None else str(scale),
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
        raise ValueError(f"{what} must be one of {', '.join(name for name in known if name)}; got {value!r}")
    return value


def _whole_numbers(what: str, values) -> tuple[int, ...]:
    if isinstance(values, int):
        return (values,)
    return tuple([int(value) for value in values])


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
    segments = _whole_numbers("segment_lengths", segment_lengths)
    dilations = _whole_numbers("dilation_rates", dilation_rates)
    if len(segments) != len(dilations):
        raise ValueError(
            "segment_lengths and dilation_rates must have the same length, one entry a branch; got "
            f"{len(segments)} and {len(dilations)}: give as many of each"
        )
    table = () if classes is None else tuple([_whole_numbers("classes", each) for each in classes])
    if table and len(table) != len(segments):
        raise ValueError(f"classes must have one list a branch; got {len(table)} for {len(segments)} branches")
    return _write(
        segments,
        dilations,
        table,
        () if cu_seqlens is None else _whole_numbers("cu_seqlens", cu_seqlens),
        causal,
        None if softmax_scale is None else float(softmax_scale),
        check_choice("phase", phase or "", c.PHASES),
        check_choice("gradient", gradient or "", c.GRADIENTS),
        check_choice("preset", preset or "longnet", c.PRESETS),
        pad_like_torchscale,
        deterministic,
        group,
        check_choice("layout", layout, c.LAYOUTS),
        () if shard_lengths is None else _whole_numbers("shard_lengths", shard_lengths),
        check_choice("strategy", strategy, c.STRATEGIES),
        reproducible,
    )
