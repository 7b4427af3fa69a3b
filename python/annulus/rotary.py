"""Rotary positions and xPos, by global position: right on a shard, whatever its layout."""

from __future__ import annotations

import math

import torch
from torch import Tensor

BASE = 10000.0
STEEPEST = math.log2(1.4 / 0.4)  # powers of 2 by which xPos changes the first pair, every xpos_scale_base positions
SPARE_BITS = 6  # of the type's range, for the numbers that are multiplied


def check_xpos(distance: int, dtype: torch.dtype, scale_base: float) -> None:
    """xPos multiplies queries and divides keys by a power of the distance from the centre, and that must fit. Nothing
    that is common to both would help: it is the span between first and last position that makes the power."""
    powers = math.log2(torch.finfo(dtype).max) - SPARE_BITS
    if distance * STEEPEST > powers * scale_base:
        raise ValueError(
            f"xPos in {dtype} must stay within {int(powers * scale_base / STEEPEST)} positions of its centre at "
            f"xpos_scale_base = {scale_base:g}; got {distance}: beyond that its factors overflow; take an "
            f"xpos_scale_base of at least {math.ceil(distance * STEEPEST / powers)}, or rotary positions without xPos"
        )


def rotate(
    x: Tensor,
    positions: Tensor,
    *,
    base: float = BASE,
    xpos_scale_base: float | None = None,
    xpos_centre: int = 0,
    is_key: bool = False,
) -> Tensor:
    """Turns the pairs (2i, 2i + 1) of every head by ``position * base ** (-2i / head_dim)``.

    Args:
        x: ``[batch, tokens, heads, head_dim]``, head_dim even.
        positions: ``[tokens]``, global.
        xpos_scale_base: given, xPos: queries also grow and keys shrink with their position, so that attention fades
            with distance. 512 is torchscale's, and good for 34,000 positions on either side of the centre, in float16
            for 2,800; longer sequences need a larger one. Positions on a GPU are not looked at: that would wait for it.
        xpos_centre: where that factor is 1; only the range of numbers depends on it. torchscale: half the tokens.
    """
    if x.shape[-1] % 2 != 0:
        raise ValueError(f"rotary positions need an even head_dim; got {x.shape[-1]}: use another number of heads")
    if positions.shape != x.shape[1:2]:
        raise ValueError(
            f"positions must be [tokens], one for each of the {x.shape[1]} rows; got the shape "
            f"{list(positions.shape)}: they are the same for the whole batch"
        )
    # Angles in fp64: in fp32 those of position 1M would be off by 0.03.
    half = torch.arange(0, x.shape[-1], 2, dtype=torch.float64, device=x.device) / x.shape[-1]
    places = positions.to(device=x.device, dtype=torch.float64)
    angles = places[:, None] * base**-half
    factor = torch.ones_like(angles)
    if xpos_scale_base is not None:
        if type(positions) is Tensor and positions.is_cpu and positions.numel() and not torch.compiler.is_compiling():
            check_xpos(int((positions - xpos_centre).abs().max()), x.dtype, xpos_scale_base)
        shrink = (half * x.shape[-1] + 0.4 * x.shape[-1]) / (1.4 * x.shape[-1])
        factor = shrink ** ((places[:, None] - xpos_centre) / xpos_scale_base)
        factor = 1 / factor if is_key else factor
    cosine, sine = ((f * factor).to(x.dtype)[None, :, None] for f in (angles.cos(), angles.sin()))
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cosine - odd * sine, odd * cosine + even * sine), dim=-1).flatten(-2)
