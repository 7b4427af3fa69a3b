import torch

import annulus

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
q, k, v = (torch.randn(1, 10_007, 8, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3))

# [batch, tokens, heads, head_dim]; 10,007 is a prime: nothing needs to divide anything.
out = annulus.dilated_attention(q, k, v, segment_lengths=[1024, 4096], dilation_rates=[1, 4], causal=True)
out.square().mean().backward()

print(annulus.plan(10_007, 8, 64, [1024, 4096], [1, 4], causal=True, dtype=dtype, device=device))
print(f"{device}: out {tuple(out.shape)}, all finite: {bool(out.isfinite().all())}")
