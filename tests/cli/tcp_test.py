#!/usr/bin/env python3
"""The tool on processes that meet without MPI, as torchrun starts them: the bits of one rank, files, and ranks that are
killed, stopped, told to stop, misled or never come. Signals go to our own processes only, all on loopback."""

import json
import signal
import socket
import time
import unittest

from met_processes import MetProcesses
from tool import SMALL, CliTest, problem_file, read_safetensors

# Long enough to be hit: rounds without end. (The first few are shown, which tells when they have begun.)
LONG = ["bench", "--tokens", "1k", "--heads", "4", "--segments", "1k", "--dilations", "1", "--strategy", "ring"]
LONG += ["--repeats", "9", "--warmup", "0", "--threads", "1"]
TIMEOUT_S = 3


def agent_with_a_free_port_behind():
    """As torchrun's: it listens itself, and the next port is for rank 0."""
    while True:
        agent, behind = socket.socket(), socket.socket()
        try:
            agent.bind(("127.0.0.1", 0))
            behind.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            behind.bind(("", agent.getsockname()[1] + 1))
            return agent
        except (OSError, OverflowError):
            agent.close()
        finally:
            behind.close()


class TcpTest(CliTest):
    def met_report(self, ranks, *words, **more):
        """The report of rank 0, which alone has one."""
        group = MetProcesses(self, ranks, *words, "--json", "-", "--quiet", **more)
        self.assertEqual(group.end(), [0] * ranks, group.text())
        for rank in range(1, ranks):
            self.assertEqual(group.text(rank), "")
        return json.loads(group.text(0))


class Results(TcpTest):
    def test_the_bits_of_one_rank(self):
        for words in ["--backward"], ["--dtype", "bf16", "--causal", "--backward"]:
            one = self.report("run", *SMALL, *words)
            for ranks in 2, 3:
                for layout in "contiguous", "striped":
                    many = self.met_report(ranks, "run", *SMALL, *words, "--reproducible", "--layout", layout)
                    self.assertEqual(many["checksum"], one["checksum"])
                    self.assertEqual(many["environment"]["launcher"], "torchrun")
                    self.assertEqual(many["environment"]["transport"], "tcp")
                    self.assertEqual(many["environment"]["ranks"], ranks)

    def test_threads_and_processes_agree(self):
        for strategy in "exchange", "ring", "gather", "reshard", "replicated":
            words = ["run", *SMALL, "--backward", "--strategy", strategy]
            threads = self.report(*words, "--ranks", "3")
            processes = self.met_report(3, *words)
            self.assertEqual(processes["checksum"], threads["checksum"])
            self.assertEqual(processes["traffic"], threads["traffic"])
            for rank in processes["memory"]["by_rank"]:
                self.assertEqual(rank["peak_bytes"], rank["plan_bytes"])

    def test_verify(self):
        group = MetProcesses(self, 3, "verify", *SMALL, "--layout", "zigzag", "--causal")
        self.assertEqual(group.end(), [0, 0, 0], group.text())
        self.assertEqual(group.text().count("passed: "), 1, "reports come from rank 0 alone")
        self.assertIn("3 ranks by TCP, launcher torchrun", group.text(0))

    def test_memory_is_what_the_plan_says(self):
        """By gather a rank sends its whole shard of keys, and packs little of it at a time."""
        self.need_no_sanitizer()
        words = ["--tokens", "128k", "--heads", "4", "--segments", "128k", "--dilations", "64", "--strategy", "gather"]
        words += ["--threads", "1"]
        memory = self.met_report(2, "run", *words)["memory"]
        planned = self.report("plan", *words, "--ranks", "2", "--transport", "tcp")["memory"]["plan_bytes"]
        self.assertEqual(memory["components"]["transport"], 2 << 16)
        for rank in memory["by_rank"]:
            self.assertEqual(rank["peak_bytes"], planned)
            self.assertLess(rank["process_peak_bytes"], planned + (32 << 20))  # of 128 MiB that are sent

    def test_files(self):
        problem_file(self.folder / "x.safetensors", kv_heads=1)
        words = ["--input", "x.safetensors", "--segments", "16,32", "--dilations", "1,2", "--backward", "--reproducible"]
        self.succeed("run", *words, "--output", "one.safetensors")
        group = MetProcesses(self, 3, "run", *words, "--output", "many.safetensors", "--layout", "zigzag")
        self.assertEqual(group.end(), [0, 0, 0], group.text())
        self.assertEqual(
            read_safetensors(self.folder / "many.safetensors"), read_safetensors(self.folder / "one.safetensors")
        )
        self.assertEqual(len(list(self.folder.iterdir())), 3, "a temporary file was left behind")

    def test_messages_longer_than_what_a_connection_holds(self):
        words = ["--tokens", "8k", "--heads", "4", "--segments", "8k", "--dilations", "64", "--phase", "every"]
        threads = self.report("run", *words, "--strategy", "gather", "--ranks", "2")
        self.assertGreaterEqual(threads["traffic"]["largest_rank"]["sent_bytes"], 8 << 20)
        self.assertEqual(self.met_report(2, "run", *words, "--strategy", "gather")["checksum"], threads["checksum"])

    def test_the_place_of_torchrun(self):
        agent = agent_with_a_free_port_behind()
        self.addCleanup(agent.close)
        variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(agent.getsockname()[1])}
        report = self.met_report(2, "run", *SMALL, has_place=False, variables=lambda rank: variables)
        self.assertEqual(report["environment"]["transport"], "tcp")

    def test_processes_that_were_started_by_hand(self):
        no_mark = {"TORCHELASTIC_RUN_ID": None}
        group = MetProcesses(self, 2, "verify", *SMALL, "--launcher", "torchrun", variables=lambda rank: no_mark)
        self.assertEqual(group.end(), [0, 0], group.text())
        self.assertIn("2 ranks by TCP", group.text(0))

    def test_plan_and_info_speak_once(self):
        for words in ["plan", *SMALL], ["info"]:
            group = MetProcesses(self, 2, *words, has_place=words[0] == "plan")
            self.assertEqual(group.end(), [0, 0], group.text())
            self.assertEqual(group.text().count("annulus 0"), 1, group.text())


    def test_info_names_a_transport_that_there_is(self):
        """Also under mpirun, where this build has no MPI."""
        mpirun = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "TORCHELASTIC_RUN_ID": None}
        group = MetProcesses(
            self, 1, "info", "--json", "-", "--quiet", has_place=False, variables=lambda rank: mpirun
        )
        self.assertEqual(group.end(), [0], group.text())
        report = json.loads(group.text())
        self.assertIn(report["environment"]["transport"], report["transports"])


