#!/usr/bin/env python3
"""Forward and backward through PyTorch's autograd on one GPU, 512K tokens: `annulus.dilated_attention` against the same
pattern composed of PyTorch views, cuDNN and a merge, alternating in one run.

    PYTHONPATH=python python3 bench/torch_training_step.py --library build/release/src/libannulus.so --json FILE

Memory is the most that torch held beside q, k, v and dout: results, gradients, workspaces and copies, of either. The
weights of the composed merge are constants to autograd, which saves it work; Annulus has the exact gradient. How it
measures: see cuda_forward.py. Without torch or a GPU the script says so and ends with exit code 0.
"""

import os
import sys

import cuda_forward
from cuda_forward import FIVE, HEADS, TWO

TOKENS = 1 << 19


class Bench(cuda_forward.Bench):
    def steps(self):
        os.environ.setdefault("ANNULUS_LIBRARY", self.arguments.library)
        for head_dim in (128, 64):
            for causal in (False, True):
                for label, pattern in (("2048,4096 / 1,2", TWO), ("2048..32768 / 1..16", FIVE)):
                    self.step(head_dim, causal, label, pattern)
                    self.torch.cuda.empty_cache()
        self.print_table()

    def step(self, head_dim, causal, label, pattern):
        import annulus

        torch, shape = self.torch, (1, TOKENS, HEADS, head_dim)
        q, k, v, dout = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        for x in (q, k, v):
            x.requires_grad_()

        def ours():
            out = annulus.dilated_attention(q, k, v, *pattern, causal=causal, phase="by_head_block")
            return out, torch.autograd.grad(out, (q, k, v), dout)

        def peer():
            out = cuda_forward.composed(torch, q, k, v, *pattern, causal)
            return out, torch.autograd.grad(out, (q, k, v), dout)

        results, held = {}, {}
        for name, call in (("annulus", ours), ("composed", peer)):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            results[name] = call()[0].detach()
            held[name] = torch.cuda.max_memory_allocated() - before
        difference = (results["annulus"] - results["composed"]).norm() / results["composed"].norm()
        assert difference < 2e-2, f"differs from the composed version by {difference}"
        results.clear()
        pairs = cuda_forward.count_pairs((0, TOKENS), HEADS, *pattern, "by_head_block", causal)
        self.compare(f"{label}{', causal' if causal else ''}, D = {head_dim}", {"annulus": ours, "composed": peer},
                     14 * head_dim * pairs, head_dim=head_dim, causal=causal, pattern=label, held_bytes=held)

    def print_table(self):
        print("| pattern | D | Annulus | composed | ratio | memory, Annulus / composed |\n|---|---|---|---|---|---|")
        for row in self.results:
            times, held = row["ms"], row["held_bytes"]
            print(f"| {row['pattern']}{', causal' if row['causal'] else ''} | {row['head_dim']} "
                  f"| {times['annulus']:.1f} ms | {times['composed']:.1f} ms "
                  f"| {times['composed'] / times['annulus']:.2f} "
                  f"| {held['annulus'] / 2**30:.1f} / {held['composed'] / 2**30:.1f} GiB |")


if __name__ == "__main__":
    sys.exit(cuda_forward.main(Bench, ["steps"], __doc__))
