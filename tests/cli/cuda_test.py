#!/usr/bin/env python3
"""The tool on one GPU: what it says of it, what it computes there, and what it refuses.

Run by `./dev gpu`, and by ctest on a pretend GPU (tests/pretend_cuda); exits with 77 (skipped) where the tool finds
neither.
"""

import json
import os
import sys
import unittest
import unittest.mock

from tool import ENVIRONMENT, CliTest, info, problem_file, read_safetensors, run

CUDA = ["--device", "cuda"]
SMALL = [*CUDA, "--tokens", "300", "--heads", "4", "--head-dim", "64", "--segments", "64,300", "--dilations", "1,3"]
# More than any GPU has: a terabyte a tensor.
HUGE = [*CUDA, "--tokens", "64M", "--heads", "64", "--head-dim", "128", "--dtype", "bf16"]


class OneGpu(CliTest):
    def test_info_names_it(self):
        report = self.report("info")
        self.assertIn("cuda", report["devices"])
        self.assertGreater(report["gpu"]["memory_bytes"], 0)
        self.assertLessEqual(report["gpu"]["free_bytes"], report["gpu"]["memory_bytes"])
        self.assertIn(report["gpu"]["name"], self.succeed("info").stdout)

    def test_verify(self):
        for words in (
            [],
            ["--causal", "--kv-heads", "2", "--dtype", "bf16"],
            ["--dtype", "fp16", "--cu-seqlens", "0,1,130,300", "--preset", "residue"],
            ["--preset", "torchscale", "--pad-like-torchscale", "--batch", "2"],
        ):
            self.assertIn("passed: ", self.succeed("verify", *SMALL, *words).stdout)

    def test_run(self):
        words = ["run", *SMALL, "--backward", "--deterministic"]
        report = self.report(*words)
        self.assertLessEqual(ENVIRONMENT | {"gpu", "kernel"}, set(report["environment"]))
        self.assertEqual(report["environment"]["gpu"], info()["gpu"]["name"])
        self.assertEqual(set(report["checksum"]), {"out", "lse", "dq", "dk", "dv"})
        self.assertTrue(report["problem"]["deterministic"])
        self.assertEqual(self.report(*words)["checksum"], report["checksum"])
        self.assertEqual(report["memory"]["components"]["q"], 300 * 4 * 64 * 4)
        self.assertIn("forward", self.succeed(*words).stdout)

    def test_files(self):
        problem_file(self.folder / "x.safetensors", kv_heads=1)
        words = [*CUDA, "--input", "x.safetensors", "--segments", "16,32", "--dilations", "1,2", "--backward"]
        self.succeed("run", *words, "--output", "y.safetensors")
        results = read_safetensors(self.folder / "y.safetensors")
        self.assertEqual({name: shape for name, (_, shape, _) in results.items()}, {
            "out": [1, 40, 2, 8], "lse": [1, 2, 40], "dq": [1, 40, 2, 8], "dk": [1, 40, 1, 8], "dv": [1, 40, 1, 8],
        })  # fmt: skip

    def test_bench(self):
        words = ["--backward", "--repeats", "2", "--min-seconds", "0"]
        report = self.report("bench", *SMALL, *words)
        for one_pass in "forward", "backward":
            self.assertGreater(report[one_pass]["flop_per_s"], 0)
            self.assertLessEqual(report[one_pass]["peak_fraction"], 1)
        self.assertEqual(report["memory"]["peak_bytes"], report["memory"]["plan_bytes"])

    def test_gpus_and_kernels_that_are_not_there(self):
        for command in "run", "verify", "bench":
            self.refuse(3, ["99"], command, *SMALL[2:], "--device", "cuda:99")
            self.refuse(2, ["kernel", "'fast'"], command, *SMALL, "--kernel", "fast")


class Memory(CliTest):
    def test_more_than_any_gpu_has(self):
        plan = self.fits_not(*HUGE)
        self.assertGreater(plan["memory"]["plan_bytes"], info()["gpu"]["memory_bytes"])
        self.assertLessEqual(plan["memory"]["available_bytes"], info()["gpu"]["memory_bytes"])
        for words in [], ["--ranks", "2"]:
            self.refuse(3, ["must fit into", "give smaller sizes"], "run", *HUGE, "--quiet", *words)

    def test_a_plan_speaks_of_the_gpu(self):
        plan = self.report("plan", *SMALL, "--ranks", "3")
        self.assertEqual(plan["environment"]["device"], "cuda")
        self.assertEqual(plan["environment"]["gpu"], info()["gpu"]["name"])
        self.assertIn(plan["environment"]["kernel"], {"sm90", "mma"})
        self.assertIn(info()["gpu"]["name"], self.succeed("plan", *SMALL, "--ranks", "3").stdout)
        run = self.report("run", *SMALL, "--ranks", "3")
        self.assertEqual(run["memory"]["peak_bytes"], max(r["plan_bytes"] for r in run["memory"]["by_rank"]))
        self.assertEqual(sum(plan["memory"]["forward"]["components"].values()), run["memory"]["peak_bytes"])

    def test_what_transports_take(self):
        threads, mpi, nccl = (
            self.report("plan", *SMALL, "--ranks", "2", "--transport", transport)["memory"]["forward"]["components"]
            for transport in ("threads", "mpi", "nccl")
        )
        self.assertFalse({"transport", "transport_gpu"} & set(threads))
        self.assertGreater(mpi["transport"], nccl["transport"])  # pinned slots, beside those of MPI
        self.assertNotIn("transport_gpu", mpi)
        self.assertGreater(nccl["transport_gpu"], 0)

    def test_ranks_that_share_a_gpu_count_together(self):
        if info()["gpu"]["name"] != "pretend GPU":
            self.skipTest("only a pretend GPU has as much memory as one wishes")
        sizes = [*CUDA, "--tokens", "2k", "--heads", "4", "--head-dim", "64", "--backward"]
        needs = self.report("plan", *sizes, "--ranks", "3")["memory"]["plan_bytes"]
        for mib, fits in (needs // 2**20 + 8, True), (needs // 2**20 - 1, False):  # some for tables
            with unittest.mock.patch.dict(os.environ, ANNULUS_PRETEND_GPU_MIB=str(mib)):
                if fits:
                    self.report("plan", *sizes, "--ranks", "3")
                    self.succeed("run", *sizes, "--ranks", "3")
                    continue
                self.assertEqual(self.fits_not(*sizes, "--ranks", "3")["memory"]["plan_bytes"], needs)
                words = ["run", *sizes, "--ranks", "3", "--quiet"]
                text = self.refuse(3, ["must fit into the memory of the GPUs", "its ranks on cuda:0"], *words)
                self.assertNotIn("refused", text)  # before anything was allocated
                self.assertTrue(self.report("plan", *sizes, "--ranks", "2")["fits"], "one on each of the two GPUs")

    def fits_not(self, *words):
        result = run("plan", *words, "--json", "-", "--quiet")
        self.assertEqual(result.returncode, 3, result.stderr)
        plan = json.loads(result.stdout)
        self.assertFalse(plan["fits"])
        return plan


if __name__ == "__main__":
    if info()["gpu"] is None:
        print("Skipped: `annulus info` shows no GPU")
        sys.exit(77)
    unittest.main()
