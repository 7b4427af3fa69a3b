#!/usr/bin/env python3
"""The tool on several ranks, from outside: as threads of one process, and planned without running.

Needs nothing but Python's standard library. mpi_test.py has the same for processes.
"""

import json
import math
import os
import time
import unittest

from tool import MEMORY, SHARDING, SMALL, TRAFFIC, CliTest, problem_file, read_safetensors, run

LAYOUTS = ("contiguous", "zigzag", "striped")
STRATEGIES = ("exchange", "ring", "gather")
ALL_STRATEGIES = (*STRATEGIES, "reshard", "replicated")


class Run(CliTest):
    def test_keys_and_traffic(self):
        report = self.report("run", *SMALL, "--ranks", "3", "--backward")
        self.assertEqual(report["environment"]["ranks"], 3)
        self.assertEqual(report["environment"]["transport"], "threads")
        self.assertEqual(report["environment"]["launcher"], "none")
        self.assertEqual(set(report["sharding"]), SHARDING)
        self.assertEqual(report["sharding"]["boundaries"], [0, 14, 27, 40])
        self.assertEqual(set(report["memory"]), MEMORY)
        self.assertEqual(len(report["memory"]["by_rank"]), 3)
        for rank in report["memory"]["by_rank"]:
            self.assertEqual(rank["peak_bytes"], rank["plan_bytes"])
        traffic = report["traffic"]
        self.assertEqual(set(traffic["largest_rank"]), TRAFFIC)
        for numbers in traffic, traffic["largest_rank"]:
            self.assertGreater(numbers["sent_bytes"], 0)
            self.assertEqual(numbers["sent_bytes"], numbers["plan_bytes"])
            self.assertLessEqual(numbers["minimum_bytes"], numbers["ring_bytes"])

    def test_reproducible_bits_are_those_of_one_rank(self):
        for words in ["--backward"], ["--dtype", "bf16", "--causal", "--backward"], ["--batch", "2", "--kv-heads", "1"]:
            one = self.report("run", *SMALL, *words)["checksum"]
            for ranks in 2, 3, 8, 41:
                for layout in LAYOUTS:
                    many = ["--ranks", ranks, "--layout", layout, "--reproducible"]
                    self.assertEqual(self.report("run", *SMALL, *words, *many)["checksum"], one, many)

    def test_segments_that_nest_in_shards_send_nothing(self):
        report = self.report("run", *SMALL, "--ranks", "2", "--boundaries", "0,32,40", "--backward")
        self.assertEqual(report["traffic"]["sent_bytes"], 0)
        one = self.report("run", *SMALL, "--backward")
        self.assertEqual(report["checksum"], one["checksum"])

    def test_every_layout_and_strategy_sends_what_it_planned(self):
        for layout in LAYOUTS:
            for strategy in ALL_STRATEGIES:
                if (layout, strategy) == ("striped", "reshard"):
                    continue  # has no segments to deal out
                report = self.report("run", *SMALL, "--ranks", "3", "--layout", layout, "--strategy", strategy, "--backward")
                self.assertEqual(report["sharding"]["strategy"], strategy)
                self.assertEqual(report["traffic"]["sent_bytes"], report["traffic"]["plan_bytes"])

    def test_empty_shards(self):
        one = self.report("run", *SMALL, "--backward", "--reproducible")["checksum"]
        words = ["--ranks", "4", "--boundaries", "0,0,40,40,40", "--reproducible"]
        self.assertEqual(self.report("run", *SMALL, "--backward", *words)["checksum"], one)
        self.assertEqual(self.report("run", "--tokens", "0", *SMALL[2:], "--ranks", "3")["checksum"]["out"], "0" * 16)

    def test_replicated_queries(self):
        words = [*SMALL, "--backward", "--ranks", "3", "--strategy", "replicated"]
        drawn = self.report("run", *words, "--output", "y.safetensors")
        shapes = {name: shape for name, (_, shape, _) in read_safetensors(self.folder / "y.safetensors").items()}
        self.assertEqual(shapes["out"], [1, 40, 2, 8])
        self.assertEqual(shapes["dk"], [1, 40, 2, 8])
        self.assertEqual(self.report("run", *words)["checksum"], drawn["checksum"])

    def test_files_in_and_out_are_those_of_one_rank(self):
        problem_file(self.folder / "x.safetensors", shape=(2, 40, 2, 8), kv_heads=1)
        pattern = ["--segments", "16,32", "--dilations", "1,2", "--backward", "--reproducible"]
        one = self.report("run", "--input", "x.safetensors", *pattern, "--output", "one.safetensors")
        for layout in LAYOUTS:
            npy = [word for name in ("out", "lse", "dq", "dk", "dv") for word in (f"--{name}", f"{name}.npy")]
            many = self.report(
                "run", "--input", "x.safetensors", *pattern, "--output", "many.safetensors", *npy, "--ranks", "3",
                "--layout", layout,
            )  # fmt: skip
            self.assertEqual(many["checksum"], one["checksum"])
            tensors = read_safetensors(self.folder / "one.safetensors")
            self.assertEqual(read_safetensors(self.folder / "many.safetensors"), tensors)
            for name, (_, _, data) in tensors.items():
                self.assertTrue((self.folder / f"{name}.npy").read_bytes().endswith(data), name)
        self.assertFalse(list(self.folder.glob(".annulus*")), "a temporary file was left behind")

    def test_blocking_and_small_slots_change_nothing(self):
        words = ["--ranks", "3", "--strategy", "ring", "--backward"]
        plain = self.report("run", *SMALL, *words)
        self.assertEqual(self.report("run", *SMALL, *words, "--blocking")["checksum"], plain["checksum"])
        small = self.report("run", *SMALL, *words, "--slot-size", "512")
        self.assertEqual(small["traffic"]["sent_bytes"], plain["traffic"]["sent_bytes"])
        self.assertEqual(small["sharding"]["slot_bytes"], 512)

    def test_text(self):
        text = self.succeed("run", *SMALL, "--ranks", "3").stdout
        self.assertIn("3 ranks by threads, launcher none, layout contiguous", text)
        self.assertRegex(text, r"traffic .* sent \(plan .*, minimum .*, ring .*\)")


