#!/usr/bin/env python3
"""`annulus run` on files written by numpy, against docs/semantics.md written down once more in numpy's float64.

Nothing here knows of the C++ sources: the pattern is a matrix of counts (how many branches reach each pair), the output
a softmax weighted by it, the gradients the closed forms of section 4. Skips, and says so, where numpy is not installed.
"""

import itertools
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

try:
    import numpy as np
except ImportError:
    print("SKIPPED: numpy is not installed for " + sys.executable)
    sys.exit(77)

TOOL = os.environ.get("ANNULUS_TOOL", "annulus")
RESULTS = ("out", "lse", "dq", "dk", "dv")


class Problem:
    """What decides the result; the fields are options of the tool."""

    def __init__(self, tokens, heads, kv_heads, head_dim, segments, dilations, **more):
        self.batch, self.tokens, self.heads, self.kv_heads, self.head_dim = (
            more.pop("batch", 1),
            tokens,
            heads,
            kv_heads,
            head_dim,
        )
        self.segments, self.dilations = segments, dilations
        self.phase = more.pop("phase", "by_head")
        self.classes = more.pop("classes", None)
        self.gradient = more.pop("gradient", "exact")
        self.causal = more.pop("causal", False)
        self.documents = more.pop("documents", [0, tokens])
        assert not more, more

    def options(self):
        words = ["--segments", ",".join(map(str, self.segments)), "--dilations", ",".join(map(str, self.dilations))]
        words += [
            "--phase",
            self.phase,
            "--gradient",
            self.gradient,
            "--cu-seqlens",
            ",".join(map(str, self.documents)),
        ]
        if self.classes is not None:
            words += ["--classes", ";".join(",".join(map(str, row)) for row in self.classes)]
        return words + ["--causal"] * self.causal

    def taken_class(self, branch, head, r):
        """Section 2; None: every class."""
        if self.phase == "by_head":
            return head % r
        if self.phase == "by_head_block":
            return head // -(-self.heads // r)
        return self.classes[branch][head] if self.phase == "table" else None

    def mask(self, branch, head):
        """[query, key]: eq. 3 of one branch."""
        w, r = self.segments[branch], self.dilations[branch]
        t = np.arange(self.tokens)
        bounds = np.array(self.documents)
        document = np.searchsorted(bounds, t, side="right") - 1
        offset = t - bounds[document]
        segment, position_class = offset // w, offset % w % r
        same = (
            (document[:, None] == document[None, :])
            & (segment[:, None] == segment[None, :])
            & (position_class[:, None] == position_class[None, :])
        )
        if self.causal:
            same &= t[None, :] <= t[:, None]
        taken = self.taken_class(branch, head, r)
        return same if taken is None else same & (position_class == taken)[:, None]


def attend(problem, q, k, v, dout):
    """Equations 4 to 8 in float64; tensors [batch, tokens, heads, head_dim]."""
    result = {name: np.zeros(x.shape) for name, x in (("out", q), ("dq", q), ("dk", k), ("dv", v))}
    result["lse"] = np.zeros((problem.batch, problem.heads, problem.tokens))
    scale = 1 / np.sqrt(problem.head_dim)
    for b, j in itertools.product(range(problem.batch), range(problem.heads)):
        h = j // (problem.heads // problem.kv_heads)
        qj, kj, vj, gj = q[b, :, j], k[b, :, h], v[b, :, h], dout[b, :, j]
        logits = scale * qj @ kj.T
        masks = [problem.mask(i, j) for i in range(len(problem.segments))]
        count = sum(m.astype(float) for m in masks)
        covered = count.sum(1) > 0
        top = np.where(covered, np.where(count > 0, logits, -np.inf).max(1, initial=-np.inf), 0)
        with np.errstate(divide="ignore"):
            lse = top + np.log((count * np.exp(np.minimum(logits - top[:, None], 700))).sum(1))
        shift = np.where(covered, lse, 0)[:, None]
        weight = np.exp(np.minimum(logits - shift, 700))  # P where a branch reaches the pair
        out = (count * weight) @ vj
        d_p = gj @ vj.T
        d_s = np.zeros_like(logits)
        for m in masks:
            p = m * weight
            if problem.gradient == "exact":
                delta = (gj * out).sum(1)
            else:
                total = p.sum(1)
                delta = (gj * (p @ vj)).sum(1) / np.where(total > 0, total, 1)
            d_s += scale * p * (d_p - delta[:, None])
        result["out"][b, :, j] = out
        result["lse"][b, j] = lse
        result["dq"][b, :, j] = d_s @ kj
        result["dk"][b, :, h] += d_s.T @ qj
        result["dv"][b, :, h] += (count * weight).T @ gj
    return result


