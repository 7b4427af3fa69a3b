"""The tool as tests drive it: how it is run, the files it reads, and the keys of its reports.

ANNULUS_TOOL names the executable. Every run gets a folder of its own; where a run must fail, the outputs it names exist
before and must be the same afterwards. Needs nothing but Python's standard library.
"""

import functools
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

ENVIRONMENT = {"version", "command", "device", "cpu", "instruction_set", "launcher", "transport", "ranks", "threads"}
SHARDING = {"ranks", "layout", "boundaries", "strategy", "slot_bytes", "memory_limit_bytes"}
PROBLEM = {
    "tokens", "batch", "heads", "kv_heads", "head_dim", "dtype", "segments", "dilations", "preset", "phase", "branches",
    "gradient", "pad_like_torchscale", "output_scale", "causal", "scale", "cu_seqlens", "seed", "backward",
    "deterministic", "reproducible",
}  # fmt: skip
TRAFFIC = {"sent_bytes", "plan_bytes", "minimum_bytes", "ring_bytes"}
MEMORY = {"peak_bytes", "plan_bytes", "components", "process_peak_bytes", "by_rank"}



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


@functools.cache
def info():
    """What `annulus info` says of this machine."""
    return json.loads(run("info", "--json", "-", "--quiet").stdout)


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


def within_a_gib():
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))


class CliTest(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def need_no_sanitizer(self):
        if run("info", preexec_fn=within_a_gib).returncode != 0:
            self.skipTest("this build does not start within 1 GiB of address space (a sanitizer's does not)")

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
