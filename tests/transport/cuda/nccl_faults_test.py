#!/usr/bin/env python3
"""Processes that exchange GPU memory over NCCL, seen from outside: sound jobs get the right bytes; ranks that are
killed, stopped or throw are named by the others, which end in time with exit code 3.

NCCL_RING names the program (nccl_ring.cc). The processes meet in a file. Each has an NCCL_HOSTID of its own, so they
may share one GPU. Signals go to processes of our own only.
"""

import os
import re
import signal
import subprocess
import tempfile
import threading
import time
import unittest

RING = os.environ["NCCL_RING"]
TIMEOUT_S = 4
HANG_S = 60  # far beyond any deadline: who takes longer hangs


class Job:
    def __init__(self, ranks, steps, step_ms, *more, host_ids=True, timeout_s=TIMEOUT_S):
        self.folder = tempfile.TemporaryDirectory()
        place = f"file:{self.folder.name}/meet"
        self.lines, self.news = [], threading.Condition()
        self.processes, self.readers = [], []
        for rank in range(ranks):
            environment = dict(os.environ, NCCL_SOCKET_IFNAME="lo")
            environment.pop("NCCL_HOSTID", None)
            if host_ids:
                environment["NCCL_HOSTID"] = f"annulus-{rank}"
            command = [RING, rank, ranks, place, steps, step_ms, timeout_s * 1000, *more]
            process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
            reader = threading.Thread(target=self.read, args=(process.stdout,), daemon=True)
            reader.start()
            self.processes.append(process)
            self.readers.append(reader)

    def read(self, stream):
        for line in stream:
            with self.news:
                self.lines.append(line.rstrip("\n"))
                self.news.notify_all()

    def wait_for(self, pattern):
        end = time.monotonic() + HANG_S
        with self.news:
            while not any(re.search(pattern, line) for line in self.lines):
                if not self.news.wait(timeout=end - time.monotonic()) or time.monotonic() > end:
                    raise AssertionError(f"never saw '{pattern}' in\n{self.text()}")

    def end(self):
        """Exit codes, rank by rank."""
        end = time.monotonic() + HANG_S
        hangs = False
        for process in self.processes:
            try:
                process.wait(timeout=max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                hangs = True
                process.kill()
                process.wait()
        for process, reader in zip(self.processes, self.readers):
            reader.join()
            process.stdout.close()
        self.folder.cleanup()
        if hangs:
            raise AssertionError(f"hangs:\n{self.text()}")
        return [process.returncode for process in self.processes]

    def text(self):
        return "\n".join(self.lines)


@unittest.skipIf(subprocess.call([RING, "gpu"]) != 0, "Skipped: no CUDA device")
class Nccl(unittest.TestCase):
    def fails(self, job, rank):
        lines = [line for line in job.lines if f"rank {rank} fails: " in line]
        self.assertEqual(len(lines), 1, f"rank {rank} in\n{job.text()}")
        return lines[0]

    def test_sound_jobs(self):
        for ranks in (2, 4):
            start = time.monotonic()
            job = Job(ranks, 100, 0, timeout_s=20)
            self.assertEqual(job.end(), [0] * ranks, job.text())
            print(f"{ranks} ranks: 100 steps of 3 MB in {time.monotonic() - start:.1f} s, start included")

    def test_a_rank_is_killed(self):
        for ranks in (2, 4):
            job = Job(ranks, 100000, 1)
            job.wait_for("rank 1 step 20$")
            start = time.monotonic()
            self.processes_kill(job, 1, signal.SIGKILL)
            codes = job.end()
            self.assertLess(time.monotonic() - start, 2 * TIMEOUT_S, job.text()[-2000:])
            self.assertEqual(codes, [3, -signal.SIGKILL, *[3] * (ranks - 2)], job.text()[-2000:])
            for rank in set(range(ranks)) - {1}:
                self.assertRegex(self.fails(job, rank), r"rank 1 is lost: .* at step \d+")

    def test_a_rank_is_stopped(self):
        job = Job(3, 100000, 1)
        job.wait_for("rank 1 step 20$")
        self.processes_kill(job, 1, signal.SIGSTOP)
        for rank in (0, 2):
            job.wait_for(f"rank {rank} fails: ")
        self.processes_kill(job, 1, signal.SIGKILL)
        job.end()
        for rank in (0, 2):
            self.assertRegex(self.fails(job, rank), r"rank 1 is lost: no sign of life for .* at step \d+")

    def test_a_rank_throws(self):
        job = Job(3, 100, 5, "throw", 2, 7)
        self.assertEqual(job.end(), [3, 3, 3], job.text()[-2000:])
        for rank in (0, 1):
            self.assertIn("rank 2 gave up at step 7: no memory for the tiles of step 7", self.fails(job, rank))

    def test_ranks_that_share_a_gpu(self):
        if "1" != subprocess.run("nvidia-smi -L | wc -l", shell=True, capture_output=True, text=True).stdout.strip():
            self.skipTest("more than one GPU here, or no nvidia-smi")
        job = Job(2, 5, 0, host_ids=False)
        self.assertEqual(job.end(), [3, 3], job.text())
        for rank in (0, 1):
            self.assertRegex(self.fails(job, rank), r"one rank a GPU; got rank 0 and rank 1 on GPU .*NCCL_HOSTID")

    def processes_kill(self, job, rank, number):
        os.kill(job.processes[rank].pid, number)


if __name__ == "__main__":
    unittest.main()