class BadInput(CliTest):
    """docs/semantics.md, section 9, for ranks: rule, value and remedy, exit code 2, no output touched."""

    def test_ranks(self):
        for text in "0", "-1", "three", "1B":
            self.refuse_run(["--ranks"], *SMALL, "--ranks", text)
        self.refuse_run(["--ranks must lie in [1, 4096]", "got 5000"], *SMALL, "--ranks", "5000")

    def test_shards_that_do_not_fit_the_layout(self):
        ranks = [*SMALL, "--ranks", "3"]
        self.refuse_run(["3 ranks are 4 numbers", "got 3", "leave them out"], *ranks, "--boundaries", "0,20,40")
        self.refuse_run(["tokens = 40", "0 to 39"], *ranks, "--boundaries", "0,10,20,39")
        self.refuse_run(["must not fall", "20 before 10"], *ranks, "--boundaries", "0,20,10,40")
        self.refuse_run(["contiguous", "striped"], *ranks, "--boundaries", "0,10,20,40", "--layout", "striped")
        self.refuse_run(["--boundaries", "x"], *ranks, "--boundaries", "0,x,20,40")

    def test_names(self):
        self.refuse_run(["contiguous, zigzag, striped", "'round'"], *SMALL, "--layout", "round")
        message = self.refuse(2, ["'magic'"], "plan", *SMALL, "--strategy", "magic")
        for strategy in "auto", *ALL_STRATEGIES:
            self.assertIn(strategy, message)
        self.refuse_run(["threads, mpi, tcp, nccl", "'pigeons'"], *SMALL, "--transport", "pigeons")
        self.refuse_run(["auto, none, mpirun, srun, torchrun", "'ssh'"], *SMALL, "--launcher", "ssh")
        self.refuse_run(["--launcher srun", "start the tool by srun"], *SMALL, "--launcher", "srun")

    def test_numbers(self):
        self.refuse_run(["--slot-size must be at least 1", "got 0"], *SMALL, "--slot-size", "0")
        self.refuse_run(["--memory-limit must be at least 1", "got 0"], *SMALL, "--memory-limit", "0")
        self.refuse_run(["--timeout must lie in", "got 0"], *SMALL, "--timeout", "0")
        self.refuse_run(["--timeout must be a finite number", "'soon'"], *SMALL, "--timeout", "soon")

    def test_options_that_do_not_belong_together(self):
        self.refuse(2, ["--trace", "runs nothing"], "plan", *SMALL, "--trace", "t.json")
        self.refuse(2, ["--grid", "--boundaries"], "verify", "--grid", "--boundaries", "0,1")
        self.refuse(2, ["different files", "t.json"], "run", *SMALL, "--trace", "t.json", "--json", "t.json")
        self.refuse(2, ["missing/t.json"], "run", *SMALL, "--trace", "missing/t.json")

    def test_processes_of_torchrun_are_on_their_own_if_told_so(self):
        for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "0"}.items():
            os.environ[name] = value
            self.addCleanup(os.environ.pop, name)
        self.refuse(2, ["torchrun started 2 processes", "leave --transport out"], "run", *SMALL, "--transport", "threads")
        self.succeed("run", *SMALL, "--launcher", "none", "--ranks", "2")