def write_safetensors(path, tensors):
    header, chunks, offset = {}, [], 0
    for name, x in tensors.items():
        data = np.ascontiguousarray(x).tobytes()
        dtype = {"float32": "F32", "float16": "F16", "uint16": "BF16"}[x.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": [offset, offset + len(data)]}
        chunks.append(data)
        offset += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(chunks))


def read_safetensors(path):
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    types = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
    read = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        read[name] = np.frombuffer(raw[begin:end], types[entry["dtype"]]).reshape(entry["shape"])
    return read


def to_bf16(x):
    """Bits, rounded to nearest even."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widen(x):
    """float64 of any of our types; bf16 is kept as bits."""
    return (
        (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        if x.dtype == np.uint16
        else x.astype(np.float64)
    )


ROUND = {"fp32": lambda x: x.astype(np.float32), "fp16": lambda x: x.astype(np.float16), "bf16": to_bf16}
# Of the largest value of a tensor: a few units in the last place of the type.
TOLERANCE = {"fp32": 4e-6, "fp16": 3e-3, "bf16": 2e-2}

PROBLEMS = {
    "one segment": Problem(50, 2, 2, 16, [64], [1]),
    "longnet, ragged": Problem(101, 5, 1, 24, [16, 37, 100], [1, 3, 7]),
    "torchscale": Problem(97, 6, 3, 8, [16, 64], [1, 4], phase="by_head_block", gradient="detached", batch=2),
    "every class, causal": Problem(83, 3, 3, 40, [10, 40], [3, 16], phase="every", causal=True),
    "every class, detached": Problem(64, 2, 1, 16, [16, 64], [2, 8], phase="every", gradient="detached", causal=True),
    "table and documents": Problem(
        60, 4, 2, 16, [8, 32], [2, 5], phase="table", classes=[[0, 1, 1, 0], [4, 0, 2, 2]], documents=[0, 1, 1, 18, 60]
    ),
    "rows that nobody covers": Problem(70, 2, 2, 16, [10], [16], gradient="detached"),
    "one token": Problem(1, 3, 1, 8, [4, 8], [1, 2], batch=3),
}


class FromFiles(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def draw(self, problem, dtype):
        draw = np.random.default_rng(7)
        shape = (problem.batch, problem.tokens, problem.heads, problem.head_dim)
        kv_shape = (*shape[:2], problem.kv_heads, problem.head_dim)
        shapes = {"q": shape, "k": kv_shape, "v": kv_shape, "dout": shape}
        return {name: ROUND[dtype](draw.standard_normal(size)) for name, size in shapes.items()}

    def run_tool(self, *words):
        result = subprocess.run(
            [TOOL, "run", "--quiet", *words], cwd=self.folder, capture_output=True, text=True, check=False
        )
        self.assertEqual(result.returncode, 0, result.stderr)

    def compare(self, got, expected, dtype, where):
        self.assertEqual(set(got), set(expected), where)
        for name, want in expected.items():
            have = widen(got[name])
            self.assertEqual(have.shape, want.shape, f"{where}: {name}")
            finite = np.isfinite(want)
            self.assertTrue(
                np.array_equal(have[~finite], want[~finite]), f"{where}: {name} where no branch covers a row"
            )
            largest = np.abs(want[finite]).max(initial=1e-3)
            error = np.abs(have[finite] - want[finite]).max(initial=0)
            bound = (TOLERANCE["fp32"] if name == "lse" else TOLERANCE[dtype]) * largest
            self.assertLessEqual(error, bound, f"{where}: {name}")

    def test_safetensors(self):
        for dtype, (title, problem) in itertools.product(ROUND, PROBLEMS.items()):
            with self.subTest(f"{title}, {dtype}"):
                inputs = self.draw(problem, dtype)
                expected = attend(problem, *(widen(inputs[n]) for n in ("q", "k", "v", "dout")))
                write_safetensors(self.folder / "x.safetensors", inputs)
                self.run_tool("--input", "x.safetensors", "--output", "y.safetensors", "--backward", *problem.options())
                self.compare(read_safetensors(self.folder / "y.safetensors"), expected, dtype, title)
                forward = {name: expected[name] for name in ("out", "lse")}
                self.run_tool("--input", "x.safetensors", "--output", "z.safetensors", *problem.options())
                self.compare(read_safetensors(self.folder / "z.safetensors"), forward, dtype, title + ", forward")

    def test_npy(self):
        for dtype, (title, problem) in itertools.product(ROUND, PROBLEMS.items()):
            with self.subTest(f"{title}, {dtype}"):
                inputs = self.draw(problem, dtype)
                expected = attend(problem, *(widen(inputs[n]) for n in ("q", "k", "v", "dout")))
                words = ["--dtype", dtype, "--backward", *problem.options()]
                for name, x in inputs.items():
                    np.save(self.folder / f"{name}.npy", x)
                    words += [f"--{name}", f"{name}.npy"]
                for name in RESULTS:
                    words += [f"--{name}", f"{name}-result.npy"]
                self.run_tool(*words)
                got = {name: np.load(self.folder / f"{name}-result.npy") for name in RESULTS}
                if dtype == "bf16":  # numpy has no such type and gives two opaque bytes
                    got = {name: x if name == "lse" else x.view(np.uint16) for name, x in got.items()}
                self.compare(got, expected, dtype, title)

    def test_the_safetensors_package_reads_and_writes_the_same(self):
        try:
            from safetensors.numpy import load_file, save_file
        except ImportError:
            self.skipTest("the safetensors package is not installed")
        problem = PROBLEMS["longnet, ragged"]
        inputs = self.draw(problem, "fp32")
        save_file(inputs, self.folder / "x.safetensors")
        self.run_tool("--input", "x.safetensors", "--output", "y.safetensors", "--backward", *problem.options())
        expected = attend(problem, *(widen(inputs[n]) for n in ("q", "k", "v", "dout")))
        self.compare(load_file(self.folder / "y.safetensors"), expected, "fp32", "package")

    def test_the_oracle_of_this_test_by_finite_differences(self):
        problem = Problem(23, 2, 1, 4, [5, 12], [1, 3], causal=True)
        inputs = {name: widen(x) for name, x in self.draw(problem, "fp32").items()}
        result = attend(problem, **inputs)
        step = 1e-6
        draw = np.random.default_rng(3)
        for name in "q", "k", "v":
            for _ in range(10):
                index = tuple(draw.integers(0, n) for n in inputs[name].shape)
                value = {}
                for sign in 1, -1:
                    moved = {n: x.copy() for n, x in inputs.items()}
                    moved[name][index] += sign * step
                    value[sign] = (attend(problem, **moved)["out"] * inputs["dout"]).sum()
                slope = (value[1] - value[-1]) / (2 * step)
                self.assertAlmostEqual(slope, result["d" + name][index], delta=1e-6)


if __name__ == "__main__":
    unittest.main()
