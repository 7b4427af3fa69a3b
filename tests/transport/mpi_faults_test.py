#!/usr/bin/env python3
"""Ranks of an MPI job that are killed, stopped, slowed down or throw, seen from outside: the job ends in time, with the
right exit code, every survivor names the culprit, and no process is left behind.

MPI_RING names the program (mpi_ring.cc), MPIEXEC the launcher with its options; with ANNULUS_MPI_CUDA=1 ranks have memory
of a GPU that is not one, and MPI is given that. Signals go to processes of our own jobs
only, by the ids that they print.
"""

import os
import re
import shlex
import signal
import subprocess
import threading
import time
import unittest

RING = os.environ["MPI_RING"]
MPIEXEC = shlex.split(os.environ["MPIEXEC"])
TRANSPORT = "CUDA-aware mpi" if os.environ.get("ANNULUS_MPI_CUDA") == "1" else "mpi"
RANKS = 3
TIMEOUT_S = 3
HANG_S = 60  # far beyond any deadline: who takes longer hangs


class Job:
    """mpirun with RANKS processes. Reads along, so that a test can wait for a rank to reach a step."""

    def __init__(self, *arguments, timeout_s=TIMEOUT_S, ranks=RANKS):
        command = [*MPIEXEC, "-n", str(ranks), RING, *map(str, arguments[:2]), str(timeout_s * 1000), *map(str, arguments[2:])]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.out, self.err = [], []
        self.news = threading.Condition()
        self.readers = [
            threading.Thread(target=self.read, args=pair, daemon=True)
            for pair in [(self.process.stdout, self.out), (self.process.stderr, self.err)]
        ]
        for reader in self.readers:
            reader.start()

    def read(self, stream, lines):
        for line in stream:
            with self.news:
                lines.append(line.rstrip("\n"))
                self.news.notify_all()

    def wait_for(self, pattern):
        """The first match in what the job has printed or will print."""
        end = time.monotonic() + HANG_S
        with self.news:
            while True:
                for line in self.out:
                    if match := re.search(pattern, line):
                        return match
                if not self.news.wait(timeout=end - time.monotonic()) or time.monotonic() > end:
                    raise AssertionError(f"never saw '{pattern}' in\n{self.text()}")

    def pid(self, rank):
        return int(self.wait_for(rf"rank {rank} by {TRANSPORT} pid (\d+)")[1])

    def end(self):
        """Its exit code, like the shell's."""
        try:
            code = self.process.wait(timeout=HANG_S)
        except subprocess.TimeoutExpired:
            for rank in range(RANKS):
                os.kill(self.pid(rank), signal.SIGKILL)
            self.process.kill()
            raise AssertionError(f"hangs:\n{self.text()}") from None
        for reader in self.readers:
            reader.join()
        for stream in (self.process.stdout, self.process.stderr):
            stream.close()
        return code if code >= 0 else 128 - code

    def text(self):
        return "\n".join(self.out + self.err)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


class Faults(unittest.TestCase):
    def fails(self, job, rank):
        """What a rank said when it failed."""
        lines = [line for line in job.err if f"rank {rank} fails: " in line]
        self.assertEqual(len(lines), 1, f"rank {rank} in\n{job.text()}")
        return lines[0]

    def none_left(self, pids, job):
        end = time.monotonic() + HANG_S
        while any(map(is_running, pids)) and time.monotonic() < end:
            time.sleep(0.05)
        self.assertFalse([pid for pid in pids if is_running(pid)], f"left behind by\n{job.text()}")

    def test_a_sound_job(self):
        job = Job(5, 10)
        self.assertEqual(job.end(), 0, job.text())
        for rank in range(RANKS):
            self.assertIn(f"rank {rank} done", job.out)
        self.assertEqual([line for line in job.err if "rank" in line], [])

    def test_a_rank_throws_at_each_step(self):
        for rank, step in [(0, 0), (1, 2), (2, 4)]:
            job = Job(5, 10, "throw", rank, step)
            self.assertEqual(job.end(), 3, job.text())
            self.assertIn(f"no memory for the tiles of step {step}", self.fails(job, rank))
            for other in set(range(RANKS)) - {rank}:
                self.assertIn(f"rank {rank} gave up at step {step}: no memory for the tiles", self.fails(job, other))

    def test_a_rank_is_stopped(self):
        job = Job(1000, 20)
        pids = [job.pid(rank) for rank in range(RANKS)]
        job.wait_for("rank 1 step 5")
        os.kill(pids[1], signal.SIGSTOP)
        self.assertEqual(job.end(), 3, job.text())
        for rank in (0, 2):
            self.assertRegex(self.fails(job, rank), r"rank 1 is lost: no sign of life for .* at step \d+")
        self.none_left(pids, job)

    def test_a_rank_is_stopped_before_the_first_step(self):
        job = Job(1000, 2000)
        pids = [job.pid(rank) for rank in range(RANKS)]
        os.kill(pids[0], signal.SIGSTOP)
        self.assertEqual(job.end(), 3, job.text())
        for rank in (1, 2):
            self.assertIn("rank 0 is lost", self.fails(job, rank))
        self.none_left(pids, job)

    def test_a_rank_is_killed(self):
        """MPI ends the job: it tells the others to stop, and they say where they were."""
        job = Job(1000, 20)
        pids = [job.pid(rank) for rank in range(RANKS)]
        job.wait_for("rank 1 step 5")
        os.kill(pids[1], signal.SIGKILL)
        self.assertEqual(job.end(), 128 + signal.SIGKILL, job.text())
        self.assertRegex(job.text(), r"rank 1 with PID .* exited on signal 9")
        for rank in (0, 2):
            self.assertRegex(self.fails(job, rank), r"gave up at step \d+: it was told to stop")
        self.none_left(pids, job)

    def test_a_rank_is_told_to_stop(self):
        job = Job(1000, 20)
        pids = [job.pid(rank) for rank in range(RANKS)]
        job.wait_for("rank 2 step 3")
        os.kill(pids[2], signal.SIGTERM)
        self.assertEqual(job.end(), 3, job.text())
        for rank in range(RANKS):
            self.assertRegex(self.fails(job, rank), r"rank 2 gave up at step \d+: it was told to stop")
        self.none_left(pids, job)

    def test_the_job_is_told_to_stop(self):
        job = Job(1000, 20)
        pids = [job.pid(rank) for rank in range(RANKS)]
        job.wait_for("rank 2 step 3")
        job.process.terminate()
        self.assertNotEqual(job.end(), 0, job.text())
        self.none_left(pids, job)

    def test_a_rank_that_is_stopped_for_a_while_is_slow_not_lost(self):
        job = Job(30, 20, timeout_s=20)
        pid = job.pid(1)
        job.wait_for("rank 1 step 5")
        os.kill(pid, signal.SIGSTOP)
        time.sleep(6)  # more than a quarter of the timeout, and much less than all of it
        os.kill(pid, signal.SIGCONT)
        self.assertEqual(job.end(), 0, job.text())
        warnings = [line for line in job.err if "warns: " in line]
        self.assertEqual(len(warnings), 2, job.text())  # by both neighbours, once
        for warning in warnings:
            self.assertRegex(warning, r"rank [02] warns: rank 1 is slow")


if __name__ == "__main__":
    unittest.main()