class MemoryLimit(CliTest):
    LONG = ["--tokens", "16k", "--heads", "4", "--segments", "16k", "--dilations", "1", "--ranks", "4", "--backward"]

    def test_slots_shrink(self):
        words = [*self.LONG, "--strategy", "exchange"]
        free = self.report("plan", *words)
        needed = free["memory"]["backward"]["bytes"]
        limit = needed * 9 // 10
        plan = self.report("plan", *words, "--memory-limit", limit)
        self.assertTrue(plan["fits"])
        self.assertLess(plan["sharding"]["slot_bytes"], free["sharding"]["slot_bytes"])
        self.assertLessEqual(plan["memory"]["backward"]["bytes"], limit)
        report = self.report("run", *words, "--memory-limit", limit)
        self.assertEqual(report["sharding"]["slot_bytes"], plan["sharding"]["slot_bytes"])
        self.assertLessEqual(report["memory"]["peak_bytes"], limit)

    def test_auto_exchanges_where_dealing_out_does_not_fit(self):
        free = self.report("plan", *self.LONG)
        self.assertEqual(free["sharding"]["strategy"], "reshard")
        limit = free["memory"]["backward"]["bytes"] * 9 // 10
        report = self.report("run", *self.LONG, "--memory-limit", limit)
        self.assertEqual(report["sharding"]["strategy"], "exchange")
        self.assertLessEqual(report["memory"]["peak_bytes"], limit)

    def test_what_cannot_fit_is_refused_with_the_number_that_would(self):
        result = run("run", *self.LONG, "--memory-limit", "1M", "--quiet")
        self.assertEqual(result.returncode, 3, result.stderr)
        self.assertIn("--memory-limit 1.0 MiB", result.stderr)
        number = result.stderr.split("give --memory-limit ")[1].split(",")[0]
        self.succeed("run", *self.LONG, "--memory-limit", number)
        result = run("run", *self.LONG, "--memory-limit", int(number) - 1, "--quiet")
        self.assertEqual(result.returncode, 3, result.stderr)

    def test_a_plan_that_does_not_fit_says_so(self):
        result = run("plan", *self.LONG, "--memory-limit", "1M", "--json", "-")
        self.assertEqual(result.returncode, 3)
        self.assertIs(json.loads(result.stdout)["fits"], False)
        self.assertIn("DOES NOT FIT", run("plan", *self.LONG, "--memory-limit", "1M").stdout)


