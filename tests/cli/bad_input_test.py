#!/usr/bin/env python3
"""What the tool refuses: rule, value, remedy, and no output touched."""

import os
import unittest

from tool import SENTINEL, SMALL, CliTest, floats, problem_file, within_a_gib, write_npy


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
        self.refuse_run(["fp32, bf16, fp16", "'fp8'", "choose one"], "--dtype", "fp8")
        self.refuse_run(["--device", "cpu, cuda or cuda:N", "'tpu'"], "--device", "tpu")
        self.refuse_run(["--kernel", "a GPU's", "sm90", "--instruction-set"], "--kernel", "sm90")

    def test_heads(self):
        self.refuse_run(["heads", "at least 1", "got 0"], "--heads", "0")
        self.refuse_run(["--kv-heads", "at least 1", "got 0"], "--kv-heads", "0")

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
        self.need_no_sanitizer()
        self.refuse(3, ["refused", "smaller"], "run", "--tokens", "96k", preexec_fn=within_a_gib)


if __name__ == "__main__":
    unittest.main()
