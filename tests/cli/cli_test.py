#!/usr/bin/env python3
"""The tool from outside: exit codes, messages, JSON keys, files."""

import json
import os
import pathlib
import re
import struct
import subprocess
import unittest

from tool import (
    ENVIRONMENT, MEMORY, PROBLEM, SENTINEL, SHARDING, SMALL, TOOL, TRAFFIC, CliTest,
    problem_file, read_safetensors, write_npy, write_safetensors,
)  # fmt: skip


class Usage(CliTest):
    def test_help_and_version_succeed(self):
        for command in [], ["info"], ["plan"], ["run"], ["verify"], ["bench"]:
            arguments = [*command, "--help"]
            self.assertIn("--", self.succeed(*arguments).stdout)
        self.assertRegex(self.succeed("--version").stdout, r"^annulus \d+\.\d+\.\d+\n$")

    def test_wrong_words_are_usage_errors(self):
        self.refuse(2, ["info, plan, run, verify, bench, report", "none", "--help"])
        self.refuse(2, ["info, plan, run, verify, bench, report", "'sing'", "--help"], "sing")
        self.refuse(2, ["--tokens", "not expected"], "--tokens", "5", "run")
        self.refuse(2, ["--loud"], "run", "--loud")
        self.refuse(2, ["--tokens"], "run", "--tokens")
        self.refuse(2, ["5"], "run", "5")
        self.refuse(2, ["--tokens", "received 2"], "run", "--tokens", "1", "--tokens", "2")

    def test_devices_that_are_not_there(self):
        self.refuse(2, ["--device", "tpu", "CPU"], "run", *SMALL, "--device", "tpu")
        self.succeed("run", *SMALL, "--device", "cpu")
        if "cuda" not in self.report("info")["devices"]:
            for command in "run", "verify", "bench":
                self.refuse(3, ["cuda", "device cpu"], command, *SMALL, "--device", "cuda")

    def test_unknown_instruction_set_names_those_there_are(self):
        sets = self.report("info")["instruction_sets"]
        self.refuse(2, ["mmx", *sets], "run", *SMALL, "--instruction-set", "mmx")

    def test_quiet_and_json_on_stdout(self):
        self.assertEqual(self.succeed("run", *SMALL, "--quiet").stdout, "")
        result = self.succeed("run", *SMALL, "--json", "-")
        json.loads(result.stdout)
        self.assertIn("forward", result.stderr)  # progress, as plain lines

    def test_json_file(self):
        self.succeed("run", *SMALL, "--json", "r.json")
        self.assertIn("checksum", json.loads((self.folder / "r.json").read_text()))
        self.refuse(2, ["missing/r.json"], "run", *SMALL, "--json", "missing/r.json")

    def test_a_full_device_behind_stdout(self):
        for words in [], ["--json", "-"]:
            with open("/dev/full", "w", encoding="utf-8") as full:
                result = subprocess.run(
                    [TOOL, "run", *SMALL, *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
                )
            self.assertEqual(result.returncode, 3, result.stderr)
            self.assertIn("stdout", result.stderr)


class Info(CliTest):
    def test_keys(self):
        info = self.report("info")
        self.assertEqual(
            set(info),
            {
                "environment",
                "cores",
                "instruction_sets",
                "dtypes",
                "head_dim",
                "devices",
                "transports",
                "gpu",
                "caches",
                "available_memory_bytes",
            },
        )
        self.assertEqual(set(info["environment"]), ENVIRONMENT)
        self.assertEqual(info["environment"]["instruction_set"], info["instruction_sets"][0])
        self.assertEqual(info["instruction_sets"][-1], "portable")
        self.assertEqual(info["dtypes"], ["fp32", "bf16", "fp16"])
        self.assertEqual(info["cores"], len(os.sched_getaffinity(0)))

    def test_text(self):
        text = self.succeed("info").stdout
        for word in "annulus", "cpu", "cores", "portable", "bf16", "head sizes":
            self.assertIn(word, text)


class Run(CliTest):
    def check_shared_keys(self, report):
        self.assertEqual(set(report["problem"]), PROBLEM)
        self.assertEqual(set(report["environment"]), ENVIRONMENT)
        self.assertEqual(set(report["sharding"]), SHARDING)

    def test_keys(self):
        report = self.report("run", *SMALL, "--backward")
        self.check_shared_keys(report)
        self.assertEqual(
            set(report),
            {
                "problem",
                "environment",
                "sharding",
                "seconds",
                "forward_seconds",
                "backward_seconds",
                "memory",
                "traffic",
                "checksum",
            },
        )
        self.assertEqual(set(report["checksum"]), {"out", "lse", "dq", "dk", "dv"})
        self.assertEqual(set(report["memory"]), MEMORY)
        self.assertEqual(report["memory"]["peak_bytes"], report["memory"]["plan_bytes"])
        self.assertEqual(set(report["traffic"]), TRAFFIC | {"largest_rank"})
        self.assertEqual(set(report["traffic"]["largest_rank"]), TRAFFIC)
        self.assertTrue(all(report["traffic"][key] == 0 for key in TRAFFIC))
        self.assertTrue(all(re.fullmatch("[0-9a-f]{16}", c) for c in report["checksum"].values()))
        forward = self.report("run", *SMALL)
        self.assertEqual(set(forward["checksum"]), {"out", "lse"})
        self.assertNotIn("backward_seconds", forward)

    def test_the_problem_is_reported_as_resolved(self):
        problem = self.report(
            "run",
            "--tokens",
            "1k",
            "--heads",
            "4",
            "--head-dim",
            "16",
            "--preset",
            "torchscale",
            "--causal",
            "--seed",
            "9",
        )["problem"]
        self.assertEqual(problem["tokens"], 1024)
        self.assertEqual(problem["kv_heads"], 4)
        self.assertEqual(problem["segments"], [2048, 4096])
        self.assertEqual(problem["phase"], "by_head_block")
        self.assertEqual(problem["gradient"], "detached")
        self.assertEqual(problem["scale"], 0.25)
        self.assertEqual(problem["cu_seqlens"], [0, 1024])
        self.assertEqual(problem["branches"][1], {"segment": 4096, "dilation": 2, "first_head": 0, "head_count": 4})
        self.assertEqual(problem["seed"], 9)
        self.assertTrue(problem["causal"])

    def test_threads_do_not_change_a_bit_and_seeds_do(self):
        one = self.report("run", *SMALL, "--backward", "--threads", "1")["checksum"]
        for threads in 2, 3, 7:
            self.assertEqual(self.report("run", *SMALL, "--backward", "--threads", threads)["checksum"], one)
        self.assertNotEqual(self.report("run", *SMALL, "--backward", "--seed", "1")["checksum"], one)
        self.assertEqual(self.report("run", *SMALL, "--backward", "--deterministic", "--reproducible")["checksum"], one)

    def test_the_same_inputs_from_either_kind_of_file(self):
        """The out of one run as q, k and v of the next, once from each kind of file."""
        self.succeed("run", *SMALL, "--output", "a.safetensors", "--out", "a.npy")
        dtype, shape, data = read_safetensors(self.folder / "a.safetensors")["out"]
        self.assertEqual((dtype, shape), ("F32", [1, 40, 2, 8]))
        self.assertTrue((self.folder / "a.npy").read_bytes().endswith(data))
        write_safetensors(self.folder / "b.safetensors", {n: (dtype, shape, data) for n in ("q", "k", "v", "dout")})
        pattern = ["--segments", "16,32", "--dilations", "1,2", "--backward"]
        from_safetensors = self.report("run", "--input", "b.safetensors", *pattern)
        npy = [word for name in ("q", "k", "v", "dout") for word in (f"--{name}", "a.npy")]
        from_npy = self.report("run", *npy, *pattern)
        self.assertEqual(from_npy["checksum"], from_safetensors["checksum"])
        self.assertEqual(from_npy["problem"], from_safetensors["problem"])
        self.assertEqual(from_npy["memory"]["peak_bytes"], from_npy["memory"]["plan_bytes"])

    def test_outputs_of_every_kind(self):
        problem_file(self.folder / "x.safetensors", kv_heads=1)
        (self.folder / "y.safetensors").write_bytes(SENTINEL)
        npy = [word for name in ("out", "lse", "dq", "dk", "dv") for word in (f"--{name}", f"{name}.npy")]
        self.succeed("run", "--input", "x.safetensors", "--backward", "--output", "y.safetensors", *npy)
        tensors = read_safetensors(self.folder / "y.safetensors")
        shapes = {name: shape for name, (_, shape, _) in tensors.items()}
        query, key = [1, 40, 2, 8], [1, 40, 1, 8]
        self.assertEqual(shapes, {"out": query, "lse": [1, 2, 40], "dq": query, "dk": key, "dv": key})
        for name, (dtype, _, data) in tensors.items():
            self.assertEqual(dtype, "F32")
            self.assertTrue((self.folder / f"{name}.npy").read_bytes().endswith(data), name)
        self.assertEqual(len(list(self.folder.iterdir())), 7, "a temporary file was left behind")

    def test_without_a_batch(self):
        problem_file(self.folder / "x.safetensors", shape=(40, 2, 8))
        problem_file(self.folder / "batch.safetensors", shape=(1, 40, 2, 8))
        three = self.report("run", "--input", "x.safetensors", "--backward", "--output", "y.safetensors")
        four = self.report("run", "--input", "batch.safetensors", "--backward")
        self.assertEqual(three["checksum"], four["checksum"])
        shapes = {name: shape for name, (_, shape, _) in read_safetensors(self.folder / "y.safetensors").items()}
        self.assertEqual(
            shapes, {"out": [40, 2, 8], "lse": [2, 40], "dq": [40, 2, 8], "dk": [40, 2, 8], "dv": [40, 2, 8]}
        )

    def test_data_at_odd_addresses(self):
        """A header of odd length, as other writers may leave it."""
        problem_file(self.folder / "x.safetensors")
        tensors = read_safetensors(self.folder / "x.safetensors")
        expected = self.report("run", "--input", "x.safetensors", "--backward")["checksum"]
        for padding in 1, 2, 3:
            write_safetensors(self.folder / "odd.safetensors", tensors)
            raw = (self.folder / "odd.safetensors").read_bytes()
            (length,) = struct.unpack_from("<Q", raw)
            padded = struct.pack("<Q", length + padding) + raw[8 : 8 + length] + b" " * padding + raw[8 + length :]
            (self.folder / "odd.safetensors").write_bytes(padded)
            self.assertEqual(self.report("run", "--input", "odd.safetensors", "--backward")["checksum"], expected)

    def test_bf16_bits_as_integers(self):
        data = struct.pack("<640H", *(0x3F80 | (i % 128) for i in range(640)))
        for name in "q", "k", "v":
            write_npy(self.folder / f"{name}.npy", [1, 40, 2, 8], data, "<u2")
        npy = ["--q", "q.npy", "--k", "k.npy", "--v", "v.npy"]
        self.refuse(2, ["U16", "bf16"], "run", *npy)
        self.assertEqual(self.report("run", *npy, "--dtype", "bf16")["problem"]["dtype"], "bf16")

    def test_no_tokens_and_no_batch(self):
        for sizes in ["--tokens", "0"], ["--tokens", "40", "--batch", "0"]:
            report = self.report("run", *sizes, *SMALL[2:], "--backward", "--output", "y.safetensors")
            self.assertEqual(set(report["checksum"].values()), {"0" * 16})
        self.assertEqual(read_safetensors(self.folder / "y.safetensors")["out"], ("F32", [0, 40, 2, 8], b""))

    def test_picture(self):
        text = self.succeed(
            "run", "--tokens", "8", "--heads", "2", "--segments", "4,8", "--dilations", "1,2", "--causal", "--picture"
        ).stdout
        rows = [line.strip() for line in text.splitlines() if re.match(r"  [█▓·]", line) and "branch" not in line]
        self.assertEqual(rows[0], "██· · · · · · ·")
        self.assertEqual(rows[6], "▓▓· ▓▓· ██████·")
        self.assertEqual(rows[7], "· · · · ████████")
        head_1 = self.succeed(
            "run",
            "--tokens",
            "8",
            "--heads",
            "2",
            "--segments",
            "4,8",
            "--dilations",
            "1,2",
            "--causal",
            "--picture",
            "1",
        ).stdout
        self.assertIn("· ▓▓· ▓▓████████", head_1)
        self.assertNotIn("picture", self.succeed("run", *SMALL).stdout)


class Verify(CliTest):
    def check_checks(self, checks):
        self.assertGreater(len(checks), 0)
        for check in checks:
            self.assertEqual(set(check), {"what", "tensor", "max_error", "bound", "passed"})
            self.assertEqual(check["passed"], check["max_error"] <= check["bound"])

    def test_keys_and_what_is_checked(self):
        sets = self.report("info")["instruction_sets"]
        report = self.report("verify", *SMALL, "--threads", "2")
        self.assertEqual(set(report), {"problem", "environment", "sharding", "passed", "checks"})
        self.assertEqual(set(report["problem"]), PROBLEM)
        self.assertIs(report["passed"], True)
        self.check_checks(report["checks"])
        tensors = ("out", "lse", "dq", "dk", "dv")
        kinds = ("against fp64", "run again", "with 1 thread")
        wanted = {(f"{s} {kind}", tensor) for s in sets for kind in kinds for tensor in tensors}
        self.assertEqual({(c["what"], c["tensor"]) for c in report["checks"]}, wanted)

    def test_one_instruction_set(self):
        report = self.report("verify", *SMALL, "--instruction-set", "portable", "--threads", "1")
        self.assertEqual(
            {c["what"] for c in report["checks"]},
            {"portable against fp64", "portable run again", "portable with 2 threads"},
        )

    def test_text(self):
        text = self.succeed("verify", *SMALL).stdout
        self.assertIn("against fp64", text)
        self.assertRegex(text, r"passed: \d+ checks\n$")

    def test_awkward_problems(self):
        for words in (
            ["--preset", "torchscale", "--pad-like-torchscale", "--dtype", "bf16"],
            ["--preset", "head_groups", "--causal"],
            ["--preset", "residue", "--dtype", "fp16", "--batch", "2"],
            ["--phase", "table", "--classes", "0,0;1,0", "--cu-seqlens", "0,1,1,18,40"],
            ["--head-ranges", "0:1;1:2", "--kv-heads", "1", "--scale", "0.5"],
            ["--batch", "0"],
        ):
            self.assertIs(self.report("verify", *SMALL, *words)["passed"], True, words)

    def test_grid(self):
        report = self.report("verify", "--grid", "--grid-samples", "5", "--seed", "7")
        self.assertEqual(set(report), {"problem", "environment", "passed", "checks", "failed"})
        self.assertEqual(report["problem"], {"grid": True, "cases": 5, "seed": 7})
        self.assertEqual(report["failed"], [])
        self.check_checks(report["checks"])

    def test_part_of_the_grid(self):
        part = ["--tokens", "2", "--segments", "10", "--heads", "1", "--head-dim", "8", "--dtype", "fp32", "--causal"]
        self.assertEqual(self.report("verify", "--grid", *part)["problem"]["cases"], 4 * 2)  # phases, gradients


class Report(CliTest):
    def test_a_page_of_everything(self):
        commands = {
            "info": [],
            "plan": [*SMALL, "--ranks", "3"],
            "run": SMALL,
            "verify": SMALL,
            "bench": [*SMALL, "--ranks", "2", "--repeats", "1", "--min-seconds", "0", "--backward"],
        }
        for command, options in commands.items():
            self.succeed(command, *options, "--json", f"{command}.json", "--quiet")
        files = [f"{command}.json" for command in commands]
        printed = self.succeed("report", *files, "--output", "page.html", "--title", "Of <all>").stdout
        self.assertIn("drawn in page.html", printed)
        page = (self.folder / "page.html").read_text()
        self.assertTrue(page.startswith("<!doctype html>") and page.endswith("</html>\n"))
        self.assertIn("Of &lt;all&gt;", page)
        self.assertNotIn("http-equiv", page)
        self.assertNotIn("src=", page)  # nothing to load
        for command in commands:
            self.assertIn(f"<h2>{command} ", page)
            self.assertIn(f"annulus {command} ", page)  # what was typed
        for part in "passed</b>", "fits</b>", "<svg", "Traffic of all ranks", "Checksums", "Memory of the largest rank":
            self.assertIn(part, page)

    def test_what_it_refuses(self):
        (self.folder / "other.json").write_text('{"answer": 42}')
        (self.folder / "half.json").write_text('{"environment": {')
        for file in "other.json", "half.json":
            self.refuse(2, [file, "--json"], "report", file, "--output", "y.safetensors")
        self.refuse(2, ["missing.json"], "report", "missing.json", "--output", "y.safetensors")
        self.refuse(2, ["FILES"], "report")


class Bench(CliTest):
    def test_keys(self):
        report = self.report("bench", *SMALL, "--backward", "--repeats", "3", "--warmup", "0", "--min-seconds", "0")
        self.assertEqual(
            set(report),
            {
                "problem", "environment", "sharding", "forward", "backward", "peak_instruction", "traffic", "memory",
                "communication",
            },  # fmt: skip
        )
        for name in "forward", "backward":
            timing = report[name]
            self.assertEqual(set(timing), {"ms", "rounds", "flop", "flop_per_s", "peak_flop_per_s", "peak_fraction"})
            self.assertEqual(set(timing["ms"]), {"median", "best", "worst"})
            self.assertEqual(timing["rounds"], 3)
            self.assertLessEqual(timing["ms"]["best"], timing["ms"]["median"])
            self.assertLessEqual(timing["ms"]["median"], timing["ms"]["worst"])
            self.assertAlmostEqual(timing["flop"] / timing["ms"]["median"] * 1e3 / timing["flop_per_s"], 1)
            self.assertAlmostEqual(timing["flop_per_s"] / timing["peak_flop_per_s"], timing["peak_fraction"])
        # Head 0: segments of 16, 16, 8 and every other position of 32 and 8; head 1 the same.
        pairs = 2 * (16 * 16 + 16 * 16 + 8 * 8 + 16 * 16 + 4 * 4)
        self.assertEqual(report["forward"]["flop"], 4 * 8 * pairs)
        self.assertEqual(report["backward"]["flop"], 10 * 8 * pairs)
        self.assertEqual(report["memory"]["peak_bytes"], report["memory"]["plan_bytes"])
        self.assertEqual(set(report["memory"]), MEMORY)
        self.assertEqual(set(report["traffic"]), TRAFFIC | {"largest_rank"})
        self.assertEqual(report["communication"], {"exposed_fraction": 0, "worst_exposed_fraction": 0})
        self.assertEqual(set(report["problem"]), PROBLEM)

    def test_forward_alone(self):
        report = self.report("bench", *SMALL, "--repeats", "1", "--min-seconds", "0")
        self.assertNotIn("backward", report)
        self.assertIs(report["problem"]["backward"], False)

    def test_min_seconds_goes_on(self):
        report = self.report("bench", *SMALL, "--repeats", "1", "--min-seconds", "0.02")
        self.assertGreaterEqual(report["forward"]["rounds"] * report["forward"]["ms"]["worst"], 20)

    def test_text(self):
        text = self.succeed("bench", *SMALL, "--repeats", "1", "--min-seconds", "0").stdout
        for word in "median", "GFLOP/s", "of peak", "memory":
            self.assertIn(word, text)


class Documentation(CliTest):
    """docs/command-line.md has every option and every key, and no option that does not exist."""

    PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "command-line.md"
    COMMANDS = ("info", "plan", "run", "verify", "bench", "report")

    def test_options(self):
        option = re.compile(r"--[a-z][a-z-]*")
        existing = {
            word for command in self.COMMANDS for word in option.findall(self.succeed(command, "--help").stdout)
        }
        documented = set(option.findall(self.PAGE.read_text(encoding="utf-8")))
        self.assertEqual(existing - documented, set())
        self.assertEqual(documented - existing, {"--help"} - existing)

    def test_keys(self):
        page = self.PAGE.read_text(encoding="utf-8")

        def check(value):
            if isinstance(value, list):
                value = value[0] if value else {}
            if not isinstance(value, dict):
                return
            for key, inner in value.items():
                self.assertRegex(page, rf'[`."]{re.escape(key)}[`"]', f"{key} is not documented")
                if key not in ("components", "checksum"):  # keyed by tensors
                    check(inner)

        grid = ["--grid", "--grid-samples", "1"]
        bench = ["--backward", "--repeats", "1", "--min-seconds", "0"]
        for words in (
            ["info"],
            ["run", *SMALL, "--backward"],
            ["run", *SMALL, "--ranks", "3", "--backward"],
            ["plan", *SMALL, "--ranks", "3", "--backward"],
            ["verify", *SMALL],
            ["verify", *grid],
            ["bench", *SMALL, *bench],
        ):
            check(self.report(*words))


if __name__ == "__main__":
    unittest.main()
