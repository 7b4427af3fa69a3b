"""Rotary positions and xPos, by global position: right on a shard, whatever its layout."""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 10000.0


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
            with distance. 512 is torchscale's.
        xpos_centre: where that factor is 1; only the range of numbers depends on it. torchscale: half the tokens.
    """
    if x.shape[-1] % 2 != 0:
        raise ValueError(f"rotary positions need an even head_dim; got {x.shape[-1]}: use another number of heads")
    # Angles in fp64: in fp32 those of position 1M would be off by 0.03.
    half = torch.arange(0, x.shape[-1], 2, dtype=torch.float64, device=x.device) / x.shape[-1]
    places = positions.to(device=x.device, dtype=torch.float64)
    angles = places[:, None] * base**-half
    factor = torch.ones_like(angles)
    if xpos_scale_base is not None:
        shrink = (half * x.shape[-1] + 0.4 * x.shape[-1]) / (1.4 * x.shape[-1])
        factor = shrink ** ((places[:, None] - xpos_centre) / xpos_scale_base)
        factor = 1 / factor if is_key else factor
    cosine, sine = ((f * factor).to(x.dtype)[None, :, None] for f in (angles.cos(), angles.sin()))
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cosine - odd * sine, odd * cosine + even * sine), dim=-1).flatten(-2)
