#!/usr/bin/env python3
"""The grid of `annulus verify`, judged where it is computed: on a GPU, without the hours that a CPU needs for the large problems.

    PYTHONPATH=python ANNULUS_LIBRARY=build/release/src/libannulus.so python3 tests/python/grid.py
    python3 tests/python/grid.py tokens=4099 dtype=bf16          only problems with these values
    python3 tests/python/grid.py --device cpu tokens=127
    python3 tests/python/grid.py --jobs 24                       dealt to so many processes, some GiB of the GPU each

Forward, both gradients, and the same bits once more. The judge is dense attention in PyTorch, in fp64, with a count of
how many branches let a query see a key, and without a line of Annulus. What may differ is said by docs/semantics.md,
section 7: twice the error of the textbook, which keeps every intermediate in the input's type, and a few units in the
last place of the terms that were summed.

The textbook may be right by luck where a tensor has few elements: of 3,000 draws of 2 tokens, one head of 8 and five
branches in bf16, one had dk at 1.04 of its bound, though its error is two thirds of the textbook's in the mean. So a
problem that is just above its bound is drawn twice more, says so, and fails if it is above it once more.
"""

import argparse
import itertools
import math
import subprocess
import sys
import time

import torch

import annulus

SEQUENCES = {"1": None, "2": None, "127": None, "1000": None, "351": [0, 1, 1, 18, 351], "4099": None}
BRANCHES = [([16], [1]), ([16, 64, 100], [1, 3, 7]), ([2048, 4096], [1, 2]),
            ([64, 128, 256, 512, 1024], [1, 2, 4, 8, 16]), ([10], [16])]  # fmt: skip
