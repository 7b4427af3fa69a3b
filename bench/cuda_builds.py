#!/usr/bin/env python3
"""Builds of the library against each other on one GPU, and against cuDNN: which is faster once the clock has settled.

    python3 bench/cuda_builds.py --library before/libannulus.so --library after/libannulus.so \\
        "d64 m2048 causal r16" "forward d128 m16384" "deterministic d64 m16384" "d128 5 branches"

A case is written as in the results of cuda_backward.py: head size, rows of a group (or 2 or 5 branches at 512K tokens),
causal or not, dilation (1 unless given). Backward, all of it, unless it says forward; cuDNN takes part in backward of
one branch.

Every build is a process of its own, since what two of them have by the same name the loader may take for one thing. All
draw the same tensors. They take turns, each busy for --seconds; the first third of a turn does not count, and a turn's
figure is the median of the rest. Differences below one percent are noise. Without torch or a GPU the script says so and
ends with exit code 0.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys

import c_abi
import cuda_backward
from cuda_forward import FIVE, TWO, find_torch

PEER = "cudnn"


def parse(case):
    """The arguments of cuda_backward.Backward, its options, and which pass of it."""
    match = re.fullmatch(r"(?:(forward|deterministic) )?d(64|128) (?:m(\d+)|([25]) branches)( causal)?(?: r(\d+))?", case)
    if not match or (match[4] and match[6]):  # branches have their own dilations
        raise SystemExit(f"a case is such as 'd64 m2048 causal r16' or 'forward d128 5 branches'; got {case!r}")
    kind, head_dim, rows, branches, causal, dilation = match.groups()
    options = {"causal": bool(causal), "deterministic": kind == "deterministic"}
    if branches:
        shape = (1 << 19, int(head_dim), *(TWO if branches == "2" else FIVE))
        return shape, {"phase": "by_head_block", **options}, kind
    factor = int(dilation or 1)
    shape = (16384 * factor, int(head_dim), [int(rows) * factor], [factor])
    return shape, {"phase": "every", **options}, kind


def make_call(bench, name, case):
    """What one process measures: a call and its FLOP, or None where it takes no part."""
    (tokens, head_dim, segments, dilations), options, kind = parse(case)
    bench.torch.manual_seed(1)
    if name != PEER:
        ours = bench.backward(tokens, head_dim, segments, dilations, **options)
        return (ours.forward, ours.flop) if kind == "forward" else (ours, ours.gradient_flop)
    if kind == "forward" or len(segments) > 1:
        return None
    rows = segments[0] // dilations[0]
    dense = bench.backward(16384, head_dim, [rows], [1], **options)
    return bench.peer_of(rows, options["causal"], (dense.q, dense.k, dense.v, dense.dout)), dense.gradient_flop


def work(name, library):
    """A process of one build: reads 'case ...' and 'turn SECONDS', answers each with a line."""
    import torch
    bench = cuda_backward.Bench(torch, c_abi.load_library(library), None)
    call, flop = None, 0
    print("ready", flush=True)
    for line in sys.stdin:
        verb, text = line.strip().split(" ", 1)
        if verb == "case":
            call = made = None  # their memory is for the next one
            torch.cuda.empty_cache()
            made = make_call(bench, name, text)
            if made:
                call, flop = made
            print("yes" if made else "no", flush=True)
        else:
            once = bench.launch_times(call, 1)[0]
            count = max(4, int(float(text) * 1000 / max(once, 1e-2)))
            bench.launch_times(call, count // 3)
            times = bench.launch_times(call, count - count // 3)
            print(flop / times[len(times) // 2] / 1e9, flush=True)


class Worker:
    def __init__(self, name, library):
        self.process = subprocess.Popen([sys.executable, __file__, "--worker", name, "--library", library], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.read()

    def read(self):
        line = self.process.stdout.readline().strip()
        if not line:
            raise SystemExit("a process of this comparison has ended; its error stands above")
        return line

    def ask(self, text):
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        return self.read()

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def name_builds(paths):
    """Short names that tell the libraries apart."""
    common = os.path.commonpath([os.path.dirname(path) for path in paths])
    names = ["annulus"] if len(paths) == 1 else [os.path.relpath(os.path.dirname(path), common) for path in paths]
    return dict(zip(names if len(set(names)) == len(paths) else paths, paths))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", action="append", required=True, help="libannulus.so, with libannulus_cuda.so beside it")
    parser.add_argument("--seconds", type=float, default=0.5, help="of one turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("cases", nargs="*")
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments.worker, arguments.library[0])
    if not arguments.cases:
        parser.error("nothing to measure: name a case, such as 'd64 m2048'")
    for case in arguments.cases:
        parse(case)
    torch = find_torch()
    if not torch:
        return 0
    builds = name_builds([os.path.abspath(path) for path in arguments.library])
    workers = {name: Worker(name, path) for name, path in {**builds, PEER: next(iter(builds.values()))}.items()}
    results = []
    for case in arguments.cases:
        taking_part = {name: worker for name, worker in workers.items() if worker.ask(f"case {case}") == "yes"}
        rates = {name: [] for name in taking_part}
        order = list(taking_part.items())
        for _ in range(arguments.turns):
            for name, worker in order:
                rates[name].append(float(worker.ask(f"turn {arguments.seconds}")))
            order = order[1:] + order[:1]  # what ran before decides how warm the card is
        print(f"{case}: " + " | ".join(f"{name} {' '.join(f'{rate:.0f}' for rate in turns)}" for name, turns in rates.items()),
              flush=True)
        results.append({"name": case, "tflop_per_s": rates})
    for worker in workers.values():
        worker.end()
    if arguments.json:
        report = {"environment": {"device": torch.cuda.get_device_name(), "torch": torch.__version__}, "results": results}
        pathlib.Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
