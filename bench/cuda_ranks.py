#!/usr/bin/env python3
"""Ranks that share one GPU against one rank on it: time of a pass and memory of a rank, as JSON.

    python3 bench/cuda_ranks.py --json bench/results/nvidia-h200-ranks.json

512K tokens, 16 heads of 128, bf16, forward and backward; 1, 2, 4 and 8 ranks in one process. Patterns: two and five
branches whose segments fit the shards of 8 ranks, and one with a segment that spans all ranks. A pass takes as long as
its slowest rank; all ranks begin together.
"""

import argparse
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PATTERNS = {
    "two branches": ("2048,4096", "1,2"),
    "five branches": ("2048,4096,8192,16384,32768", "1,2,4,8,16"),
    "a segment spans all ranks": ("2048,524288", "1,16"),
}
PROBLEM = ["--device", "cuda", "--tokens", "512k", "--heads", "16", "--head-dim", "128", "--dtype", "bf16", "--backward"]


def bench(tool, arguments):
    command = [str(tool), "bench", *arguments, "--quiet", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", type=pathlib.Path, default=ROOT / "build/release/bin/annulus")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--repeats", default="5")
    parser.add_argument("--causal", action="store_true")
    options = parser.parse_args()
    rows, gpu = [], None
    for what, (segments, dilations) in PATTERNS.items():
        one = None
        for ranks in 1, 2, 4, 8:
            words = [*PROBLEM, "--segments", segments, "--dilations", dilations, "--ranks", str(ranks)]
            words += ["--repeats", options.repeats, "--min-seconds", "0"] + (["--causal"] if options.causal else [])
            report = bench(options.tool, words)
            gpu = report["environment"]["gpu"]
            row = {
                "pattern": what,
                "segments": segments,
                "dilations": dilations,
                "causal": options.causal,
                "ranks": ranks,
                "strategy": report["sharding"]["strategy"] if "sharding" in report else "none",
                "forward_ms": report["forward"]["ms"]["median"],
                "backward_ms": report["backward"]["ms"]["median"],
                "plan_bytes": report["memory"]["plan_bytes"],
                "peak_bytes": report["memory"]["peak_bytes"],
                "sent_bytes": report["traffic"]["sent_bytes"],
            }
            one = one or row
            for name in "forward", "backward":
                row[f"{name}_times_one_rank"] = row[f"{name}_ms"] / one[f"{name}_ms"]
            rows.append(row)
            print(
                f"{what:26} {ranks} ranks  forward {row['forward_ms']:7.2f} ms ({row['forward_times_one_rank']:.3f})  "
                f"backward {row['backward_ms']:7.2f} ms ({row['backward_times_one_rank']:.3f})  "
                f"memory of a rank {row['peak_bytes'] / 2**30:6.2f} GiB, planned {row['plan_bytes'] / 2**30:6.2f}",
                flush=True,
            )
    if options.json:
        command = "python3 bench/cuda_ranks.py" + (" --causal" if options.causal else "")
        options.json.write_text(json.dumps({"command": command, "gpu": gpu, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
