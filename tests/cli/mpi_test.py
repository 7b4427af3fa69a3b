#!/usr/bin/env python3
"""The tool under mpirun: the bits of one rank, files, and ranks that are killed, stopped, told to stop or misled.

MPIEXEC names the launcher with its options; exits with 77 (skipped) where there is none. Signals go to processes of our
own jobs only, by the ids that they have under their launcher.
"""

import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from tool import SMALL, TOOL, CliTest, problem_file, read_safetensors

MPIEXEC = shlex.split(os.environ.get("MPIEXEC", "mpirun --allow-run-as-root --oversubscribe"))
HANG_S = 120  # far beyond any deadline: who takes longer hangs
# Long enough to be hit: rounds without end. (The first few are shown, which tells when they have begun.)
LONG = ["bench", "--tokens", "4k", "--heads", "4", "--segments", "4k", "--dilations", "1", "--strategy", "ring"]
LONG += ["--repeats", "9", "--min-seconds", "100000", "--warmup", "0", "--threads", "1"]


def children(pid):
    """Processes below this one that run the tool, in order of their rank."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == pid and os.path.basename(os.readlink(entry / "exe")) == "annulus":
                variables = (entry / "environ").read_bytes().split(b"\0")
                ranks = [v for v in variables if v.startswith(b"OMPI_COMM_WORLD_RANK=")]
                found.append((int(ranks[0].split(b"=")[1]), int(entry.name)))
        except (OSError, ValueError, IndexError):
            continue
    return [pid for _, pid in sorted(found)]


def is_running(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


class MpiTest(CliTest):
    def mpirun(self, ranks, *arguments):
        return subprocess.run(
            [*MPIEXEC, "-n", str(ranks), TOOL, *map(str, arguments)],
            cwd=self.folder, capture_output=True, text=True, timeout=HANG_S, check=False,
        )  # fmt: skip

    def mpi_report(self, ranks, *arguments):
        result = self.mpirun(ranks, *arguments, "--json", "-", "--quiet")
        self.assertEqual(result.returncode, 0, f"{arguments}\n{result.stdout}\n{result.stderr}")
        return json.loads(result.stdout)


class Results(MpiTest):
    def test_the_bits_of_one_rank(self):
        for words in ["--backward"], ["--dtype", "bf16", "--causal", "--backward"]:
            one = self.report("run", *SMALL, *words)
            for ranks in 2, 3:
                for layout in "contiguous", "striped":
                    many = self.mpi_report(ranks, "run", *SMALL, *words, "--reproducible", "--layout", layout)
                    self.assertEqual(many["checksum"], one["checksum"])
                    self.assertEqual(many["environment"]["launcher"], "mpirun")
                    self.assertEqual(many["environment"]["transport"], "mpi")
                    self.assertEqual(many["environment"]["ranks"], ranks)

    def test_threads_and_processes_agree(self):
        for strategy in "exchange", "ring", "gather":
            words = ["run", *SMALL, "--backward", "--strategy", strategy]
            threads = self.report(*words, "--ranks", "3")
            processes = self.mpi_report(3, *words)
            self.assertEqual(processes["checksum"], threads["checksum"])
            self.assertEqual(processes["traffic"], threads["traffic"])

    def test_verify(self):
        result = self.mpirun(3, "verify", *SMALL, "--layout", "zigzag", "--causal")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stdout.count("passed: "), 1, "reports come from rank 0 alone")
        self.assertIn("on 3 ranks against one rank", result.stdout)

    def test_bench(self):
        words = [*SMALL, "--backward", "--repeats", "2", "--min-seconds", "0", "--trace", "t.json"]
        report = self.mpi_report(2, "bench", *words)
        self.assertEqual(report["traffic"]["sent_bytes"], report["traffic"]["plan_bytes"])
        self.assertIn("transport", report["memory"]["components"])
        for rank in report["memory"]["by_rank"]:
            self.assertGreater(rank["process_peak_bytes"], 0)
        events = json.loads((self.folder / "t.json").read_text())["traceEvents"]
        self.assertEqual({e["pid"] for e in events}, {0, 1})

    def test_files(self):
        problem_file(self.folder / "x.safetensors", kv_heads=1)
        words = ["--input", "x.safetensors", "--segments", "16,32", "--dilations", "1,2", "--backward", "--reproducible"]
        self.succeed("run", *words, "--output", "one.safetensors")
        result = self.mpirun(3, "run", *words, "--output", "many.safetensors", "--layout", "zigzag")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(
            read_safetensors(self.folder / "many.safetensors"), read_safetensors(self.folder / "one.safetensors")
        )
        self.assertEqual(len(list(self.folder.iterdir())), 3, "a temporary file was left behind")

    def test_plan_and_info_speak_once(self):
        for words in ["plan", *SMALL], ["info"]:
            result = self.mpirun(2, *words)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertEqual(result.stdout.count("annulus "), 1, result.stdout)


class BadInput(MpiTest):
    def refused(self, code, parts, ranks, *arguments):
        result = self.mpirun(ranks, *arguments)
        self.assertEqual(result.returncode, code, result.stderr)
        lines = [line for line in result.stderr.splitlines() if line.startswith("annulus: ")]
        self.assertGreater(len(lines), 0, result.stderr)
        for line in lines:
            for part in parts:
                self.assertIn(part, line)

    def test_wrong_options(self):
        self.refused(2, ["--ranks 3 and 2 processes", "mpirun -n 3"], 2, "run", *SMALL, "--ranks", "3")
        self.refused(2, ["mpirun started 2 processes"], 2, "run", *SMALL, "--transport", "threads")
        self.refused(2, ["2 ranks are 3 numbers", "got 2"], 2, "run", *SMALL, "--boundaries", "0,40")
        self.refused(2, ["nccl", "GPUs", "cpu", "--transport mpi"], 2, "run", *SMALL, "--transport", "nccl")
        self.refused(3, ["--memory-limit", "give --memory-limit"], 2, "run", *SMALL, "--memory-limit", "1k", "--quiet")

    def test_what_rank_0_refuses_all_refuse(self):
        self.refused(2, ["missing/y.safetensors"], 2, "run", *SMALL, "--output", "missing/y.safetensors", "--quiet")
        self.refused(2, ["missing/t.json"], 2, "bench", *SMALL, "--trace", "missing/t.json", "--quiet")

    def test_ranks_that_disagree(self):
        """All ranks learn who differs, and in what."""
        words = [TOOL, "run", *SMALL, "--quiet"]
        result = subprocess.run(
            [*MPIEXEC, "-n", "1", *words, ":", "-n", "1", *words, "--causal"],
            cwd=self.folder, capture_output=True, text=True, timeout=HANG_S, check=False,
        )  # fmt: skip
        self.assertEqual(result.returncode, 3, result.stderr)
        self.assertIn("causal", result.stderr)


class Job:
    """A long run of the tool in the background, with what it says in a file beside the test's folder."""

    def __init__(self, test, *words):
        self.test = test
        log = tempfile.NamedTemporaryFile(prefix="annulus-log")
        test.addCleanup(log.close)
        self.log = pathlib.Path(log.name)
        self.process = subprocess.Popen(words, cwd=test.folder, stdout=subprocess.DEVNULL, stderr=log)
        self.wait_for("forward, round 3")  # by rank 0; all have moved something by then

    def wait_for(self, words):
        end = time.monotonic() + HANG_S
        while words not in self.text():
            self.test.assertIsNone(self.process.poll(), self.text())
            self.test.assertLess(time.monotonic(), end, self.text())
            time.sleep(0.05)

    def text(self):
        return self.log.read_text()

    def end(self):
        """Its exit code."""
        try:
            return self.process.wait(timeout=HANG_S)
        except subprocess.TimeoutExpired:
            for pid in children(self.process.pid):
                os.kill(pid, signal.SIGKILL)
            self.process.kill()
            self.test.fail(f"hangs:\n{self.text()}")


