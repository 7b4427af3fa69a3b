#!/usr/bin/env python3
"""What ranks cost and save on this machine: time, memory of a process and bytes on the wire, as JSON.

    python3 bench/ranks.py                                all of it, in build/release
    python3 bench/ranks.py speed traffic --json FILE      some parts; the others stay as FILE has them

speed    2 MPI ranks of 1 thread against 1 rank of 1 thread, and 8 ranks in one process on all cores against 1 rank with
         as many threads, for segments that fit shards and for one that spans all of them. Rounds alternate.
memory   1M tokens, forward and backward: peak resident size of each MPI process against the plan; and for 256k tokens
         `gather` beside, which holds everything everywhere.
traffic  1M tokens on 8 ranks, five branches up to the whole sequence: bytes that the transport counted, auto and ring.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
ONCE = ["--warmup", "0", "--repeats", "1", "--min-seconds", "0"]
MIB = 1 << 20


class Tool:
    def __init__(self, path):
        self.path = str(path)

    def bench(self, arguments, mpi_ranks=0):
        """The report of one `annulus bench`, under mpirun where mpi_ranks says so."""
        command = [self.path, "bench", *map(str, arguments), "--quiet", "--json", "-"]
        environment = dict(os.environ)
        if mpi_ranks:
            command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(mpi_ranks), *command]
            # Open MPI asks root for both of these words.
            environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
        return json.loads(done.stdout)


def milliseconds(report):
    forward = report["forward"]["ms"]["best"]
    return {"forward": forward, "forward_and_backward": forward + report["backward"]["ms"]["best"]}


def speed(tool, rounds):
    cores = len(os.sched_getaffinity(0))
    problem = ["--tokens", "16k", "--heads", 4, "--head-dim", 64, "--dilations", "1,2", "--backward"]
    problem += ["--warmup", 1, "--repeats", 1, "--min-seconds", 0]
    runs = {  # name: arguments, MPI ranks
        "1 rank, 1 thread": (["--threads", 1], 0),
        "2 MPI ranks, 1 thread": (["--threads", 1], 2),
        f"1 rank, {cores} threads": (["--threads", cores], 0),
        "8 ranks in a process": (["--ranks", 8], 0),
    }
    compared = [  # new, old
        ("2 MPI ranks, 1 thread", "1 rank, 1 thread"),
        ("8 ranks in a process", f"1 rank, {cores} threads"),
    ]
    result = []
    for what, segments in ("segments fit shards", "2048,2048"), ("a segment spans all ranks", "2048,16k"):
        times = {name: [] for name in runs}
        for _ in range(rounds):
            for name, (arguments, ranks) in runs.items():
                times[name].append(
                    milliseconds(tool.bench([*problem, "--segments", segments, *arguments], mpi_ranks=ranks))
                )
        best = {
            name: {key: min(one[key] for one in rows) for key in ("forward", "forward_and_backward")}
            for name, rows in times.items()
        }
        ratios = [
            {"what": f"{new} against {old}"} | {key: best[old][key] / best[new][key] for key in best[old]}
            for new, old in compared
        ]
        result.append({"what": what, "segments": segments, "rounds": rounds, "ms": best, "times_as_fast": ratios})
        for ratio in ratios:
            print(
                f"{what}: {ratio['what']}: forward {ratio['forward']:.2f}, "
                f"forward + backward {ratio['forward_and_backward']:.2f} times as fast",
                flush=True,
            )
    return result


def memory(tool, _):
    problem = ["--heads", 4, "--head-dim", 64, "--segments", "512,64k", "--dilations", "1,128", "--backward"]
    result = []
    for tokens, strategy in ("1M", "auto"), ("256k", "auto"), ("256k", "gather"):
        for ranks in 2, 4, 8:
            report = tool.bench(
                [*problem, "--tokens", tokens, "--strategy", strategy, "--threads", 1, *ONCE], mpi_ranks=ranks
            )
            by_rank = report["memory"]["by_rank"]
            worst = max(by_rank, key=lambda rank: rank["process_peak_bytes"] / rank["plan_bytes"])
            row = {
                "tokens": report["problem"]["tokens"],
                "strategy": strategy,
                "ranks": ranks,
                "plan_bytes": worst["plan_bytes"],
                "process_peak_bytes": worst["process_peak_bytes"],
                "process_peak_of_plan": worst["process_peak_bytes"] / worst["plan_bytes"],
            }
            result.append(row)
            print(
                f"memory: {tokens} tokens, {strategy}, {ranks} ranks: process peak {row['process_peak_bytes'] / MIB:.0f} MiB, "
                f"{row['process_peak_of_plan']:.3f} of the plan",
                flush=True,
            )
    return result


def traffic(tool, _):
    problem = ["--tokens", "1M", "--heads", 16, "--head-dim", 16, "--ranks", 8]
    problem += ["--segments", "2048,8192,32768,262144,1M", "--dilations", "1,2,4,8,16", *ONCE]
    sent = {}
    for strategy in "auto", "ring":
        report = tool.bench([*problem, "--strategy", strategy])
        sent[strategy] = report["traffic"] | {"strategy": report["sharding"]["strategy"]}
        print(f"traffic: {strategy}: {sent[strategy]['sent_bytes'] / MIB:.1f} MiB counted, all ranks", flush=True)
    nested = tool.bench(
        ["--tokens", "1M", "--heads", 1, "--head-dim", 8, "--ranks", 8, "--segments", "128,256", "--dilations", "1,2", *ONCE]
    )["traffic"]
    print(f"traffic: segments that nest in shards: {nested['sent_bytes']} bytes", flush=True)
    share = sent["auto"]["sent_bytes"] / sent["ring"]["sent_bytes"]
    print(f"traffic: auto sends {100 * share:.1f} % of what ring sends", flush=True)
    return sent | {"auto_of_ring": share, "nested": nested}


PARTS = {"speed": speed, "memory": memory, "traffic": traffic}


def main():
    parser = argparse.ArgumentParser(description="Time, memory and traffic of ranks on this machine.")
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--tool", default=ROOT / "build/release/bin/annulus", help="default: that of build/release")
    parser.add_argument("--rounds", type=int, default=5, help="of speed, alternating (default 5)")
    parser.add_argument("--json", type=pathlib.Path, help="write the results to a file")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"a part must be one of {', '.join(PARTS)}; got {', '.join(sorted(unknown))}")
    if shutil.which("mpirun") is None:
        print("SKIPPED: no measurements of ranks, since mpirun is not installed.")
        return 0
    if not pathlib.Path(arguments.tool).exists():
        print(f"{arguments.tool} is not there; build first: ./dev build", file=sys.stderr)
        return 2
    tool = Tool(arguments.tool)
    report = {}
    if arguments.json and arguments.json.exists():
        report = json.loads(arguments.json.read_text())
    report["environment"] = tool.bench(["--tokens", 64, "--heads", 1, *ONCE])["environment"]
    for part in arguments.parts or PARTS:
        report[part] = PARTS[part](tool, arguments.rounds)
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
