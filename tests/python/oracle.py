"""Dilated attention as docs/semantics.md defines it, in plain PyTorch: every key is asked if it belongs to a query.

Differentiable by autograd, in any type, and without a line of Annulus: it judges the bindings, the op and its gradient.
"""

import math

import torch


def counts(tokens, heads, segments, dilations, *, causal=False, phase="by_head", cu_seqlens=None):
    """How many branches let query t of head j see key k, ``[heads, tokens, tokens]``: eq. 1 to 3."""
    bounds = cu_seqlens or [0, tokens]
    t = torch.arange(tokens)
    begin = torch.tensor([max(b for b in bounds[:-1] if b <= int(x)) for x in t], dtype=torch.int64)
    document = begin
    result = torch.zeros(heads, tokens, tokens, dtype=torch.int64)
    for w, r in zip(segments, dilations, strict=True):
        segment = (t - begin) // w
        position_class = (t - begin - segment * w) % r
        near = (document[:, None] == document[None]) & (segment[:, None] == segment[None])
        near &= position_class[:, None] == position_class[None]
        if causal:
            near &= t[None] <= t[:, None]
        for j in range(heads):
            if phase == "every":
                takes = torch.ones(tokens, dtype=torch.bool)
            else:
                chosen = j % r if phase == "by_head" else j // math.ceil(heads / r)
                takes = position_class == chosen
            result[j] += near & takes[:, None]
    return result


def attend(q, k, v, segments, dilations, *, softmax_scale=None, **pattern):
    """Eq. 4 and 5: a key that two branches reach counts twice. Returns out and lse."""
    heads, kv_heads = q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(heads // kv_heads, dim=2) for x in (k, v))
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    times = counts(q.shape[1], heads, segments, dilations, **pattern).to(logits.dtype)
    covered = times.sum(-1, keepdim=True) > 0
    logits = torch.where(times > 0, logits + times.clamp(min=1).log(), -math.inf)
    lse = torch.where(covered, torch.logsumexp(torch.where(covered, logits, 0.0), -1, keepdim=True), -math.inf)
    weights = torch.where(covered, torch.exp(logits - torch.where(covered, lse, 0.0)), 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), lse.squeeze(-1)
