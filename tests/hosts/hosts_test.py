#!/usr/bin/env python3
"""The tool across hosts whose links carry 1 Gbit/s: right results, which strategy is fastest, and a link that is cut.

Exits with 77 and a reason where this machine cannot play several hosts. ANNULUS_TOOL, MPIEXEC and DELAY_SWITCH (see
hosts.py) name the programs; HOSTS_REPEATS is how often each strategy is timed.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

from hosts import TWO_ADDRESSES, Hosts, Refused

TOOL = os.environ.get("ANNULUS_TOOL", "annulus")
MPIEXEC = os.environ.get("MPIEXEC", "mpirun")
REPEATS = os.environ.get("HOSTS_REPEATS", "5")
COUNT = 4
SMALL = ["--tokens", "1009", "--heads", "4", "--head-dim", "16", "--segments", "64,1009", "--dilations", "1,3"]
# Little to compute behind much to move: a short branch, and a long one of which a head sees every 16th token.
LONG = ["--tokens", "32k", "--heads", "4", "--segments", "256,32k", "--dilations", "1,16", "--threads", "1"]
STRATEGIES = ("auto", "exchange", "reshard", "ring", "gather")
SLACK = 1.5  # of times on a machine that others use too, and of a cost model that does not know the links

hosts = None  # made once, by main


def on_hosts(*words, ranks=COUNT):
    return subprocess.run(
        hosts.mpirun(MPIEXEC, "--timeout", "300", "-n", ranks, TOOL, *words),
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip


def report(*words, ranks=COUNT):
    result = on_hosts(*words, "--json", "-", "--quiet", ranks=ranks)
    if result.returncode != 0:
        raise AssertionError(f"{words}\n{result.stdout}\n{result.stderr}")
    return json.loads(result.stdout)


def met_report(place, *words, ranks=COUNT):
    """The same without MPI: as many processes on each host as it takes, started by hand."""
    job = []
    try:
        for rank in range(ranks):
            variables = ["env", f"RANK={rank}", f"WORLD_SIZE={ranks}"]
            met = [TOOL, *words, "--launcher", "torchrun", "--rendezvous", place, "--json", "-", "--quiet"]
            command = hosts.on(rank * COUNT // ranks + 1, *variables, *met)
            job.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        ends = [process.communicate(timeout=300) for process in job]
    finally:
        for process in job:
            process.kill()
            process.wait()
    if any(process.returncode != 0 for process in job):
        raise AssertionError(f"{words}\n{ends}")
    return json.loads(ends[0][0])


class AcrossHosts(unittest.TestCase):
    def test_the_bits_of_one_rank(self):
        alone = subprocess.run(
            [TOOL, "run", *SMALL, "--backward", "--json", "-", "--quiet"], capture_output=True, text=True, check=True
        )
        for ranks in 2, COUNT:
            many = report("run", *SMALL, "--backward", "--reproducible", ranks=ranks)
            self.assertEqual(many["checksum"], json.loads(alone.stdout)["checksum"])

    def test_processes_that_meet_without_mpi(self):
        """Two on a host, and no host knows the name of another, nor which of two addresses is right."""
        words = ["run", *SMALL, "--backward", "--reproducible"]
        alone = subprocess.run([TOOL, *words, "--quiet", "--json", "-"], capture_output=True, text=True, check=True)
        with tempfile.TemporaryDirectory() as folder:
            for place in "tcp:10.77.0.1:29400", f"tcp:{TWO_ADDRESSES}:29401", f"file:{folder}/meet":
                many = met_report(place, *words, ranks=2 * COUNT)
                self.assertEqual(many["checksum"], json.loads(alone.stdout)["checksum"])

    def test_verify(self):
        for strategy in STRATEGIES:
            self.assertIs(report("verify", *SMALL, "--causal", "--strategy", strategy)["passed"], True)

    def test_strategies_on_slow_links(self):
        rows, times = [], {}
        for strategy in STRATEGIES:
            words = [*LONG, "--backward", "--strategy", strategy, "--repeats", REPEATS, "--min-seconds", "0"]
            measured = report("bench", *words)
            without_mpi = met_report("tcp:10.77.0.1:29402", "bench", *words)
            for each in measured, without_mpi:
                self.assertEqual(each["traffic"]["sent_bytes"], each["traffic"]["plan_bytes"])
            forward, backward = (measured[name]["ms"]["median"] for name in ("forward", "backward"))
            times[strategy] = sum(measured[name]["ms"]["best"] for name in ("forward", "backward"))
            exposed = measured["communication"]["exposed_fraction"]
            sent = measured["traffic"]["largest_rank"]["sent_bytes"] / 2**20
            name = strategy if strategy != "auto" else f"auto ({measured['sharding']['strategy']})"
            by_tcp = sum(without_mpi[name]["ms"]["median"] for name in ("forward", "backward"))
            rows.append(
                f"| {name} | {forward:.0f} | {backward:.0f} | {100 * exposed:.0f} % | {sent:.1f} | {by_tcp:.0f} |"
            )
        print(f"\n{COUNT} hosts, links of {hosts.limit}: annulus bench {' '.join(LONG)} --backward")
        print("| strategy | forward, ms | backward, ms | exposed | MiB sent by a rank | both over TCP, ms |\n" + "|---" * 6 + "|")
        print("\n".join(rows), flush=True)
        self.assertLess(times["auto"], SLACK * min(times.values()))
        self.assertLess(times["auto"], times["ring"])

    def test_zz_a_link_is_cut(self):  # and stays so: unittest sorts by name, so this one comes last
        """Whoever can still speak says who is lost, and nothing hangs."""
        words = ["bench", *LONG, "--strategy", "ring", "--repeats", "1000000", "--timeout", "3", "--quiet"]
        job = subprocess.Popen(
            hosts.mpirun(MPIEXEC, "--timeout", "120", "-n", COUNT, TOOL, *words),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        with self.assertRaises(subprocess.TimeoutExpired):
            job.communicate(timeout=6)
        hosts.cut(COUNT)
        _, err = job.communicate(timeout=150)
        self.assertNotEqual(job.returncode, 0, err)
        self.assertRegex(err, rf"rank {COUNT - 1} is lost|told to stop", err)


if __name__ == "__main__":
    if shutil.which(MPIEXEC) is None:
        print(f"Skipped: no {MPIEXEC} here (openmpi-bin)")
        sys.exit(77)
    try:
        with Hosts(COUNT, delay_switch=os.environ.get("DELAY_SWITCH")) as hosts:
            print(f"{COUNT} hosts, links of {hosts.limit}", flush=True)
            unittest.main()
    except Refused as reason:
        print(f"Skipped: this machine cannot play several hosts: {reason}")
        sys.exit(77)
