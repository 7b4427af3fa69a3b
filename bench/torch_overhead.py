#!/usr/bin/env python3
"""What a call from PyTorch costs beyond the C call that it makes, in microseconds, on the CPU or on a GPU.

    PYTHONPATH=python ANNULUS_LIBRARY=build/release/src/libannulus.so python3 bench/torch_overhead.py --device cuda

A problem so small that computing it takes next to nothing. Both do the same: `annulus.dilated_attention` without a
gradient, and the C function with arguments that were packed once. On a GPU calls are queued, not waited for, a hundred
at a time. Without torch the script says so and ends with exit code 0.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

CALLS = 100


def microseconds(torch, device, call, rounds):
    times = []
    for _ in range(rounds):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - begin) / CALLS * 1e6)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description="Overhead of a call from PyTorch.")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=pathlib.Path, help="write the result to a file")
    arguments = parser.parse_args()
    try:
        import torch
    except ImportError as error:
        print(f"SKIPPED: no overhead of PyTorch, since it cannot be imported ({error}).")
        return 0
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("SKIPPED: torch sees no GPU.")
        return 0
    import annulus
    from annulus import _library as c
    from annulus._handles import Sizes, _stream, one_rank
    from annulus._spec import make_spec

    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, 16, 1, 64, device=arguments.device, dtype=dtype) for _ in range(3))
    pattern = {"segment_lengths": [16], "dilation_rates": [1]}

    handle = one_rank(make_spec(**pattern), Sizes(1, 16, 1, 1, 64), dtype, q.device)
    out, lse = torch.empty_like(q), torch.empty(1, 1, 16, device=arguments.device)
    workspace = handle._room(c.FORWARD, q.device)
    packed = c.FORWARD_ARGS.pack(
        c.FORWARD_ARGS.size,
        *handle._view(q), *handle._view(k), *handle._view(v), *handle._view(out),
        lse.data_ptr(), lse.numel(), workspace.data_ptr(), workspace.numel(), _stream(q.device),
    )  # fmt: skip

    def from_c():
        handle._check(handle._forward(handle._pointer, packed))

    def from_torch():
        annulus.dilated_attention(q, k, v, **pattern)

    result = {"device": arguments.device, "torch": torch.__version__, "calls": CALLS * arguments.rounds}
    if arguments.device == "cuda":
        result["gpu"] = torch.cuda.get_device_name()
    with torch.inference_mode():
        for call in from_c, from_torch:
            call()
        result["c_us"] = microseconds(torch, arguments.device, from_c, arguments.rounds)
        result["torch_us"] = microseconds(torch, arguments.device, from_torch, arguments.rounds)
    result["overhead_us"] = result["torch_us"] - result["c_us"]
    print(
        f"{arguments.device}: a call from C {result['c_us']:.1f} us, from PyTorch {result['torch_us']:.1f} us: "
        f"{result['overhead_us']:.1f} us more"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
