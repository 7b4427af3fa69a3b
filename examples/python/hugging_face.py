"""Dilated attention in a model of the Hugging Face kind, by one function.

Models there look their attention up by name and call it with [batch, heads, tokens, head_dim]. With transformers
installed, this is all:

    from transformers import AttentionInterface
    AttentionInterface.register("annulus", attention_function([2048, 16384], [1, 4]))
    model.set_attn_implementation("annulus")

So that it runs without them, a model in miniature with the same seam is below.
"""

import torch
from torch import nn

import annulus


def attention_function(segment_lengths, dilation_rates, **options):
    """An attention of the Hugging Face signature. Key/value heads may be fewer; sequences are not padded."""

    def attend(module, query, key, value, attention_mask=None, scaling=None, dropout=0.0, is_causal=None, **_):
        if dropout and module.training:
            raise ValueError(f"dilated attention has no dropout; got {dropout}: set attention_dropout to 0")
        if attention_mask is not None:
            raise ValueError(
                f"dilated attention takes no mask; got one of shape {list(attention_mask.shape)}: pack documents by "
                "cu_seqlens instead of padding them"
            )
        causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # views: heads stay contiguous, nothing is copied
        out = annulus.dilated_attention(
            q, k, v, segment_lengths, dilation_rates, causal=causal, softmax_scale=scaling, **options
        )
        return out, None

    return attend


ATTENTION = {}  # what AttentionInterface is there


class MiniAttention(nn.Module):
    is_causal = True

    def __init__(self, width: int, heads: int, kv_heads: int):
        super().__init__()
        self.head_dim, self.implementation = width // heads, "eager"
        self.q_proj = nn.Linear(width, heads * self.head_dim)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim)
        self.o_proj = nn.Linear(width, width)

    def forward(self, hidden):
        q, k, v = (
            projection(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out, _ = ATTENTION[self.implementation](self, q, k, v, scaling=self.head_dim**-0.5)
        return self.o_proj(out.flatten(-2))


def main() -> None:
    def eager(module, query, key, value, scaling, **_):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return out.transpose(1, 2), None

    torch.manual_seed(0)
    ATTENTION["eager"] = eager
    ATTENTION["annulus"] = attention_function([128], [1])
    model, hidden = MiniAttention(64, 8, 2), torch.randn(2, 128, 64)
    dense = model(hidden)
    model.implementation = "annulus"
    same = model(hidden)  # one segment as long as the sequence is dense attention
    print(f"one segment, against dense attention: largest difference {(same - dense).abs().max().item():.1e}")
    assert torch.allclose(same, dense, atol=1e-5)

    ATTENTION["annulus"] = attention_function([32, 128], [1, 4])
    model(hidden).sum().backward()
    print(f"dilated: gradient of the query projection has norm {model.q_proj.weight.grad.norm().item():.3f}")


if __name__ == "__main__":
    main()