class Faults(MpiTest):
    """A long job of three ranks, hurt from outside."""

    def start(self, timeout_s=3):
        self.job = Job(self, *MPIEXEC, "-n", "3", TOOL, *LONG, "--timeout", str(timeout_s))
        self.ranks = children(self.job.process.pid)
        self.assertEqual(len(self.ranks), 3)

    def end(self):
        code = self.job.end()
        self.err = self.job.text()
        deadline = time.monotonic() + 20
        while any(map(is_running, self.ranks)) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.assertFalse([pid for pid in self.ranks if is_running(pid)], self.err)
        return code

    def message(self, rank):
        lines = [line for line in self.err.splitlines() if line.startswith(f"annulus: rank {rank}: ")]
        self.assertEqual(len(lines), 1, self.err)
        return lines[0]

    def test_a_rank_is_stopped(self):
        self.start()
        os.kill(self.ranks[1], signal.SIGSTOP)
        self.assertEqual(self.end(), 3, self.job.text())
        for rank in 0, 2:
            self.assertRegex(self.message(rank), r"rank 1 is lost: no sign of life for")
            self.assertIn(f"annulus: the last events of rank {rank}:", self.err)
        self.assertRegex(self.err, r"ms +(wait|post|attend) +exchange \d+")

    def test_a_rank_is_killed(self):
        self.start()
        os.kill(self.ranks[2], signal.SIGKILL)
        self.assertNotEqual(self.end(), 0, self.job.text())
        self.assertRegex(self.err, r"rank 2 with PID .* exited on signal 9|rank 2 is lost")

    def test_a_rank_is_told_to_stop(self):
        self.start()
        os.kill(self.ranks[0], signal.SIGTERM)
        self.assertEqual(self.end(), 3, self.job.text())
        for rank in 0, 1, 2:
            self.assertRegex(self.message(rank), r"rank 0 gave up.*told to stop")

    def test_a_slow_rank_is_named_and_the_job_goes_on(self):
        self.start(timeout_s=20)
        os.kill(self.ranks[1], signal.SIGSTOP)
        time.sleep(6)  # more than a quarter of the timeout
        os.kill(self.ranks[1], signal.SIGCONT)
        time.sleep(1)
        self.assertIsNone(self.job.process.poll(), self.job.text())
        for pid in self.ranks:
            os.kill(pid, signal.SIGTERM)
        self.assertEqual(self.end(), 3)
        self.assertRegex(self.err, r"annulus: rank [02] warns: rank 1 is slow")


class Signals(CliTest):
    def test_threads_end_cleanly(self):
        for ranks in 1, 3:
            job = Job(self, TOOL, *LONG, "--ranks", str(ranks), "--json", "r.json")
            job.process.send_signal(signal.SIGTERM if ranks == 1 else signal.SIGINT)
            self.assertEqual(job.end(), 3, job.text())
            self.assertIn("told to stop", job.text())
            self.assertEqual(list(self.folder.iterdir()), [], "no file, whole or in parts")


if __name__ == "__main__":
    if shutil.which(MPIEXEC[0]) is None:
        print(f"Skipped: no {MPIEXEC[0]} here (openmpi-bin)")
        sys.exit(77)
    unittest.main()
