"""Modules: DilatedAttention, and MultiheadDilatedAttention with projections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import _ops
from ._groups import process_group_of
from ._spec import Options, check_names, make_spec, whole_numbers
from .functional import dilated_attention
from .rotary import check_xpos, rotate

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _OverRanks(nn.Module):
    """Keeps a process group by its name: a module can then be copied and pickled, and does not keep the group alive."""

    def __init__(self, group: dist.ProcessGroup | dist.DeviceMesh | str | None):
        super().__init__()
        there = None if group is None else process_group_of(group)
        self._group_name: str | None = None if there is None else there.group_name

    @property
    def group(self) -> dist.ProcessGroup | None:
        return None if self._group_name is None else process_group_of(self._group_name)


def _shown(**values: Any) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)


class DilatedAttention(_OverRanks):
    """`annulus.dilated_attention` with its options kept; forward takes ``[batch, tokens, heads, head_dim]``, and
    options that are for one call alone."""

    def __init__(
        self,
        segment_lengths: Sequence[int] | Tensor,
        dilation_rates: Sequence[int] | Tensor,
        *,
        group: dist.ProcessGroup | dist.DeviceMesh | str | None = None,
        return_lse: bool = False,
        **options: Unpack[Options],
    ):
        super().__init__(group)
        check_names("annulus.DilatedAttention", options)
        make_spec(segment_lengths, dilation_rates, **options)  # says what is wrong, here and not at the first call
        self.segment_lengths = whole_numbers("segment_lengths", segment_lengths)
        self.dilation_rates = whole_numbers("dilation_rates", dilation_rates)
        self.return_lse, self.options = return_lse, options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        kept = {"group": self._group_name, "return_lse": self.return_lse, **self.options}
        return dilated_attention(q, k, v, self.segment_lengths, self.dilation_rates, **{**kept, **options})

    def extra_repr(self) -> str:
        pattern = {"segment_lengths": self.segment_lengths, "dilation_rates": self.dilation_rates}
        return _shown(**pattern, group=self._group_name, return_lse=self.return_lse or None, **self.options)


class MultiheadDilatedAttention(_OverRanks):
    """Multi-head dilated self-attention with projections: ``[batch, tokens, embed_dim]`` to the same.

    Its parameters have torchscale's and prov-gigapath's names (``q_proj``, ``k_proj``, ``v_proj``, ``out_proj``,
    ``inner_attn_ln``), so their checkpoints load; give ``preset="torchscale"`` and, for encoders trained on padded
    segments, ``pad_like_torchscale=True`` to compute what they were trained with.

    Args:
        embed_dim, num_heads: head_dim is ``embed_dim / num_heads``.
        segment_lengths, dilation_rates: one number a branch.
        num_kv_heads: of keys and values, divides num_heads (grouped queries).
        bias: of the projections.
        layer_norm: LayerNorm before the output projection (torchscale's ``subln``).
        layer_norm_eps: its epsilon.
        rotary: None, ``"rotary"`` or ``"xpos"``: by global position, so right on a shard.
        rotary_base, xpos_scale_base: of those.
        group, layout, shard_lengths: how the sequence lies over ranks, and every other option of
            `annulus.dilated_attention` (causal, preset, phase, gradient, strategy, ...).
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int] | Tensor,
        dilation_rates: Sequence[int] | Tensor,
        *,
        num_kv_heads: int | None = None,
        bias: bool = True,
        layer_norm: bool = False,
        layer_norm_eps: float = 1e-5,
        rotary: str | None = None,
        rotary_base: float = 10000.0,
        xpos_scale_base: float = 512.0,
        group: dist.ProcessGroup | dist.DeviceMesh | str | None = None,
        layout: str = "contiguous",
        shard_lengths: Sequence[int] | Tensor | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[Options],
    ):
        super().__init__(group)
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if min(embed_dim, num_heads, kv_heads) < 1 or embed_dim % num_heads != 0 or num_heads % kv_heads != 0:
            raise ValueError(
                "num_heads must divide embed_dim, and num_kv_heads must divide num_heads; got "
                f"embed_dim {embed_dim}, num_heads {num_heads}, num_kv_heads {kv_heads}: choose numbers that do"
            )
        if rotary not in (None, "rotary", "xpos"):
            raise ValueError(f"rotary must be None, 'rotary' or 'xpos'; got {rotary!r}: give one of these")
        if rotary is not None and embed_dim // num_heads % 2 != 0:
            raise ValueError(
                f"rotary positions need an even head_dim; got embed_dim / num_heads = {embed_dim // num_heads}: use "
                "another number of heads"
            )
        elsewhere = {
            "return_lse": "it returns its output alone; annulus.DilatedAttention returns both",
            "cu_seqlens": "documents differ from call to call; give them to forward",
        }
        check_names("annulus.MultiheadDilatedAttention", options, elsewhere)
        shared: dict[str, Any] = {"layout": layout, "shard_lengths": shard_lengths}
        make_spec(
            segment_lengths, dilation_rates, **shared, **options
        )  # says what is wrong, here and not at the first call
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim = embed_dim // num_heads
        self.rotary, self.rotary_base, self.xpos_scale_base = rotary, rotary_base, xpos_scale_base
        self.segment_lengths = whole_numbers("segment_lengths", segment_lengths)
        self.dilation_rates = whole_numbers("dilation_rates", dilation_rates)
        self.layout, self.options = layout, options
        self.shard_lengths = None if shard_lengths is None else whole_numbers("shard_lengths", shard_lengths)
        self._ranks = 1 if group is None else dist.get_world_size(process_group_of(group))
        make: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, embed_dim, **make)
        self.k_proj = nn.Linear(embed_dim, kv_heads * self.head_dim, **make)
        self.v_proj = nn.Linear(embed_dim, kv_heads * self.head_dim, **make)
        self.out_proj = nn.Linear(embed_dim, embed_dim, **make)
        self.inner_attn_ln = (
            nn.LayerNorm(embed_dim, eps=layer_norm_eps, device=device, dtype=dtype) if layer_norm else None
        )

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        _take_torchscale_names(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Sequence[int] | Tensor | None = None,
    ) -> Tensor:
        """``[batch, tokens, embed_dim]`` to the same; key and value are the query unless given.

        ``positions``, ``[tokens]``, are global and follow from group and layout unless given; they matter to rotary
        embeddings alone.
        """
        key = query if key is None else key
        value = key if value is None else value
        q = self.q_proj(query).unflatten(-1, (self.num_heads, self.head_dim))
        k = self.k_proj(key).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = self.v_proj(value).unflatten(-1, (self.num_kv_heads, self.head_dim))
        if self.rotary is not None:
            q, k = self._rotate(q, k, positions)
        out = dilated_attention(
            q,
            k,
            v,
            self.segment_lengths,
            self.dilation_rates,
            group=self._group_name,
            layout=self.layout,
            shard_lengths=self.shard_lengths,
            cu_seqlens=cu_seqlens,
            **self.options,
        )
        out = out.flatten(-2)
        if self.inner_attn_ln is not None:
            out = self.inner_attn_ln(out)
        return self.out_proj(out)

    def _rotate(self, q: Tensor, k: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        lengths = list(self.shard_lengths or ())
        tokens = sum(lengths) if lengths else k.shape[1] * self._ranks
        more: dict[str, Any] = {"base": self.rotary_base}
        if self.rotary == "xpos":
            centre = (tokens + 1) // 2
            more |= {"xpos_scale_base": self.xpos_scale_base, "xpos_centre": centre}
            if positions is None:  # all ranks come to the same conclusion
                check_xpos(centre, q.dtype, self.xpos_scale_base)
        if positions is None and self._ranks > 1:
            positions = _ops.positions(k, self._group_name, self.layout, lengths)
        elif positions is None:
            positions = torch.arange(tokens, device=q.device)
        replicated = q.shape[1] != k.shape[1]  # all queries are on every rank
        of_q = torch.arange(tokens, device=q.device) if replicated else positions
        return rotate(q, of_q, **more), rotate(k, positions, is_key=True, **more)

    def extra_repr(self) -> str:
        sizes = {"embed_dim": self.embed_dim, "num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads}
        pattern = {"segment_lengths": self.segment_lengths, "dilation_rates": self.dilation_rates}
        shared = {"group": self._group_name, "layout": self.layout, "shard_lengths": self.shard_lengths}
        return _shown(**sizes, **pattern, rotary=self.rotary, **shared if self._group_name else {}, **self.options)


def _take_torchscale_names(state: dict[str, Any], prefix: str) -> None:
    """torchscale wraps a layer that may serve two modalities (``q_proj.A.weight``) and keeps a table of xPos."""
    state.pop(f"{prefix}xpos.scale", None)
    for name in [name for name in state if name.startswith(prefix)]:
        layer, dot, parameter = name[len(prefix) :].partition(".A.")
        if dot and f"{prefix}{layer}.B.{parameter}" not in state:
            state[f"{prefix}{layer}.{parameter}"] = state.pop(name)
