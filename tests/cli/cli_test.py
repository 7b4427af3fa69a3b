#!/usr/bin/env python3
"""The tool from outside: exit codes, messages, JSON keys, files. Needs nothing but Python's standard library.

ANNULUS_TOOL names the executable. Every run gets a folder of its own; where a run must fail, the outputs it names exist
before and must be the same afterwards.
"""

import json
import os
import pathlib
import random
import re
import resource
import struct
import subprocess
import tempfile
import unittest

TOOL = os.environ.get("ANNULUS_TOOL", "annulus")
SENTINEL = b"what was here before"
SMALL = ["--tokens", "40", "--heads", "2", "--head-dim", "8", "--segments", "16,32", "--dilations", "1,2"]


def run(*arguments, cwd=None, preexec_fn=None):
    return subprocess.run(
        [TOOL, *map(str, arguments)],
        cwd=cwd,
        preexec_fn=preexec_fn,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def write_safetensors(path, tensors):
    """tensors: {name: (dtype, shape, bytes)}"""
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


def read_safetensors(path):
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    data = raw[8 + length :]
    return {k: (v["dtype"], v["shape"], data[slice(*v["data_offsets"])]) for k, v in header.items()}


def write_npy(path, shape, data, descr="<f4"):
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {tuple(shape)}, }}"
    header += " " * (-(len(header) + 11) % 64) + "\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + data)


def floats(count, seed=0):
    draw = random.Random(seed)
    return struct.pack(f"<{count}f", *(draw.gauss(0, 1) for _ in range(count)))


def problem_file(path, shape=(1, 40, 2, 8), kv_heads=2, dout=True, **replaced):
    kv_shape = list(shape)
    kv_shape[-2] = kv_heads
    tensors = {}
    for seed, (name, size) in enumerate({"q": list(shape), "k": kv_shape, "v": kv_shape, "dout": list(shape)}.items()):
        count = 1
        for n in size:
            count *= n
        tensors[name] = ("F32", size, floats(count, seed))
    if not dout:
        del tensors["dout"]
    tensors.update(replaced)
    write_safetensors(path, tensors)
    return path