HEADS = [(1, 1), (5, 1), (12, 4)]
HEAD_DIMS = [8, 40, 64, 80, 128, 256]
PHASES = ["by_head", "by_head_block", "every", "table"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MOST_PAIRS = 1 << 24  # of all heads that are judged together: 128 MiB a matrix
JUST_ABOVE = 1.25  # of its bound: may be luck
LEAST_BLOCK = 512  # tokens that are judged together, where a sequence falls into parts that do not see each other


def problems():
    keys = ("tokens", "segments", "heads", "head_dim", "phase", "dtype", "gradient", "causal")
    lists = (SEQUENCES, BRANCHES, HEADS, HEAD_DIMS, PHASES, DTYPES, ("exact", "detached"), (False, True))
    for values in itertools.product(*lists):
        yield dict(zip(keys, values, strict=True))


def says(problem, key):
    value = problem[key]
    if key == "segments":
        return ",".join(map(str, value[0]))
    return str(value[0] if key == "heads" else value)


class Pattern:
    """Who sees whom, branch by branch: eq. 1 to 3, asked of every pair."""

    def __init__(self, problem, device):
        self.tokens, (self.heads, self.kv_heads) = int(problem["tokens"]), problem["heads"]
        self.segments, self.dilations = problem["segments"]
        self.classes = [[self.class_of(problem["phase"], j, r) for j in range(self.heads)] for r in self.dilations]
        self.every = problem["phase"] == "every"
        bounds = torch.tensor(SEQUENCES[problem["tokens"]] or [0, self.tokens], device=device)
        t = torch.arange(self.tokens, device=device)
        document = torch.searchsorted(bounds, t, right=True) - 1
        self.near, self.position_class = [], []
        begins = torch.ones_like(t, dtype=torch.bool)  # of a segment in every branch
        for w, r in zip(self.segments, self.dilations, strict=True):
            inside = t - bounds[document]
            position_class = inside % w % r
            near = torch.ones(self.tokens, self.tokens, dtype=torch.bool, device=device)
            for key in (document, inside // w, position_class):
                near &= key[:, None] == key[None]
            if problem["causal"]:
                near &= t[None] <= t[:, None]
            self.near.append(near)
            self.position_class.append(position_class)
            begins &= inside % w == 0
        self.blocks = self.cut(begins.nonzero()[:, 0].tolist())

    def cut(self, places):
        """Ranges of positions that see nothing of each other."""
        cuts = [0]
        for place in places:
            if place - cuts[-1] >= LEAST_BLOCK:
                cuts.append(place)
        blocks = [slice(*ends) for ends in itertools.pairwise([*cuts, self.tokens])]
        for near in self.near:
            assert near.sum() == sum(near[block, block].sum() for block in blocks), "a block sees another"
        return blocks

    def class_of(self, phase, head, dilation):
        if phase == "table":
            return (5 * head + 3) % dilation
        return head % dilation if phase == "by_head" else head // -(-self.heads // dilation)

    def masks(self, heads, block):
        """Of each branch, ``[heads, queries, keys]``."""
        for near, position_class, classes in zip(self.near, self.position_class, self.classes, strict=True):
            own = position_class[block]
            takes = [torch.ones_like(own, dtype=torch.bool) if self.every else own == classes[j] for j in heads]
            yield near[block, block] & torch.stack(takes)[:, :, None]


class Exact:
    real = torch.float64

    def __init__(self, dtype):
        pass

    def store(self, x):
        return x


class Textbook:
    """Sums in fp32; what a program would keep in memory is rounded, unless the type cannot hold it."""

    real = torch.float32

    def __init__(self, dtype):
        self.dtype = dtype

    def store(self, x):
        rounded = x.to(self.dtype).float()
        return torch.where(rounded.isinf(), x, rounded)


class Judge:
    """Eq. 4 to 8 of one problem in one arithmetic: `out`, `lse`, `dq`, `dk`, `dv`.

    Matrices are ``[heads, queries, keys]``. An entry is a key that one branch gives a query, so a pair has as many as
    branches let it see: `counts`. `terms` are the sizes of what was summed, in fp64 alone."""

    def __init__(self, pattern, inputs, gradient, arithmetic):
        self.pattern, self.arithmetic = pattern, arithmetic
        self.detached = gradient == "detached" and len(pattern.segments) > 1
        q, k, v, dout = [x[0].transpose(0, 1).to(arithmetic.real) for x in inputs]  # [heads, tokens, head_dim]
        self.scale = q.shape[2] ** -0.5
        self.out, self.dq = torch.zeros_like(q), torch.zeros_like(q)
        self.dk, self.dv = torch.zeros_like(k), torch.zeros_like(v)
        self.lse = torch.zeros_like(q[..., 0])
        self.measures = isinstance(arithmetic, Exact)
        self.terms = dict.fromkeys(("out", "lse", "dq", "dk", "dv", "dq_stored", "dk_stored"), 0.0)
        kv_head = torch.arange(pattern.heads, device=q.device) // (pattern.heads // pattern.kv_heads)
        for block in pattern.blocks:
            self.key_squares = {}
            at_once = max(1, MOST_PAIRS // (block.stop - block.start) ** 2)
            for first in range(0, pattern.heads, at_once):
                heads = slice(first, min(first + at_once, pattern.heads))
                own = kv_head[heads]
                self.attend(heads, own, block, *(x[heads, block] for x in (q, dout)), *(x[own, block] for x in (k, v)))
            for name, squares in self.key_squares.items():
                self.raise_terms(name, squares.sqrt())

    def attend(self, heads, kv_heads, block, q, dout, k, v):
        store = self.arithmetic.store
        masks = list(self.pattern.masks(range(heads.start, heads.stop), block))
        counts = sum(mask.to(q.dtype) for mask in masks)
        score = store((q @ k.mT) * self.scale)
        lse, p = self.softmax(score, counts)
        p = store(p)
        weights = counts * p
        out = store(weights @ v)
        dp = store(dout @ v.mT)
        if self.detached:
            deltas = [self.delta_of_branch(score, mask, v, dout) for mask in masks]
        else:
            deltas, masks = [(dout * out).sum(-1, keepdim=True)], [counts]
        ds = sum(mask * store(self.scale * p * (dp - delta)) for mask, delta in zip(masks, deltas, strict=True))
        self.out[heads, block], self.lse[heads, block], self.dq[heads, block] = out, lse[..., 0], ds @ k
        self.dk[:, block].index_add_(0, kv_heads, ds.mT @ q)
        self.dv[:, block].index_add_(0, kv_heads, weights.mT @ dout)
        if self.measures:
            self.measure(kv_heads, q, dout, k, v, score, lse, p, out, dp, counts, masks, deltas)

    @staticmethod
    def softmax(score, counts):
        """lse, and the probability of one entry; of a row without keys -inf and 0."""
        seen = counts > 0
        highest = score.masked_fill(~seen, -math.inf).amax(-1, keepdim=True)
        shift = highest.masked_fill(highest.isinf(), 0)
        e = (score - shift).exp().masked_fill(~seen, 0)
        total = (counts * e).sum(-1, keepdim=True)
        return shift + total.log(), e / total.masked_fill(total == 0, 1)

    def delta_of_branch(self, score, mask, v, dout):
        store, taken = self.arithmetic.store, mask.to(score.dtype)
        out = store(store(self.softmax(score, taken)[1]) @ v)
        return (dout * out).sum(-1, keepdim=True)

    def measure(self, kv_heads, q, dout, k, v, score, lse, p, out, dp, counts, masks, deltas):
        """What src/reference measures: errors of different pairs are independent, so their squares add up. Entries of
        one pair share its error: they add up themselves."""
        lse_size = lse.abs().masked_fill(lse.isinf(), 0)
        k_largest, v_largest, k_norm, v_norm = (
            x[:, None] for x in (k.abs().amax(-1), v.abs().amax(-1), k.norm(dim=-1), v.norm(dim=-1)))  # fmt: skip
        q_size = self.scale * q.abs().amax(-1, keepdim=True)
        dout_size = dout.abs().amax(-1, keepdim=True)
        logit = 1 + score.abs() + self.scale * q.norm(dim=-1, keepdim=True) * k_norm
        of_delta = dout.norm(dim=-1, keepdim=True) * out.norm(dim=-1, keepdim=True)
        size = p * logit
        self.raise_terms("out", ((counts * size * v_largest) ** 2).sum(-1).sqrt())
        self.raise_terms("lse", 1 + lse_size[..., 0] + ((counts * size) ** 2).sum(-1).sqrt())
        dq_error = dk_error = 0
        for mask, delta in zip(masks, deltas, strict=True):
            error = (logit + lse_size) * (dp - delta).abs() + dout.norm(dim=-1, keepdim=True) * v_norm
            dq_error = dq_error + mask * self.scale * p * error * k_largest
            dk_error = dk_error + mask * q_size * p * (error + of_delta)
        of_delta_in_dq = self.scale * of_delta[..., 0] * (counts * p * k_largest).sum(-1)
        self.raise_terms("dq", (dq_error**2).sum(-1).sqrt() + of_delta_in_dq)
        self.raise_terms("dq_stored", of_delta_in_dq / q.shape[-1] ** 0.5)
        self.add_squares("dk", kv_heads, dk_error**2)
        self.add_squares("dk_stored", kv_heads, (counts * q_size * p * of_delta) ** 2 / q.shape[-1])
        self.add_squares("dv", kv_heads, (counts * dout_size * p * (logit + lse_size)) ** 2)

    def raise_terms(self, name, sizes):
        self.terms[name] = max(self.terms[name], sizes.max().item())

    def add_squares(self, name, kv_heads, squares):
        by_key = squares.sum(1)
        sums = self.key_squares.setdefault(name, by_key.new_zeros(self.pattern.kv_heads, by_key.shape[1]))
        sums.index_add_(0, kv_heads, by_key)


def unit(dtype, x):
    """In the last place of x."""
    info = torch.finfo(dtype)
    return info.eps * 2.0 ** math.floor(math.log2(max(x, info.smallest_normal)))


def run(problem, pattern, q, k, v, dout):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    table = pattern.classes if problem["phase"] == "table" else None
    out, lse = annulus.dilated_attention(
        *leaves, pattern.segments, pattern.dilations, causal=problem["causal"], phase=problem["phase"], classes=table,
        gradient=problem["gradient"], cu_seqlens=SEQUENCES[problem["tokens"]], return_lse=True)  # fmt: skip
    out.backward(dout)
    return {"out": out.detach(), "lse": lse, **dict(zip(("dq", "dk", "dv"), (x.grad for x in leaves), strict=True))}


def check(problem, device):
    """What is wrong, as text, and the largest share of the bound that an error takes: infinite, if it is no matter of size."""
    pattern = Pattern(problem, device)
    dtype, head_dim = DTYPES[problem["dtype"]], problem["head_dim"]
    inputs = [torch.randn(1, pattern.tokens, heads, head_dim, device=device).to(dtype)
              for heads in (pattern.heads, pattern.kv_heads, pattern.kv_heads, pattern.heads)]  # fmt: skip
    result, again = (run(problem, pattern, *inputs) for _ in range(2))
    exact, textbook = (Judge(pattern, inputs, problem["gradient"], kind(dtype)) for kind in (Exact, Textbook))
    faults, most = [], 0.0
    for name, got in result.items():
        if name != "dq" and not torch.equal(got.view(torch.uint8), again[name].view(torch.uint8)):
            faults.append(f"{name} differs from run to run")
            most = math.inf
        kind = torch.float32 if name == "lse" else dtype
        want = getattr(exact, name)
        got = got[0].double() if name == "lse" else got[0].transpose(0, 1).double()
        finite = want.isfinite()
        if not torch.equal(got.isfinite(), finite) or not torch.equal(got[~finite], want[~finite]):
            faults.append(f"{name} is not finite in the wrong places")
            most = math.inf
            continue
        largest = want[finite].abs().amax().item() if finite.any() else 0.0
        stored = getattr(textbook, name).to(kind).double()
        error, plain = [(x - want)[finite].abs().amax().item() if finite.any() else 0.0 for x in (got, stored)]
        bound = 2 * plain + 2 * unit(kind, largest) + 2 * unit(torch.float32, exact.terms[name])
        bound += unit(kind, exact.terms.get(f"{name}_stored", 0.0))
        most = max(most, error / bound)
        if not error <= bound:
            faults.append(f"{name} is off by {error:.3g}, {bound:.3g} allowed")
    return "; ".join(faults), most


def chosen(only):
    """The problems with the wanted values, each with its place in the grid, from which its numbers are drawn."""
    wanted = [word.split("=", 1) for word in only]
    return [(seed, problem) for seed, problem in enumerate(problems())
            if all(says(problem, key) == value for key, value in wanted)]  # fmt: skip


def check_thoroughly(problem, device):
    fault, taken = check(problem, device)
    if not fault or taken > JUST_ABOVE:
        return fault, taken
    print("drawn again:", {key: says(problem, key) for key in problem}, fault, flush=True)
    more = [check(problem, device) for _ in range(2)]
    return "; ".join(fault for fault, _ in more if fault), max(taken, *(share for _, share in more))


def judge(share, device):
    """Failures, problems, and the largest share of a bound that an error takes."""
    torch.backends.cuda.matmul.allow_tf32 = False
    failed, done, most, start, part = 0, 0, 0.0, time.time(), None
    for seed, problem in share:
        here = f"{problem['tokens']} tokens, segments {says(problem, 'segments')}, {problem['heads'][0]} heads"
        if part not in (None, here):
            print(f"{part}: {done} done, {failed} failed, {time.time() - start:.0f} s", flush=True)
        part = here
        torch.manual_seed(seed)
        fault, taken = check_thoroughly(problem, device)
        done, most = done + 1, max(most, taken)
        if fault:
            failed += 1
            print("failed:", {key: says(problem, key) for key in problem}, fault, flush=True)
    return failed, done, most


def deal(arguments):
    """The same in processes of their own, which take turns: neighbours in the grid cost alike. Half of them begin at its
    end, so that not all have large problems at once."""
    words = [sys.executable, __file__, "--device", arguments.device, "--jobs", str(arguments.jobs), *arguments.only]
    workers = [subprocess.Popen([*words, "--job", str(i)], stdout=subprocess.PIPE, text=True)
               for i in range(arguments.jobs)]  # fmt: skip
    failed, done, most, broken = 0, 0, 0.0, 0
    for worker in workers:
        lines = worker.communicate()[0].splitlines()
        for line in lines:
            if line.startswith(("failed: {", "drawn again: {")):
                print(line, flush=True)
        if worker.returncode == 0 and lines and lines[-1].startswith("share: "):
            of_worker = lines[-1].split()[1:]
            failed, done, most = failed + int(of_worker[0]), done + int(of_worker[1]), max(most, float(of_worker[2]))
        else:
            broken += 1
            print(f"failed: a process ended with code {worker.returncode} before its share was done", flush=True)
    return failed, done, most, broken


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the problems")
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    parser.add_argument("only", nargs="*", metavar="KEY=VALUE", help="tokens, segments, heads, head_dim, phase, dtype, "
                        "gradient, causal")  # fmt: skip
    arguments = parser.parse_args()
    if arguments.job is not None:
        share = chosen(arguments.only)[arguments.job :: arguments.jobs]
        print("share:", *judge(share[:: -1 if arguments.job % 2 else 1], arguments.device))
        return 0
    alone = arguments.jobs == 1
    failed, done, most, broken = (*judge(chosen(arguments.only), arguments.device), 0) if alone else deal(arguments)
    verdict = "failed" if failed or broken else "passed"
    print(f"{verdict}: {done - failed} of {done} problems; the largest error takes {most:.2f} of its bound")
    return 1 if failed or broken or not done else 0


if __name__ == "__main__":
    sys.exit(main())
