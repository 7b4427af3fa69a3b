"""Processes of the tool that no MPI brings together: each knows its rank by torchrun's variables, and they meet at a
place. Whoever is left when one dies speaks for itself, which under mpirun it could not."""

import os
import pathlib
import subprocess
import tempfile
import time

from tool import TOOL

HANG_S = 120  # far beyond any deadline: who takes longer hangs


class MetProcesses:
    """Ranks in the background, with what each says in a file of its own."""

    def __init__(self, test, ranks, *words, has_place=True, own_words=None, variables=None):
        """`own_words`: {rank: words} for some of them; `variables`: f(rank), set beside RANK and WORLD_SIZE, or unset
        where it is None."""
        self.test = test
        folder = tempfile.TemporaryDirectory()
        test.addCleanup(folder.cleanup)
        self.place = pathlib.Path(folder.name) / "meet"
        place = ["--rendezvous", f"file:{self.place}"] if has_place else []
        self.logs = [pathlib.Path(folder.name) / f"{rank}.log" for rank in range(ranks)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "SLURM_", "MASTER_"))}
            environment |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "test"}
            environment |= variables(rank) if variables else {}
            environment = {k: v for k, v in environment.items() if v is not None}
            command = [TOOL, *map(str, words), *(own_words or {}).get(rank, []), *place]
            with log.open("w") as out:
                process = subprocess.Popen(command, cwd=test.folder, env=environment, stdout=out, stderr=subprocess.STDOUT)
            self.processes.append(process)
            test.addCleanup(self.make_end, process)

    @staticmethod
    def make_end(process):
        if process.poll() is None:
            process.kill()
            process.wait()

    def text(self, rank=None):
        logs = self.logs if rank is None else [self.logs[rank]]
        return "\n".join(log.read_text() for log in logs)

    def wait_for(self, words, rank=0):
        """Progress comes from rank 0."""
        self.wait_until(lambda: words in self.text(rank), rank)

    def wait_for_place(self):
        """Until rank 0 waits for others to come."""
        self.wait_until(self.place.exists, 0)

    def wait_until(self, happened, rank):
        end = time.monotonic() + HANG_S
        while not happened():
            self.test.assertIsNone(self.processes[rank].poll(), self.text())
            self.test.assertLess(time.monotonic(), end, self.text())
            time.sleep(0.02)

    def hurt(self, rank, a_signal):
        self.since = time.monotonic()
        self.processes[rank].send_signal(a_signal)

    def end(self, but=()):
        """Exit codes of all, or of all but some."""
        deadline = time.monotonic() + HANG_S
        codes = []
        for rank, process in enumerate(self.processes):
            if rank in but:
                continue
            try:
                codes.append(process.wait(timeout=max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                self.test.fail(f"rank {rank} hangs:\n{self.text()}")
        return codes

    def last_words(self, rank):
        """The one line in which a rank says why it has ended."""
        lines = [line for line in self.text(rank).splitlines() if line.startswith(f"annulus: rank {rank}: ")]
        self.test.assertEqual(len(lines), 1, self.text())
        return lines[0]

    def check_that_others_name(self, lost, why, seconds):
        """Every other rank ends within so many seconds of the hurt with exit code 3, and names it."""
        self.test.assertEqual(set(self.end(but=(lost,))), {3}, self.text())
        self.test.assertLess(time.monotonic() - self.since, seconds, self.text())
        for rank in range(len(self.processes)):
            if rank != lost:
                self.test.assertRegex(self.last_words(rank), why)
                self.test.assertIn(f"the last events of rank {rank}:", self.text(rank))
