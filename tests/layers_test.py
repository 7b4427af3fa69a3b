#!/usr/bin/env python3
"""The layers of ARCHITECTURE.md, held: reads every #include and fails when a layer looks up.

A layer may include itself and the layers listed for it. Foreign headers are allowed where they belong and nowhere else,
so that the public headers need the standard library alone and instruction-set headers stay in the files made for them.
"""

import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent

# layer -> the layers below that it may include. A trailing file name narrows that to single headers.
LAYERS = {
    "annulus": [],
    "numeric": ["annulus"],
    "plan": ["annulus", "numeric"],
    "kernels": ["annulus", "numeric", *(f"plan/{file}.h" for file in ("parcel", "phase", "plan", "rows", "task")),
                "transport/device_copies.h", "transport/device_link.h"],
    "transport": ["annulus", "numeric"],  # moves bytes; knows neither kernels nor plans
    "reference": ["annulus", "numeric"],  # no plan: the oracle shares no index code with what it judges
    "io": ["annulus", "numeric"],
    "exec": ["annulus", "numeric", "plan", "kernels", "transport"],
    "api": ["annulus", "numeric", "plan", "kernels", "exec", "transport", "reference/reference.h"],
    "cli": ["annulus", "numeric", "plan", "kernels", "transport", "exec", "reference", "io"],
}

# header prefix -> the files that may include it, as path prefixes
FOREIGN = {
    "hwy/": ["src/kernels/cpu/", "src/reference/row_sums.cc"],
    "immintrin.h": ["src/kernels/cpu/tiles_bf16.cc"],
    "x86intrin.h": [],
    "arm_neon.h": [],
    "mpi.h": ["src/transport/"],
    "mpi-ext.h": ["src/transport/mpi_process.cc"],
    "cuda": ["src/kernels/cuda/"],
    "nccl.h": ["src/kernels/cuda/"],
    "nvtx3/": ["src/kernels/cuda/"],
    "CLI/": ["src/cli/"],
    "nlohmann/": ["src/cli/"],
}

# Everything else in <angle brackets> is the C++ or C standard library, or POSIX (ifaddrs.h: nearly).
POSIX = re.compile(r"(sys/\w+|netinet/\w+|arpa/\w+|ifaddrs|netdb|fcntl|unistd|pthread|sched|dirent|poll|cpuid|dlfcn)\.h")
STANDARD = re.compile(r"[a-z_0-9]+")
C_STANDARD = {"stddef.h", "stdint.h"}  # in the C ABI's header

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def layer_of(path: str) -> str | None:
    """The layer of a repository path such as src/plan/rows.cc."""
    parts = path.split("/")
    if parts[:2] == ["include", "annulus"]:
        return "annulus"
    return parts[1] if parts[0] == "src" and len(parts) > 2 else None


def may_include_layer(layer: str, target: str) -> bool:
    below = LAYERS[layer]
    return target.split("/")[0] in [layer, *(b for b in below if "/" not in b)] or target in below


def faults(path: str, text: str) -> list[str]:
    """What is wrong with the includes of one file, one sentence each."""
    layer = layer_of(path)
    if layer not in LAYERS:
        return [f"{path}: in no known layer ({', '.join(LAYERS)}); move it, or add the layer to tests/layers_test.py"]
    found = []
    for bracket, target in INCLUDE.findall(text):
        if target.split("/")[0] not in LAYERS:
            owners = [files for prefix, files in FOREIGN.items() if target.startswith(prefix)]
            if owners:
                allowed = any(path.startswith(prefix) for prefix in owners[0])
            elif bracket == '"':
                allowed = False
            elif layer == "annulus":
                allowed = STANDARD.fullmatch(target) is not None or target in C_STANDARD
            else:
                allowed = STANDARD.fullmatch(target) is not None or POSIX.fullmatch(target) is not None
            if not allowed:
                found.append(f"{path}: {target} does not belong here")
        elif not may_include_layer(layer, target):
            found.append(f"{path}: layer {layer} may not include {target}")
    return found


def sources() -> list[pathlib.Path]:
    files = [p for folder in ("include", "src") for p in (ROOT / folder).rglob("*")]
    return sorted(p for p in files if p.suffix in {".h", ".cc", ".cu", ".cuh"})


class Layers(unittest.TestCase):
    def test_the_tree_is_layered(self):
        files = sources()
        self.assertGreater(len(files), 10, "found hardly any sources: is the test looking in the right place?")
        found = []
        for file in files:
            found += faults(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8"))
        self.assertEqual(found, [], "\n" + "\n".join(found))

    def test_finds_what_it_should(self):
        bad = [
            ("include/annulus/problem.h", '#include "plan/rows.h"'),
            ("include/annulus/problem.h", "#include <hwy/highway.h>"),
            ("include/annulus/problem.h", "#include <unistd.h>"),
            ("src/plan/rows.cc", '#include "kernels/thread_pool.h"'),
            ("src/reference/reference.cc", '#include "plan/rows.h"'),
            ("src/kernels/cpu/forward.cc", '#include "plan/names.h"'),
            ("src/kernels/cpu/forward.cc", "#include <immintrin.h>"),
            ("src/cli/cuda.cc", "#include <cuda_runtime.h>"),
            ("src/transport/threads.cc", '#include "kernels/thread_pool.h"'),
            ("src/api/attention.cc", '#include "cli/options.h"'),
            ("src/io/npy.cc", "#  include <nlohmann/json.hpp>"),
            ("src/plan/rows.cc", '#include "rows.h"'),
            ("src/helpers/strings.cc", "#include <string>"),
        ]
        for path, line in bad:
            self.assertEqual(len(faults(path, line)), 1, f"{path}: {line}")

    def test_lets_pass_what_it_should(self):
        good = [
            ("include/annulus/problem.h", '#include <vector>\n#include "annulus/tensor.h"'),
            ("src/plan/plan.cc", '#include "plan/rows.h"\n#include "annulus/errors.h"'),
            ("src/kernels/cpu/forward.cc", '#include "plan/task.h"\n#include <hwy/highway.h>'),
            ("src/kernels/cpu/tiles_bf16.cc", "#include <immintrin.h>"),
            ("src/io/mapped_file.cc", "#include <sys/mman.h>\n#include <fcntl.h>"),
            ("src/cli/main.cc", '#include <CLI/CLI.hpp>\n#include "reference/reference.h"'),
        ]
        for path, text in good:
            self.assertEqual(faults(path, text), [], path)


if __name__ == "__main__":
    unittest.main()
