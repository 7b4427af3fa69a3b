#!/usr/bin/env python3
"""What a call from PyTorch costs beyond the C call that it makes, in microseconds, on the CPU or on a GPU.

    PYTHONPATH=python ANNULUS_LIBRARY=build/release/src/libannulus.so python3 bench/torch_overhead.py --device cuda

A problem so small that computing it takes next to nothing. Both do the same: `annulus.dilated_attention` without a
gradient, or forward and backward by torch.autograd.grad, and the C functions with arguments that were packed once. What
autograd takes for itself is measured beside it, by a function that does nothing but save five tensors and make three;
both also on the calling thread, since for a GPU autograd wakes another one, and that costs more than all the rest.
On a GPU calls are queued, not waited for, a hundred at a time. Without torch the script says so and ends with exit code
0.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

CALLS = 100


def microseconds(torch, device, calls, rounds):
    """Of each call: the median over rounds, in turns."""
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            if device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            times[name].append((time.perf_counter() - begin) / CALLS * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def calls_of_c(torch, c, handle, q, k, v, dout):
    """The C functions on arguments that are packed here."""
    out, lse = handle.forward(q, k, v)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    rooms = [handle._room(which, q.device) for which in (c.FORWARD, c.BACKWARD)]

    def pack(form, tensors, room):
        views = [part for x in tensors for part in (x.data_ptr(), handle._view(x))]
        stream = torch.cuda.current_stream().cuda_stream if q.is_cuda else 0
        return form.pack(form.size, *views, lse.data_ptr(), lse.numel(), room.data_ptr(), room.numel(), stream)

    first = pack(c.FORWARD_ARGS, (q, k, v, out), rooms[0])
    second = pack(c.BACKWARD_ARGS, (q, k, v, out, dout, *gradients), rooms[1])
    kept = (out, lse, gradients, rooms)

    def forward():
        handle._check(handle._forward(handle._pointer, first))

    def both(kept=kept):
        forward()
        handle._check(handle._backward(handle._pointer, second))

    return forward, both


def autograd_alone(torch):
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out, lse = torch.empty_like(q), torch.empty_like(q)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, dout):
            q, k, v, _, _ = ctx.saved_tensors
            return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    return Nothing.apply


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
    from annulus._handles import Sizes, one_rank
    from annulus._spec import make_spec

    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    torch.set_num_threads(1)
    q, k, v, dout = (torch.randn(1, 16, 1, 64, device=arguments.device, dtype=dtype) for _ in range(4))
    pattern = {"segment_lengths": [16], "dilation_rates": [1]}
    handle = one_rank(make_spec(**pattern), Sizes(1, 16, 1, 1, 64), dtype, q.device)
    c_forward, c_both = calls_of_c(torch, c, handle, q, k, v, dout)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    nothing = autograd_alone(torch)
    calls = {
        "c_us": c_forward,
        "torch_us": lambda: annulus.dilated_attention(q, k, v, **pattern),
        "c_both_us": c_both,
        "torch_both_us": lambda: torch.autograd.grad(annulus.dilated_attention(*inputs, **pattern), inputs, dout),
        "autograd_us": lambda: torch.autograd.grad(nothing(*inputs), inputs, dout),
    }
    for call in calls.values():
        call()
    result = {"device": arguments.device, "torch": torch.__version__, "calls": CALLS * arguments.rounds}
    if arguments.device == "cuda":
        result["gpu"] = torch.cuda.get_device_name()
    result |= microseconds(torch, arguments.device, calls, arguments.rounds)
    with torch.autograd.set_multithreading_enabled(False):
        here = {f"{name[:-3]}_one_thread_us": calls[name] for name in ("torch_both_us", "autograd_us")}
        result |= microseconds(torch, arguments.device, here, arguments.rounds)
    result["overhead_us"] = result["torch_us"] - result["c_us"]
    result["overhead_both_us"] = result["torch_both_us"] - result["c_both_us"]
    print(
        f"{arguments.device}: a forward from C {result['c_us']:.1f} us, from PyTorch {result['torch_us']:.1f} us: "
        f"{result['overhead_us']:.1f} us more. Forward and backward {result['c_both_us']:.1f} us and "
        f"{result['torch_both_us']:.1f} us: {result['overhead_both_us']:.1f} us more, autograd alone takes "
        f"{result['autograd_us']:.1f} us. With autograd on the calling thread "
        f"{result['torch_both_one_thread_us']:.1f} us, and {result['autograd_one_thread_us']:.1f} us alone"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