class BadInput(TcpTest):
    def test_no_place(self):
        group = MetProcesses(self, 2, "run", *SMALL, has_place=False)
        self.assertEqual(group.end(), [2, 2], group.text())
        for part in "place where processes meet", "got none from torchrun", "--rendezvous tcp:HOST:PORT":
            self.assertIn(part, group.text(1))

    def test_a_place_that_is_none(self):
        for place in "node7", "tcp:node7", "tcp:node7:0", "file:", "":
            group = MetProcesses(self, 2, "run", *SMALL, "--rendezvous", place, has_place=False)
            self.assertEqual(group.end(), [2, 2], group.text())
            self.assertIn(f"got '{place}'", group.text(0))

    def test_wrong_options(self):
        here = ["--rendezvous", "file:meet"]
        self.refuse(2, ["--transport threads", "leave it out"], "run", *SMALL, *here, "--transport", "threads")
        self.refuse(2, ["RANK and WORLD_SIZE", "--launcher torchrun"], "run", *SMALL, *here)
        self.refuse(2, ["--transport tcp", "leave out"], "run", *SMALL, "--transport", "tcp", "--ranks", "3")
        group = MetProcesses(self, 1, "run", *SMALL, "--transport", "nccl")
        self.assertEqual(group.end(), [2], group.text())
        for part in "nccl", "GPUs", "--device cuda":
            self.assertIn(part, group.text())

    def test_a_rank_that_never_comes(self):
        variables = {"WORLD_SIZE": "3"}
        group = MetProcesses(self, 2, "run", *SMALL, "--timeout", "1", variables=lambda rank: variables)
        self.assertEqual(group.end(), [3, 3], group.text())
        self.assertIn("rank 2 did not come to the rendezvous within 1 s", group.text(0))

    def test_told_to_stop_before_all_have_come(self):
        group = MetProcesses(self, 1, "run", *SMALL, variables=lambda rank: {"WORLD_SIZE": "2"})
        group.wait_for_place()
        group.hurt(0, signal.SIGTERM)
        self.assertEqual(group.end(), [3], group.text())
        self.assertIn("told to stop while it waited for others to come", group.text())
        self.assertLess(time.monotonic() - group.since, 5)

    def test_ranks_that_disagree(self):
        """All ranks learn who differs, and in what."""
        group = MetProcesses(self, 2, "run", *SMALL, own_words={1: ["--causal"]})
        self.assertEqual(group.end(), [3, 3], group.text())
        for rank in 0, 1:
            self.assertIn("causal", group.last_words(rank))


class Faults(TcpTest):
    """A long job of three ranks, hurt from outside: in forward, and in backward."""

    def start(self, backward):
        words = [*LONG, "--timeout", str(TIMEOUT_S)]
        words += ["--backward", "--min-seconds", "2"] if backward else ["--min-seconds", "100000"]
        group = MetProcesses(self, 3, *words)
        group.wait_for("backward, round 3" if backward else "forward, round 3")
        return group

    def test_a_rank_is_killed(self):
        for backward in False, True:
            group = self.start(backward)
            group.hurt(1, signal.SIGKILL)
            group.check_that_others_name(1, r"rank 1 is lost: its connection to rank \d ended without a word", 2 * TIMEOUT_S)

    def test_a_rank_is_stopped(self):
        for backward in False, True:
            group = self.start(backward)
            group.hurt(1, signal.SIGSTOP)
            group.check_that_others_name(1, r"rank 1 is lost: no sign of life for", 4 * TIMEOUT_S)

    def test_a_rank_is_told_to_stop(self):
        group = self.start(backward=False)
        group.hurt(0, signal.SIGTERM)
        self.assertEqual(group.end(), [3, 3, 3], group.text())
        for rank in 0, 1, 2:
            self.assertRegex(group.last_words(rank), r"rank 0 gave up.*told to stop")


if __name__ == "__main__":
    unittest.main()
