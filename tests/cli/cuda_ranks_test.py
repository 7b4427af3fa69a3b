#!/usr/bin/env python3
"""The tool on ranks that share a GPU: threads, processes over MPI, TCP and NCCL; and one that is killed or stopped.

Run by `./dev gpu`, and by ctest on a pretend GPU (tests/pretend_cuda); exits with 77 (skipped) where the tool finds
neither. Processes that share a GPU have an NCCL_HOSTID each: NCCL takes one rank a GPU of a host, and believes that
they are on different ones.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import unittest

from met_processes import MetProcesses
from mpi_test import HANG_S, MPIEXEC, Job, children
from tool import TOOL, CliTest, info

IS_PRETEND = (info()["gpu"] or {}).get("name") == "pretend GPU"  # a slow one
PROBLEM = ["--device", "cuda", "--tokens", "403" if IS_PRETEND else "1003", "--heads", "4", "--kv-heads", "2"]
PROBLEM += ["--head-dim", "64", "--dtype", "bf16", "--segments", "100,1003", "--dilations", "1,4"]
STRATEGIES = "exchange", "reshard", "ring", "gather", "replicated"
LONG = ["bench", "--device", "cuda", "--heads", "4", "--dtype", "bf16", "--segments", "16k", "--dilations", "1"]
TIMEOUT_S = 5
LONG += ["--strategy", "ring", "--warmup", "0", "--repeats", "9", "--timeout", str(TIMEOUT_S)]
OWN_HOST = 'export NCCL_HOSTID=rank$OMPI_COMM_WORLD_RANK; exec "$@"'


def own_host(rank):
    return {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo"}


def job(ranks, *words):
    return [*MPIEXEC, "-n", str(ranks), "bash", "-c", OWN_HOST, "bash", TOOL, *map(str, words)]


class CudaRanksTest(CliTest):
    def need_mpirun(self):
        if shutil.which(MPIEXEC[0]) is None:
            self.skipTest(f"{MPIEXEC[0]} is not here")

    def need(self, transport):
        if transport not in info()["transports"]:
            self.skipTest(f"`annulus info` shows no transport {transport}")


class CudaRanks(CudaRanksTest):
    def verified(self, command):
        result = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=HANG_S, check=False)
        self.assertEqual(result.returncode, 0, f"{shlex.join(command)}\n{result.stdout}\n{result.stderr}")
        self.assertIn("passed: ", result.stdout)

    def test_threads(self):
        for ranks in 1, 2, 3, 8:
            for strategy in STRATEGIES:
                for causal in [], ["--causal"]:
                    words = ["--ranks", str(ranks), "--strategy", strategy, *causal]
                    self.verified([TOOL, "verify", *PROBLEM, *words])

    def test_layouts(self):
        for layout in "zigzag", "striped":
            for causal in [], ["--causal"]:
                for strategy in "auto", "replicated":
                    words = ["--layout", layout, "--strategy", strategy, *causal]
                    self.verified([TOOL, "verify", *PROBLEM, "--ranks", "3", *words])

    def test_odd_numbers(self):
        """Where a message has fp32 and another type, fp32 begins where a GPU reads it."""
        odd = ["--device", "cuda", "--tokens", "45", "--heads", "3", "--head-dim", "5", "--dtype", "bf16", "--ranks", "3"]
        for strategy in STRATEGIES:
            for words in [], ["--reproducible"]:
                if words and strategy == "replicated":
                    continue
                self.verified([TOOL, "verify", *odd, "--segments", "9,45", "--dilations", "1,1", "--strategy", strategy, *words])

    def processes(self, transport):
        self.need_mpirun()
        self.need(transport)
        for ranks in 2, 4:
            for strategy in STRATEGIES:
                words = ["--transport", transport, "--strategy", strategy, "--timeout", "20"]
                self.verified(job(ranks, "verify", *PROBLEM, *words))

    def test_processes_over_mpi(self):
        self.processes("mpi")

    def test_processes_over_nccl(self):
        self.processes("nccl")

    def met(self, transport):
        """Without MPI."""
        self.need(transport)
        for strategy in STRATEGIES:
            words = ["--transport", transport, "--strategy", strategy, "--timeout", "20"]
            group = MetProcesses(self, 3, "verify", *PROBLEM, *words, variables=own_host)
            self.assertEqual(group.end(), [0, 0, 0], group.text())
            self.assertIn("passed: ", group.text(0))

    def test_processes_that_meet_over_tcp(self):
        self.met("tcp")

    def test_processes_that_meet_over_nccl(self):
        self.met("nccl")

    def test_reproducible_bits(self):
        words = ["run", *PROBLEM, "--backward", "--reproducible", "--quiet", "--json", "-"]
        one = None
        for ranks in 2, 3:
            result = subprocess.run([TOOL, *words, "--ranks", str(ranks)], capture_output=True, text=True, check=True)
            sums = json.loads(result.stdout)["checksum"]
            one = one or sums
            self.assertEqual(sums, one)

    def test_trace_has_the_clock_of_the_gpu(self):
        words = ["--backward", "--ranks", "2", "--trace", "t.json", "--quiet"]
        self.succeed("run", *PROBLEM, *words)
        events = json.loads((self.folder / "t.json").read_text())["traceEvents"]
        names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
        self.assertLessEqual({"GPU kernels", "GPU copies"}, names)
        self.assertIn("attend", {e["name"] for e in events})
        self.assertIn("copy", {e["name"] for e in events})


class Patience(CudaRanksTest):
    def test_a_slow_gpu_is_not_a_lost_rank(self):
        if not IS_PRETEND:
            self.skipTest("a real GPU is never that slow")
        self.need_mpirun()
        # The shards are so uneven that one rank has nothing to do for several times the deadline.
        words = ["--tokens", "1500", "--heads", "4", "--segments", "1500", "--dilations", "1", "--boundaries", "0,1,1500"]
        words += ["--dtype", "fp32", "--timeout", "0.5", "--strategy", "exchange", "--device", "cuda", "--json", "s.json"]
        self.succeed("run", *words, "--ranks", "2")
        done = subprocess.run(job(2, "run", *words), cwd=self.folder, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        if json.loads((self.folder / "s.json").read_text())["seconds"] < 1:
            self.skipTest("this machine's pretend GPU is too fast for the deadline to matter")


class Faults(CudaRanksTest):
    """Three processes on one GPU, hurt from outside: in forward, and in backward."""

    def words(self, transport, backward):
        self.need(transport)
        words = [*LONG, "--tokens", "300" if IS_PRETEND else "16k", "--transport", transport]
        # A few seconds of either pass, or one without an end.
        return [*words, "--backward", "--min-seconds", "4"] if backward else [*words, "--min-seconds", "100000"]

    def hurt(self, transport, a_signal, backward=False):
        self.need_mpirun()
        words = self.words(transport, backward)
        started = Job(self, *job(3, *words))
        if backward:
            started.wait_for("backward, round 3")
        ranks = children(started.process.pid)
        self.assertEqual(len(ranks), 3)
        os.kill(ranks[1], a_signal)
        self.assertNotEqual(started.end(), 0, started.text())
        return started.text()

    def kill(self, transport, backward=False):
        text = self.hurt(transport, signal.SIGKILL, backward)
        self.assertRegex(text, r"rank 1 with PID .* exited on signal 9|rank 1 is lost")

    def stop(self, transport):
        text = self.hurt(transport, signal.SIGSTOP)
        self.assertRegex(text, r"rank 1 is lost: no sign of life for")

    def hurt_met(self, transport, a_signal, why):
        """mpirun ends a job as soon as one rank dies. Without it the others find out themselves, and say so."""
        for backward in False, True:
            group = MetProcesses(self, 3, *self.words(transport, backward), variables=own_host)
            group.wait_for("backward, round 3" if backward else "forward, round 3")
            group.hurt(1, a_signal)
            group.check_that_others_name(1, why, 4 * TIMEOUT_S)

    def test_a_rank_met_over_tcp_is_killed(self):
        self.hurt_met("tcp", signal.SIGKILL, r"rank 1 is lost: its connection to rank \d ended without a word")

    def test_a_rank_met_over_tcp_is_stopped(self):
        self.hurt_met("tcp", signal.SIGSTOP, r"rank 1 is lost: no sign of life for")

    def test_a_rank_met_over_nccl_is_killed(self):
        self.hurt_met("nccl", signal.SIGKILL, r"rank 1 is lost: its connection to rank \d ended without a word")

    def test_a_rank_met_over_nccl_is_stopped(self):
        self.hurt_met("nccl", signal.SIGSTOP, r"rank 1 is lost: no sign of life for")

    def test_a_rank_of_mpi_is_killed(self):
        self.kill("mpi")
        self.kill("mpi", backward=True)

    def test_a_rank_of_nccl_is_killed(self):
        self.kill("nccl")
        self.kill("nccl", backward=True)

    def test_a_rank_of_mpi_is_stopped(self):
        self.stop("mpi")

    def test_a_rank_of_nccl_is_stopped(self):
        self.stop("nccl")


if __name__ == "__main__":
    if info()["gpu"] is None:
        print("Skipped: `annulus info` shows no GPU")
        sys.exit(77)
    unittest.main()