class Plan(CliTest):
    def test_keys(self):
        report = self.report("plan", *SMALL, "--ranks", "3", "--backward")
        self.assertEqual(
            set(report),
            {
                "problem", "environment", "sharding", "fits", "ranks_planned", "rows", "memory", "traffic", "strategy",
                "why", "steps", "planning_ms",
            },  # fmt: skip
        )
        self.assertEqual(report["rows"], [14, 13, 13])
        self.assertEqual(report["ranks_planned"], [0, 1, 2])
        self.assertEqual([set(s) for s in report["strategy"]], [{"branch", "strategy", "why"}] * 2)
        self.assertEqual(set(report["steps"]), {"forward", "backward"})
        for name in "forward", "backward":
            memory = report["memory"][name]
            self.assertEqual(sum(memory["components"].values()), memory["bytes"])
        sent = sum(peer["bytes"] for peer in report["traffic"]["peers"])
        self.assertEqual(sent, report["traffic"]["plan_bytes"])

    def test_the_plan_is_what_a_run_does(self):
        for words in ["--strategy", "ring"], ["--layout", "zigzag"], ["--layout", "striped", "--strategy", "gather"], ["--strategy", "reshard"]:
            words = [*SMALL, "--ranks", "3", "--backward", *words]
            plan, done = self.report("plan", *words), self.report("run", *words)
            self.assertEqual(plan["traffic"]["plan_bytes"], done["traffic"]["sent_bytes"])
            self.assertEqual(plan["traffic"]["minimum_bytes"], done["traffic"]["minimum_bytes"])
            self.assertEqual(plan["traffic"]["ring_bytes"], done["traffic"]["ring_bytes"])
            passes = [plan["memory"][name]["bytes"] for name in ("forward", "backward")]
            self.assertEqual(max(passes), done["memory"]["plan_bytes"])

    def test_a_billion_tokens_on_a_thousand_ranks(self):
        start = time.monotonic()
        report = json.loads(
            run(
                "plan", "--tokens", "1B", "--ranks", "1024", "--segments", "2k,8k,32k,1M,1B", "--dilations", "1,2,4,8,16",
                "--transport", "threads", "--backward", "--json", "-",
            ).stdout  # fmt: skip
        )
        self.assertLess(time.monotonic() - start, 30)
        self.assertIs(report["fits"], False)
        self.assertLess(len(report["ranks_planned"]), 16)
        self.assertLess(report["traffic"]["plan_bytes"], 0.15 * report["traffic"]["ring_bytes"])

    def test_text(self):
        text = self.succeed("plan", *SMALL, "--ranks", "3", "--backward").stdout
        for word in "rows", "steps", "why", "branch 1 by", "minimum", "ring", "who sends to whom", "fits:", "slots":
            self.assertIn(word, text)


class Verify(CliTest):
    def test_what_is_checked(self):
        best = self.report("info")["instruction_sets"][0]
        report = self.report("verify", *SMALL, "--ranks", "3", "--threads", "2", "--instruction-set", best)
        self.assertIs(report["passed"], True)
        kinds = ("against fp64", "against one rank", "run again", "with 1 thread")
        self.assertEqual({c["what"] for c in report["checks"]}, {f"{best} on 3 ranks {kind}" for kind in kinds})

    def test_awkward_problems(self):
        best = self.report("info")["instruction_sets"][0]
        for words in (
            ["--layout", "zigzag", "--causal", "--ranks", "5", "--dtype", "bf16"],
            ["--layout", "striped", "--cu-seqlens", "0,1,1,18,40", "--ranks", "2"],
            ["--ranks", "41", "--strategy", "ring"],
            ["--preset", "torchscale", "--kv-heads", "1", "--ranks", "3"],
            ["--ranks", "3", "--reproducible"],
            ["--ranks", "3", "--strategy", "reshard", "--causal"],
            ["--ranks", "3", "--strategy", "replicated", "--dtype", "bf16", "--batch", "2"],
            ["--batch", "0", "--ranks", "2"],
        ):
            self.assertIs(self.report("verify", *SMALL, *words, "--instruction-set", best)["passed"], True, words)

    def test_grid(self):
        best = self.report("info")["instruction_sets"][0]
        words = ["--grid", "--grid-samples", "8", "--ranks", "3", "--layout", "zigzag", "--instruction-set", best]
        self.assertEqual(self.report("verify", *words)["failed"], [])


class Bench(CliTest):
    def test_keys(self):
        words = [*SMALL, "--ranks", "3", "--backward", "--repeats", "3", "--warmup", "1", "--min-seconds", "0"]
        report = self.report("bench", *words)
        self.assertEqual(report["traffic"]["sent_bytes"], report["traffic"]["plan_bytes"])
        self.assertGreater(report["traffic"]["sent_bytes"], 0)
        communication = report["communication"]
        self.assertEqual(set(communication), {"exposed_fraction", "worst_exposed_fraction"})
        self.assertTrue(0 < communication["exposed_fraction"] <= communication["worst_exposed_fraction"] <= 1)
        self.assertEqual(len(report["memory"]["by_rank"]), 3)
        self.assertEqual(report["forward"]["rounds"], 3)

    def test_text(self):
        text = self.succeed("bench", *SMALL, "--ranks", "2", "--repeats", "1", "--min-seconds", "0").stdout
        for word in "exposed", "traffic", "2 ranks by threads":
            self.assertIn(word, text)


