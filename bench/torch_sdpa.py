#!/usr/bin/env python3
"""Dense attention on the CPU: Annulus against torch.nn.functional.scaled_dot_product_attention, in one run.

    python3 bench/torch_sdpa.py                           fp32 forward, head size 64, causal and not
    python3 bench/torch_sdpa.py --tokens 8192 --threads 2 --json FILE

One segment as long as the sequence makes dilated attention dense, so both compute the same thing; results are compared
before anything is timed. Rounds alternate, both get the same number of threads and the same inputs, each in the layout
it likes best: Annulus [batch, tokens, heads, head_dim], torch [batch, heads, tokens, head_dim], contiguous beforehand.
Annulus is called through its C ABI. Where torch is absent the script says so and ends with exit code 0.
"""

import argparse
import ctypes
import json
import os
import pathlib
import statistics
import sys
import time

from c_abi import Branch, ForwardArgs, Options, Problem, Tensor, load_library, sized

ROOT = pathlib.Path(__file__).resolve().parent.parent
LARGEST_DIFFERENCE = 1e-5  # of two fp32 results; both are that good against fp64
PAUSE_SECONDS = 0.05  # torch's threads spin for some milliseconds after a call, on the cores that the next call needs


class Annulus:
    """Dense attention of one shape. Workspace and outputs are allocated once, as a caller in a loop would."""

    def __init__(self, library, torch, shape, causal, threads):
        self.library, self.torch = library, torch
        batch, tokens, heads, head_dim = shape
        branch = Branch(segment=tokens, dilation=1)
        problem = sized(
            Problem,
            batch=batch,
            tokens=tokens,
            heads=heads,
            head_dim=head_dim,
            branches=ctypes.pointer(branch),
            branch_count=1,
            causal=int(causal),
        )
        self.handle = ctypes.c_void_p()
        options = sized(Options, threads=threads)
        self.check(library.annulus_create(ctypes.byref(problem), ctypes.byref(options), ctypes.byref(self.handle)))
        size = ctypes.c_size_t()
        self.check(library.annulus_workspace_bytes(self.handle, 0, ctypes.byref(size)))
        self.workspace = torch.empty(size.value + 64, dtype=torch.uint8)
        self.out = torch.empty(shape)
        self.lse = torch.empty(batch, heads, tokens)

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.library.annulus_last_error().decode())

    def prepare(self, q, k, v):
        def tensor(x):
            return Tensor(data=x.data_ptr(), dtype=0, shape=(ctypes.c_int64 * 4)(*x.shape))

        start = -(-self.workspace.data_ptr() // 64) * 64
        self.args = sized(
            ForwardArgs,
            q=tensor(q),
            k=tensor(k),
            v=tensor(v),
            out=tensor(self.out),
            lse=self.lse.data_ptr(),
            lse_count=self.lse.numel(),
            workspace=start,
            workspace_bytes=self.workspace.numel() - 64,
        )

    def forward(self):
        self.check(self.library.annulus_forward(self.handle, ctypes.byref(self.args)))

    def close(self):
        self.library.annulus_destroy(self.handle)


def seconds_of(call):
    time.sleep(PAUSE_SECONDS)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(library, torch, shape, causal, arguments):
    """One row of the table: alternating rounds of both."""
    batch, tokens, heads, head_dim = shape
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    theirs_in = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    ours = Annulus(library, torch, shape, causal, arguments.threads)
    ours.prepare(q, k, v)
    theirs_out = None

    def run_theirs():
        nonlocal theirs_out
        theirs_out = torch.nn.functional.scaled_dot_product_attention(*theirs_in, is_causal=causal)

    times = {"annulus": [], "torch": []}
    with torch.inference_mode():
        ours.forward()
        run_theirs()
        difference = (ours.out - theirs_out.transpose(1, 2)).abs().max().item()
        if not difference <= LARGEST_DIFFERENCE:
            raise RuntimeError(f"the results differ by {difference}: nothing is compared")
        for _ in range(arguments.repeats):
            times["annulus"].append(seconds_of(ours.forward))
            times["torch"].append(seconds_of(run_theirs))
    ours.close()
    pairs = batch * heads * (tokens * (tokens + 1) // 2 if causal else tokens * tokens)
    row = {"tokens": tokens, "causal": causal, "flop": 4 * head_dim * pairs, "largest_difference": difference}
    for name, seconds in times.items():
        row[name] = {
            "ms": {"median": statistics.median(seconds) * 1e3, "best": min(seconds) * 1e3, "worst": max(seconds) * 1e3}
        }
        row[name]["flop_per_s"] = row["flop"] / statistics.median(seconds)
    row["speedup"] = row["torch"]["ms"]["median"] / row["annulus"]["ms"]["median"]
    # Round by round, which slow drifts of the machine do not touch.
    row["speedup_by_round"] = statistics.median(t / a for t, a in zip(times["torch"], times["annulus"]))
    return row


def default_library():
    built = [p for p in ROOT.glob("build/*/src/libannulus.so")]
    preferred = ROOT / "build/release/src/libannulus.so"
    return preferred if preferred.exists() or not built else max(built, key=lambda p: p.stat().st_mtime)


def parse_arguments():
    parser = argparse.ArgumentParser(description="Dense attention on the CPU: Annulus against PyTorch.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=9, help="rounds of each, alternating")
    parser.add_argument("--library", default=default_library(), help="libannulus.so (default: that of build/release)")
    parser.add_argument("--json", help="write the results to a file")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    try:
        import torch
    except ImportError as error:
        print(f"SKIPPED: no comparison with PyTorch, since it cannot be imported ({error}).")
        return 0
    if not pathlib.Path(arguments.library).exists():
        print(f"{arguments.library} is not there; build first: ./dev build", file=sys.stderr)
        return 2
    torch.set_num_threads(arguments.threads)
    library = load_library(str(arguments.library))
    print(
        f"annulus {library.annulus_version().decode()} and torch {torch.__version__}, {arguments.threads} threads; "
        f"dense forward, fp32, batch {arguments.batch}, {arguments.heads} heads of {arguments.head_dim}, "
        f"median of {arguments.repeats} alternating rounds"
    )
    print(f"{'tokens':>7} {'causal':>7} {'annulus':>12} {'torch':>12} {'annulus':>9} {'torch':>9}  times as fast")
    rows = []
    for tokens in arguments.tokens:
        for causal in False, True:
            shape = (arguments.batch, tokens, arguments.heads, arguments.head_dim)
            row = compare(library, torch, shape, causal, arguments)
            rows.append(row)
            ms = [row[name]["ms"]["median"] for name in ("annulus", "torch")]
            rate = [row[name]["flop_per_s"] / 1e9 for name in ("annulus", "torch")]
            print(
                f"{tokens:>7} {'yes' if causal else 'no':>7} {ms[0]:>9.1f} ms {ms[1]:>9.1f} ms "
                f"{rate[0]:>6.0f} GF {rate[1]:>6.0f} GF  {row['speedup']:.2f} (by round {row['speedup_by_round']:.2f})",
                flush=True,
            )
    if arguments.json:
        report = {
            "annulus": library.annulus_version().decode(),
            "torch": torch.__version__,
            "threads": arguments.threads,
            "batch": arguments.batch,
            "heads": arguments.heads,
            "head_dim": arguments.head_dim,
            "repeats": arguments.repeats,
            "rows": rows,
        }
        pathlib.Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
