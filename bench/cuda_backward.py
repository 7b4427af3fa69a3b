#!/usr/bin/env python3
"""Backward on one GPU: Annulus against PyTorch's cuDNN attention, alternating in one run.

    python3 bench/cuda_backward.py --library build/release/src/libannulus.so --json FILE
    python3 bench/cuda_backward.py ... dense patterns       only these parts

Parts:
  dense     one branch, groups of w / r rows at several dilations, against cuDNN's backward on dense sequences of w / r
            tokens; every class takes part. Ours is all of it: Delta, the kernel, the rounding of dq. Once more in the
            deterministic mode, as a share of the default
  patterns  several branches at 512K tokens, forward and backward, against the same pattern composed of PyTorch views,
            cuDNN and a merge whose weights are constants (which saves it work); ours has the exact gradient
  general   the generic kernel, fp32, shared key/value heads, the detached gradient: TFLOP/s alone

How it measures: see cuda_forward.py. Without torch or a GPU the script says so and ends with exit code 0.
"""

import ctypes
import math
import sys

import c_abi
import cuda_forward
from cuda_forward import FIVE, HEADS, TWO


class Backward(cuda_forward.Forward):
    """One planned problem with its tensors and gradients; forward has run once."""

    def __init__(self, *args, deterministic=False, detached=False, **kwargs):
        super().__init__(*args, deterministic=deterministic, detached=detached, **kwargs)
        torch = self.torch
        self.dout = torch.randn_like(self.q)
        self.dq, self.dk, self.dv = [torch.full_like(x, math.nan) for x in (self.q, self.k, self.v)]
        size = ctypes.c_size_t()
        self.check(self.library.annulus_workspace_bytes(self.handle, 1, ctypes.byref(size)))
        self.gradient_bytes = size.value
        self.gradient_workspace = torch.empty(self.gradient_bytes, dtype=torch.uint8, device="cuda")
        self.gradient_flop = self.flop * 10 / 4
        view = self.view
        self.gradient_args = c_abi.sized(
            c_abi.BackwardArgs, q=view(self.q), k=view(self.k), v=view(self.v), out=view(self.out),
            lse=self.lse.data_ptr(), lse_count=self.lse.numel(), dout=view(self.dout), dq=view(self.dq),
            dk=view(self.dk), dv=view(self.dv), workspace=self.gradient_workspace.data_ptr(),
            workspace_bytes=self.gradient_bytes)
        self.forward()

    def forward(self):
        super().__call__()

    def __call__(self):
        self.gradient_args.stream = self.torch.cuda.current_stream().cuda_stream
        self.check(self.library.annulus_backward(self.handle, ctypes.byref(self.gradient_args)))

    def both(self):
        self.forward()
        self()


class Bench(cuda_forward.Bench):
    def backward(self, *args, **kwargs):
        return Backward(self.library, self.torch, *args, **kwargs)

    def peer_of(self, rows, causal, tensors):
        """cuDNN's backward alone on dense sequences of `rows` tokens."""
        a, b, c, g = [x.view(-1, rows, HEADS, x.shape[-1]).transpose(1, 2) for x in tensors]
        ops = self.torch.ops.aten
        out, lse, cq, ck, mq, mk, seed, offset = ops._scaled_dot_product_cudnn_attention(
            a, b, c, None, True, 0.0, causal, False)[:8]
        return lambda: ops._scaled_dot_product_cudnn_attention_backward(
            g, a, b, c, out, lse, seed, offset, None, cq, ck, mq, mk, 0.0, causal)

    def dense(self):
        for head_dim in (128, 64):
            for rows in (2048, 16384):
                for causal in (False, True):
                    self.dense_case(head_dim, rows, causal)
                    self.torch.cuda.empty_cache()

    def dense_case(self, head_dim, rows, causal):
        name = f"backward d{head_dim} m{rows}{' causal' if causal else ''}"
        if not any(self.wants(f"{name} {row}") for row in ("r1", "r4", "r16", "deterministic")):
            return
        first = self.backward(16384, head_dim, [rows], [1], causal=causal, phase="every")
        peer = self.peer_of(rows, causal, (first.q, first.k, first.v, first.dout))
        first()
        for ours, theirs in zip((first.dq, first.dk, first.dv), peer()):
            theirs = theirs.transpose(1, 2).reshape(ours.shape).float()
            difference = (ours.float() - theirs).norm() / theirs.norm()
            assert difference < 1e-2, f"differs from cuDNN by {difference}"
        flop = 10 * head_dim * HEADS * 16384 * (rows + 1 if causal else 2 * rows) / 2
        for dilation in (1, 4, 16):
            if not self.wants(f"{name} r{dilation}"):
                continue
            ours = first if dilation == 1 else self.backward(16384 * dilation, head_dim, [rows * dilation], [dilation],
                                                             causal=causal, phase="every")
            self.compare(f"{name} r{dilation}", {"annulus": ours, "cudnn": peer}, (ours.gradient_flop, flop),
                         workspace_bytes=ours.gradient_bytes)
        fixed = self.backward(16384, head_dim, [rows], [1], causal=causal, phase="every", deterministic=True)
        self.compare(f"{name} deterministic", {"deterministic": fixed, "default": first}, flop)

    def patterns(self):
        torch = self.torch
        for head_dim in (128, 64):
            for causal in (False, True):
                for label, (segments, dilations) in (("2 branches", TWO), ("5 branches", FIVE)):
                    ours = self.backward(1 << 19, head_dim, segments, dilations, causal=causal, phase="by_head_block")
                    q, k, v = [x.detach().requires_grad_() for x in (ours.q, ours.k, ours.v)]

                    def peer():
                        cuda_forward.composed(torch, q, k, v, segments, dilations, causal).backward(ours.dout)
                        q.grad = k.grad = v.grad = None

                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                    peer()
                    peer_bytes = torch.cuda.max_memory_allocated() - before - 3 * q.nbytes
                    name = f"512K d{head_dim} {label}{' causal' if causal else ''}"
                    flop = ours.flop + ours.gradient_flop
                    self.compare(f"{name} forward and backward", {"annulus": ours.both, "composed": peer}, flop,
                                 workspace_bytes=max(ours.workspace_bytes, ours.gradient_bytes),
                                 dq_sums_bytes=ours.q.numel() * 4, composed_bytes=peer_bytes, plan=ours.explanation)
                    self.compare(f"{name} backward", {"annulus": ours}, ours.gradient_flop)
                    del ours, q, k, v
                    torch.cuda.empty_cache()

    def general(self):
        cases = {
            "bf16 d128 kernel mma": dict(kernel="mma"),
            "fp32 d128": dict(dtype="fp32"),
            "bf16 d128 4 key/value heads": dict(kv_heads=4),
            "bf16 d128 detached": dict(detached=True),
        }
        for name, more in cases.items():
            ours = self.backward(1 << 15, 128, [2048, 8192], [1, 4], **more)
            self.compare(f"general {name}", {"annulus": ours}, ours.gradient_flop)


if __name__ == "__main__":
    sys.exit(cuda_forward.main(Bench, ["dense", "patterns", "general"], __doc__))