class Trace(CliTest):
    def events(self, *words):
        self.succeed(*words, "--trace", "t.json")
        trace = json.loads((self.folder / "t.json").read_text())
        self.assertEqual(set(trace), {"displayTimeUnit", "traceEvents"})
        return trace["traceEvents"]

    def check(self, events, ranks, passes):
        named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        self.assertEqual(named, {rank: f"rank {rank}" for rank in range(ranks)})
        tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        for rank in range(ranks):
            names = {name for (pid, _), name in tracks.items() if pid == rank}
            self.assertEqual(names, {"passes", "compute", "send and receive", "wait"})
        slices = [e for e in events if e["ph"] == "X"]
        for event in slices:
            self.assertGreaterEqual(event["dur"], 0)
            self.assertTrue(math.isfinite(event["ts"]))
            self.assertIn((event["pid"], event["tid"]), tracks)
        on = {name: [e for e in slices if tracks[e["pid"], e["tid"]] == name] for name in set(tracks.values())}
        self.assertEqual([e["name"] for e in on["passes"] if e["pid"] == 0], passes)
        for name in "compute", "send and receive", "wait":
            self.assertEqual({e["pid"] for e in on[name]}, set(range(ranks)), name)
        # One exchange at a time, and everything inside its pass.
        for rank in range(ranks):
            mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in on["send and receive"] if e["pid"] == rank)
            for (_, end), (begin, _) in zip(mine, mine[1:]):
                self.assertLessEqual(end, begin)
        self.check_arrows(events, on)
        counters = [e for e in events if e["ph"] == "C"]
        self.assertEqual({e["name"] for e in counters}, {"bytes in slots"})
        self.assertGreater(max(e["args"]["bytes"] for e in counters), 0)
        self.assertEqual(counters[-1]["args"]["bytes"], 0)

    def check_arrows(self, events, on):
        """Every arrow has one begin, inside a transfer of the sender, and one end, inside a wait of the receiver."""
        begins = {e["id"]: e for e in events if e["ph"] == "s"}
        ends = {e["id"]: e for e in events if e["ph"] == "f"}
        self.assertGreater(len(begins), 0)
        self.assertEqual(set(begins), set(ends))
        self.assertEqual(len([e for e in events if e["ph"] in "sf"]), 2 * len(begins))

        def inside(event, slices):
            return any(
                s["pid"] == event["pid"] and s["ts"] - 1e-3 <= event["ts"] <= s["ts"] + s["dur"] + 1e-3 for s in slices
            )

        for id_, begin in begins.items():
            self.assertNotEqual(begin["pid"], ends[id_]["pid"])
            self.assertTrue(inside(begin, on["send and receive"]), begin)
            self.assertTrue(inside(ends[id_], on["wait"]), ends[id_])
            self.assertLessEqual(begin["ts"], ends[id_]["ts"])

    def test_run(self):
        for strategy in *STRATEGIES, "reshard":
            words = [*SMALL, "--ranks", "3", "--backward", "--strategy", strategy]
            self.check(self.events("run", *words), 3, ["forward", "backward"])

    def test_bench(self):
        words = ["--ranks", "2", "--repeats", "2", "--warmup", "1", "--min-seconds", "0"]
        self.check(self.events("bench", *SMALL, *words), 2, ["forward"] * 2)

    def test_one_rank_and_reproducible(self):
        events = self.events("run", *SMALL, "--backward")
        self.assertEqual({e["pid"] for e in events}, {0})
        self.assertIn("attend 0", {e["name"] for e in events})
        self.events("run", *SMALL, "--backward", "--ranks", "3", "--reproducible")
        self.events("run", *SMALL, "--backward", "--ranks", "3", "--gradient", "detached")
        self.events("run", *SMALL, "--backward", "--ranks", "3", "--strategy", "replicated")
        names = {e["name"] for e in self.events("run", *SMALL, "--backward", "--ranks", "3", "--strategy", "reshard")}
        self.assertLessEqual({"go out", "come home"}, names)


if __name__ == "__main__":
    unittest.main()