class CliTest(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def succeed(self, *arguments):
        result = run(*arguments, cwd=self.folder)
        self.assertEqual(result.returncode, 0, f"{arguments}\n{result.stdout}\n{result.stderr}")
        return result

    def report(self, *arguments):
        """The JSON object of a command that succeeds."""
        result = self.succeed(*arguments, "--json", "-", "--quiet")
        self.assertEqual(result.stderr, "")
        return json.loads(result.stdout)

    def refuse(self, code, parts, *arguments, preexec_fn=None):
        """Fails with one line that has all parts, and leaves every file of the folder as it was."""
        before = {p: p.read_bytes() for p in self.folder.iterdir()}
        result = run(*arguments, cwd=self.folder, preexec_fn=preexec_fn)
        where = f"{arguments}\n{result.stdout}\n{result.stderr}"
        self.assertEqual(result.returncode, code, where)
        lines = [line for line in result.stderr.splitlines() if not re.match(r"annulus: \d+/\d+ ", line)]
        self.assertEqual(len(lines), 1, where)
        self.assertTrue(lines[0].startswith("annulus: "), where)
        for part in parts:
            self.assertIn(part, lines[0])
        self.assertEqual({p: p.read_bytes() for p in self.folder.iterdir()}, before, where)
        return lines[0]

    def refuse_run(self, parts, *arguments, code=2):
        """A `run` that must not touch its outputs."""
        (self.folder / "y.safetensors").write_bytes(SENTINEL)
        (self.folder / "report.json").write_bytes(SENTINEL)
        self.refuse(code, parts, "run", *arguments, "--output", "y.safetensors", "--json", "report.json")


class Usage(CliTest):
    def test_help_and_version_succeed(self):
        for arguments in ["--help"], ["run", "--help"], ["verify", "--help"], ["bench", "--help"], ["info", "--help"], ["plan", "--help"]:
            self.assertIn("--", self.succeed(*arguments).stdout)
        self.assertRegex(self.succeed("--version").stdout, r"^annulus \d+\.\d+\.\d+\n$")

    def test_wrong_words_are_usage_errors(self):
        self.refuse(2, ["info, plan, run, verify, bench", "none", "--help"])
        self.refuse(2, ["info, plan, run, verify, bench", "'sing'", "--help"], "sing")
        self.refuse(2, ["--tokens", "not expected"], "--tokens", "5", "run")
        self.refuse(2, ["--loud"], "run", "--loud")
        self.refuse(2, ["--tokens"], "run", "--tokens")
        self.refuse(2, ["5"], "run", "5")
        self.refuse(2, ["--tokens", "received 2"], "run", "--tokens", "1", "--tokens", "2")

    def test_devices_that_are_not_there(self):
        self.refuse(3, ["--device", "got tpu", "CPU"], "run", *SMALL, "--device", "tpu")
        self.succeed("run", *SMALL, "--device", "cpu")
        if "cuda" not in self.report("info")["devices"]:
            for command in "run", "verify", "bench":
                self.refuse(3, ["--device cuda", "--device cpu"], command, *SMALL, "--device", "cuda")

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


class BadInput(CliTest):
    """docs/semantics.md, section 9, as far as one rank has it: rule, value, remedy, and no output touched."""

    def test_sizes(self):
        self.refuse_run(["--tokens", "negative", "-4", "write a size"], "--tokens", "-4")
        self.refuse_run(["--batch", "-1"], "--batch", "-1")
        self.refuse_run(["heads must be at least 1", "got 0"], "--heads", "0")
        self.refuse_run(["head_dim must be at least 1", "got 0"], "--head-dim", "0")
        self.refuse_run(["--tokens", "ten"], "--tokens", "ten")
        self.refuse_run(["at most 2^58"], "--tokens", "4B", "--batch", "4B", "--heads", "64")

    def test_heads(self):
        self.refuse_run(["multiple of kv_heads", "12 heads and 5 kv_heads", "choose"], "--kv-heads", "5")
        self.refuse_run(["--kv-heads", "got 0"], "--kv-heads", "0")

    def test_lists_of_different_length(self):
        self.refuse_run(
            ["one each per branch", "2 segment lengths and 3 dilations"], "--segments", "16,32", "--dilations", "1,2,4"
        )
        self.refuse_run(["--segments", "empty"], "--segments", "")

    def test_segments_and_dilations(self):
        self.refuse_run(
            ["segment length of branch 1", "at least 1", "got 0"], "--segments", "16,0", "--dilations", "1,2"
        )
        self.refuse_run(["dilation of branch 0", "at least 1", "got 0"], "--segments", "16,32", "--dilations", "0,2")
        self.refuse_run(["--segments", "negative", "-16"], "--segments", "-16", "--dilations", "1")

    def test_head_ranges(self):
        self.refuse_run(["[0, 12)", "head_count 13", "shorten"], "--head-ranges", "0:13;0:1")
        self.refuse_run(["[0, 12)", "first_head 12", "shorten"], "--head-ranges", "0:12;12:13")

    def test_what_the_device_cannot_do(self):
        self.refuse_run(["head sizes", "1 to 512", "got 513", "split"], "--head-dim", "513")
        self.refuse_run(["fp32, bf16, fp16", "'fp8'"], "--dtype", "fp8")

    def test_documents(self):
        self.refuse_run(["cu_seqlens", "begin with 0", "got 1"], *SMALL, "--cu-seqlens", "1,40")
        self.refuse_run(["cu_seqlens", "20 before 10"], *SMALL, "--cu-seqlens", "0,20,10,40")
        self.refuse_run(["cu_seqlens", "tokens = 40", "got 39"], *SMALL, "--cu-seqlens", "0,39")

    def test_names(self):
        self.refuse_run(["by_head, by_head_block, every, table", "'random'"], "--phase", "random")
        self.refuse_run(["longnet, torchscale, residue, head_groups", "'none'"], "--preset", "none")
        self.refuse_run(["exact, detached", "'none'"], "--gradient", "none")
        self.refuse_run(["--classes", "got none"], "--phase", "table")
        self.refuse_run(["head_groups", "2 branches and 1 heads"], "--preset", "head_groups", "--heads", "1")

    def test_an_output_that_overlaps_an_input(self):
        problem_file(self.folder / "x.safetensors")
        self.refuse(
            2,
            ["overlap", "x.safetensors", "another name"],
            "run",
            "--input",
            "x.safetensors",
            "--output",
            "x.safetensors",
        )
        self.refuse(2, ["overlap"], "run", "--input", "x.safetensors", "--output", self.folder / "." / "x.safetensors")
        os.link(self.folder / "x.safetensors", self.folder / "link.safetensors")
        self.refuse(2, ["overlap"], "run", "--input", "x.safetensors", "--output", "link.safetensors")
        self.refuse(2, ["different files", "y.npy"], "run", *SMALL, "--out", "y.npy", "--lse", "y.npy")
        self.refuse(2, ["different files", "y.npy"], "run", *SMALL, "--out", "y.npy", "--json", "y.npy")
        self.refuse(2, ["overlap"], "run", "--input", "x.safetensors", "--json", "x.safetensors")

    def test_shapes_that_do_not_fit(self):
        x = self.folder / "x.safetensors"
        problem_file(x, k=("F32", [1, 39, 2, 8], floats(39 * 16)))
        self.refuse_run(["k in x.safetensors", "[1, 40, 2, 8]", "[1, 39, 2, 8]", "one problem"], "--input", x.name)
        problem_file(x, v=("F32", [1, 40, 1, 8], floats(40 * 8)))
        self.refuse_run(["v in x.safetensors", "[1, 40, 2, 8]", "[1, 40, 1, 8]"], "--input", x.name)
        problem_file(x, q=("F32", [40, 16], floats(40 * 16)))
        self.refuse_run(
            ["q in x.safetensors", "[batch, tokens, heads, head_dim]", "[40, 16]", "reshape"], "--input", x.name
        )
        problem_file(x, k=("F32", [40, 2, 8], floats(40 * 16)))
        self.refuse_run(["k in x.safetensors", "[40, 2, 8]"], "--input", x.name)
        problem_file(x, kv_heads=2, shape=(1, 40, 3, 8))
        self.refuse_run(["multiple of kv_heads", "3 heads and 2 kv_heads"], "--input", x.name)

    def test_types_that_do_not_fit(self):
        x = self.folder / "x.safetensors"
        problem_file(x, k=("BF16", [1, 40, 2, 8], floats(40 * 16)[: 40 * 32]))
        self.refuse_run(["'k'", "F32", "BF16", "convert"], "--input", x.name)
        problem_file(x, q=("F64", [1, 40, 2, 8], floats(40 * 32)))
        self.refuse_run(["'q'", "F32, BF16 or F16", "F64"], "--input", x.name)
        problem_file(x)
        self.refuse_run(["'q'", "BF16", "F32"], "--input", x.name, "--dtype", "bf16")

    def test_options_that_contradict_the_file(self):
        problem_file(self.folder / "x.safetensors", kv_heads=1)
        for option, typed, found in (
            ("tokens", 41, 40),
            ("batch", 2, 1),
            ("heads", 4, 2),
            ("kv-heads", 2, 1),
            ("head-dim", 64, 8),
        ):
            self.refuse_run(
                [f"--{option}", f"got {typed}", f"x.safetensors has {found}", "leave"],
                "--input",
                "x.safetensors",
                f"--{option}",
                typed,
            )
        self.succeed("run", "--input", "x.safetensors", "--tokens", "40", "--kv-heads", "1", "--dtype", "fp32")

    def test_files_that_are_missing_or_broken(self):
        x = self.folder / "x.safetensors"
        self.refuse_run(["nowhere.safetensors", "check the path"], "--input", "nowhere.safetensors")
        x.write_bytes(b"")
        self.refuse_run(["x.safetensors"], "--input", x.name)
        problem_file(x)
        x.write_bytes(x.read_bytes()[:-1])
        self.refuse_run(["x.safetensors"], "--input", x.name)
        problem_file(x)
        raw = x.read_bytes()
        x.write_bytes(raw.replace(b'"q"', b'"Q"'))
        self.refuse_run(["x.safetensors", "q", "Q"], "--input", x.name)
        self.refuse_run(["."], "--input", ".")

    def test_backward_without_dout(self):
        problem_file(self.folder / "x.safetensors", dout=False)
        self.refuse_run(["--backward", "dout", "x.safetensors"], "--input", "x.safetensors", "--backward")
        self.succeed("run", "--input", "x.safetensors")

    def test_options_that_do_not_belong_together(self):
        problem_file(self.folder / "x.safetensors")
        for name in "q", "k", "v", "dout":
            write_npy(self.folder / f"{name}.npy", [1, 40, 2, 8], floats(40 * 16))
        self.refuse_run(["--input", "--q"], "--input", "x.safetensors", "--q", "q.npy")
        self.refuse_run(["--q, --k and --v", "no --v"], "--q", "q.npy", "--k", "k.npy")
        npy = ["--q", "q.npy", "--k", "k.npy", "--v", "v.npy"]
        self.refuse_run(["--dout", "no --dout"], *npy, "--backward")
        self.refuse_run(["--dout", "--backward"], *npy, "--dout", "dout.npy")
        self.refuse_run(["--dq", "--backward"], *npy, "--dq", "dq.npy")
        self.refuse(2, ["--grid-samples", "--grid"], "verify", "--grid-samples", "3")
        self.refuse(2, ["--grid", "--tokens"], "verify", "--grid", "--tokens", "40")
        self.refuse(2, ["--grid", "--batch"], "verify", "--grid", "--batch", "2")
        self.refuse(2, ["--repeats", "0"], "bench", *SMALL, "--repeats", "0")
        self.refuse(2, ["--min-seconds", "-1"], "bench", *SMALL, "--min-seconds", "-1")
        self.refuse(2, ["--picture", "[0, 2)", "got 2"], "run", *SMALL, "--picture", "2")
        self.refuse(2, ["--threads", "got 0"], "run", *SMALL, "--threads", "0")

    def test_outputs_that_cannot_be_written_are_refused_before_the_work(self):
        for output in "missing/y.safetensors", ".":
            self.refuse(2, [output], "run", *SMALL, "--output", output)
        (self.folder / "out.npy").write_bytes(SENTINEL)
        self.refuse(2, ["missing"], "run", *SMALL, "--out", "out.npy", "--lse", "missing/lse.npy")

    def test_more_memory_than_there_is(self):
        for command in "run", "verify", "bench":
            self.refuse(
                3, ["GiB", "available", "smaller"], command, "--tokens", "1B", "--heads", "64", "--head-dim", "256"
            )

    def test_an_allocation_that_the_system_refuses(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

        if run("info", preexec_fn=limit).returncode != 0:
            self.skipTest("this build does not start within 1 GiB of address space (a sanitizer's does not)")
        self.refuse(3, ["refused", "smaller"], "run", "--tokens", "96k", preexec_fn=limit)


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


ENVIRONMENT = {"version", "device", "cpu", "instruction_set", "launcher", "transport", "ranks", "threads"}
SHARDING = {"ranks", "layout", "boundaries", "strategy", "slot_bytes", "memory_limit_bytes"}
PROBLEM = {
    "tokens", "batch", "heads", "kv_heads", "head_dim", "dtype", "segments", "dilations", "preset", "phase", "branches",
    "gradient", "pad_like_torchscale", "output_scale", "causal", "scale", "cu_seqlens", "seed", "backward",
    "deterministic", "reproducible",
}  # fmt: skip
TRAFFIC = {"sent_bytes", "plan_bytes", "minimum_bytes", "ring_bytes"}
MEMORY = {"peak_bytes", "plan_bytes", "components", "process_peak_bytes", "by_rank"}


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
        report = self.report("verify", "--grid", "--grid-samples", "5", "--seed", "3")
        self.assertEqual(set(report), {"problem", "environment", "passed", "checks", "failed"})
        self.assertEqual(report["problem"], {"grid": True, "cases": 5, "seed": 3})
        self.assertEqual(report["failed"], [])
        self.check_checks(report["checks"])

    def test_part_of_the_grid(self):
        part = ["--tokens", "2", "--segments", "10", "--heads", "1", "--head-dim", "8", "--dtype", "fp32", "--causal"]
        self.assertEqual(self.report("verify", "--grid", *part)["problem"]["cases"], 4 * 2)  # phases, gradients


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
    COMMANDS = ("info", "plan", "run", "verify", "bench")

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
