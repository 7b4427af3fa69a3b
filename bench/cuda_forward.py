#!/usr/bin/env python3
"""Forward on one GPU: Annulus against PyTorch's cuDNN attention, alternating in one run.

    python3 bench/cuda_forward.py --library build/release/src/libannulus.so --json FILE
    python3 bench/cuda_forward.py ... dense patterns        only these parts

Parts:
  dense     one branch, groups of w / r rows at several dilations, against cuDNN on dense sequences of w / r tokens;
            every class takes part. Once more with one class a head: most rows of the result are then 0, and written
  patterns  several branches at 512K tokens, against the same pattern composed of PyTorch views, cuDNN and a merge
  general   sizes that do not divide, other phases, documents, shared key/value heads: per FLOP against the dividing
            case, in turns with it
  length    time per token from 64K tokens on
  fp32      against PyTorch's memory-efficient kernel in fp32

Random inputs. Every contender runs back to back for --busy-ms, long enough for the card's power limit to act, and all of
a comparison equally long, in turns, --rounds times after some that do not count; the figure is the median over rounds of
the median launch. Without torch or a GPU the script says so and ends with exit code 0.
"""

import argparse
import ctypes
import fnmatch
import json
import math
import pathlib
import sys

import c_abi

HEADS = 16
LEAST_LAUNCHES = 4  # of the slowest contender in one turn
SETTLE_MS = 600  # of load, until the clock that the power limit allows stands: before, it swings by a fifth
DTYPES = ("fp32", "bf16", "fp16")  # in the order of annulus_dtype
PHASES = ("by_head", "by_head_block", "every")  # of annulus_phase, from 1 on
TWO = ([2048, 4096], [1, 2])
FIVE = ([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])


class Forward:
    """One planned problem with its tensors, through the C ABI, on torch's current stream."""

    def __init__(self, library, torch, tokens, head_dim, segments, dilations, *, causal=False, phase="by_head",
                 kv_heads=0, heads=HEADS, dtype="bf16", documents=(), kernel="auto", tensors=None,
                 deterministic=False, detached=False):
        self.library, self.torch = library, torch
        kv_heads = kv_heads or heads
        branches = (c_abi.Branch * len(segments))(*(c_abi.Branch(w, r) for w, r in zip(segments, dilations)))
        bounds = (ctypes.c_int64 * len(documents))(*documents)
        problem = c_abi.sized(
            c_abi.Problem, batch=1, tokens=tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            branches=branches, branch_count=len(segments), dtype=DTYPES.index(dtype), phase=1 + PHASES.index(phase),
            documents=ctypes.addressof(bounds) if documents else None, document_bounds=len(documents),
            causal=int(causal), gradient=2 if detached else 0)
        options = c_abi.sized(c_abi.Options, instruction_set=kernel.encode(), deterministic=int(deterministic),
                              device=b"cuda")
        self.handle = ctypes.c_void_p()
        self.check(library.annulus_create(ctypes.byref(problem), ctypes.byref(options), ctypes.byref(self.handle)))
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
        self.q, self.k, self.v = tensors or [
            torch.randn(1, tokens, h, head_dim, device="cuda", dtype=kind) for h in (heads, kv_heads, kv_heads)]
        self.out = torch.full_like(self.q, math.nan)
        self.lse = torch.full((1, heads, tokens), math.nan, device="cuda")
        size = ctypes.c_size_t()
        self.check(library.annulus_workspace_bytes(self.handle, 0, ctypes.byref(size)))
        self.workspace_bytes = size.value
        self.workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device="cuda")
        self.flop = 4 * head_dim * count_pairs(documents or (0, tokens), heads, segments, dilations, phase, causal)
        text = ctypes.create_string_buffer(1 << 16)
        self.check(library.annulus_explain(self.handle, text, len(text), None))
        self.explanation = text.value.decode()

        def view(x):
            return c_abi.Tensor(data=x.data_ptr(), dtype=DTYPES.index(dtype), shape=(ctypes.c_int64 * 4)(*x.shape))

        self.view = view
        self.args = c_abi.sized(
            c_abi.ForwardArgs, q=view(self.q), k=view(self.k), v=view(self.v), out=view(self.out),
            lse=self.lse.data_ptr(), lse_count=self.lse.numel(),
            workspace=self.workspace.data_ptr() or None, workspace_bytes=self.workspace_bytes)

    def check(self, status):
        if status:
            raise RuntimeError(self.library.annulus_last_error().decode())

    def __call__(self):
        self.args.stream = self.torch.cuda.current_stream().cuda_stream
        self.check(self.library.annulus_forward(self.handle, ctypes.byref(self.args)))

    def __del__(self):
        if getattr(self, "handle", None):
            self.library.annulus_destroy(self.handle)


def count_pairs(documents, heads, segments, dilations, phase, causal):
    """Pairs of a query and a key that a problem has, of all heads (docs/semantics.md, eq. 1 to 3)."""

    def of_class(length, dilation, which):
        rows = max(0, -(-(length - which) // dilation))
        return rows * (rows + 1) // 2 if causal else rows * rows

    total = 0
    for w, r in zip(segments, dilations):
        taken = {"by_head": [j % r for j in range(heads)], "by_head_block": [j // -(-heads // r) for j in range(heads)],
                 "every": [c for c in range(r) for _ in range(heads)]}[phase]
        for begin, end in zip(documents, documents[1:]):
            whole, rest = divmod(end - begin, w)
            total += sum(whole * of_class(w, r, c) + of_class(rest, r, c) for c in taken)
    return total


class Bench:
    def __init__(self, torch, library, arguments):
        self.torch, self.library, self.arguments = torch, library, arguments
        self.results = []

    def wants(self, name):
        return fnmatch.fnmatchcase(name, self.arguments.only)

    def launch_times(self, call, count):
        """Sorted times of launches back to back, after one that is not counted."""
        torch = self.torch
        call()
        events = [torch.cuda.Event(True) for _ in range(count + 1)]
        for event in events[:-1]:
            event.record()
            call()
        events[-1].record()
        torch.cuda.synchronize()
        return sorted(events[i].elapsed_time(events[i + 1]) for i in range(count))

    def compare(self, name, contenders, flop, **more):
        """Rounds of all contenders in turn, each busy for the same time: a card that draws full power slows down.

        The first one is ours. `flop` of all of them, or of each. Rounds until the card has settled do not count."""
        if not self.wants(name):
            return None
        flops = dict(zip(contenders, flop if isinstance(flop, tuple) else [flop] * len(contenders)))
        once = {key: self.launch_times(call, 1)[0] for key, call in contenders.items()}
        busy_ms = max(self.arguments.busy_ms, LEAST_LAUNCHES * max(once.values()))
        to_settle = math.ceil(SETTLE_MS / (busy_ms * len(contenders)))
        times = {key: [] for key in contenders}
        for number in range(to_settle + self.arguments.rounds):
            for key, call in contenders.items():
                launches = self.launch_times(call, math.ceil(busy_ms / max(once[key], 1e-3)))
                if number >= to_settle:
                    times[key].append(launches[len(launches) // 2])
        median = {key: sorted(values)[len(values) // 2] for key, values in times.items()}
        row = {"name": name, "ms": median, "tflop_per_s": {k: flops[k] / v / 1e9 for k, v in median.items()}, **more}
        ours = next(iter(contenders))
        text = " | ".join(f"{k} {median[k]:.3f} ms {row['tflop_per_s'][k]:.0f}" for k in contenders)
        for key in list(contenders)[1:]:
            row.setdefault("speedup", {})[key] = row["tflop_per_s"][ours] / row["tflop_per_s"][key]
            text += f" | x{row['speedup'][key]:.3f}"
        print(f"{name}: {text}", flush=True)
        self.results.append(row)
        return median

    def forward(self, *args, **kwargs):
        return Forward(self.library, self.torch, *args, **kwargs)

    # ---- Parts

    def dense(self):
        torch = self.torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        for head_dim in (128, 64):
            for rows in (2048, 16384):
                for causal in (False, True):
                    q, k, v = [torch.randn(16384 // rows, HEADS, rows, head_dim, device="cuda", dtype=torch.bfloat16)
                               for _ in range(3)]

                    def peer():
                        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

                    for dilation, phase in ((1, "every"), (2, "every"), (4, "every"), (16, "every"), (4, "by_head"),
                                            (16, "by_head")):
                        ours = self.forward(16384 * dilation, head_dim, [rows * dilation], [dilation], causal=causal,
                                            phase=phase)
                        name = f"dense d{head_dim} m{rows} r{dilation}{' causal' if causal else ''}"
                        with torch.no_grad():
                            if dilation == 1:
                                self.check_dense(ours, rows, peer, (q, k, v))
                            flop = 4 * head_dim * HEADS * 16384 * (rows + 1 if causal else 2 * rows) / 2
                            self.compare(name + (" one class a head" if phase == "by_head" else ""),
                                         {"annulus": ours, "cudnn": peer}, (ours.flop, flop))

    def check_dense(self, ours, rows, peer, tensors):
        for to, tensor in zip((ours.q, ours.k, ours.v), tensors):
            to.copy_(tensor.transpose(1, 2).reshape(to.shape))
        ours()
        theirs = peer().transpose(1, 2).reshape(ours.out.shape)
        difference = (ours.out.float() - theirs.float()).norm() / theirs.float().norm()
        assert difference < 6e-3, f"differs from cuDNN by {difference}"

    def patterns(self):
        torch = self.torch
        for head_dim in (128, 64):
            for causal in (False, True):
                for label, (segments, dilations) in (("2 branches", TWO), ("5 branches", FIVE)):
                    ours = self.forward(1 << 19, head_dim, segments, dilations, causal=causal, phase="by_head_block")
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()

                    def peer():
                        return composed(torch, ours.q, ours.k, ours.v, segments, dilations, causal)

                    with torch.no_grad():
                        theirs = peer()
                        peer_bytes = torch.cuda.max_memory_allocated() - before - theirs.nbytes
                        ours()
                        difference = (ours.out - theirs).float().norm() / theirs.float().norm()
                        del theirs
                        assert difference < 2e-2, f"differs from the composed version by {difference}"
                        self.compare(f"512K d{head_dim} {label}{' causal' if causal else ''}",
                                     {"annulus": ours, "composed": peer}, ours.flop,
                                     workspace_bytes=ours.workspace_bytes, composed_bytes=peer_bytes,
                                     plan=ours.explanation)
                    print("   " + ours.explanation.replace("\n", "; "), "workspace", ours.workspace_bytes >> 20, "MiB,",
                          "composed", peer_bytes >> 20, "MiB", flush=True)
                    by_head = self.forward(1 << 19, head_dim, segments, dilations, causal=causal,
                                           tensors=(ours.q, ours.k, ours.v))
                    self.compare(f"512K d{head_dim} {label}{' causal' if causal else ''} by_head", {"annulus": by_head},
                                 by_head.flop)

    def general(self):
        tokens, dividing = 1 << 18, ([2048, 8192], [1, 4])
        cases = {
            "not dividing": ((tokens - 1021, [2047, 8188], [1, 4]), {}),
            "not nesting": ((tokens, [2048, 8999], [1, 4]), {}),
            "head blocks": ((tokens, *dividing), {"phase": "by_head_block"}),
            "every class": ((tokens, *dividing), {"phase": "every"}),
            "4 key/value heads": ((tokens, *dividing), {"kv_heads": 4}),
            "documents": ((tokens, *dividing), {"documents": [0, 1 << 15, 100000, 100001, 180000, tokens]}),
        }
        for head_dim in (128, 64):
            for causal in (False, True):
                base = self.forward(tokens, head_dim, *dividing, causal=causal)
                for name, ((length, segments, dilations), more) in cases.items():
                    call = self.forward(length, head_dim, segments, dilations, causal=causal, **more)
                    self.compare(f"general d{head_dim}{' causal' if causal else ''} {name}",
                                 {"annulus": call, "dividing": base}, (call.flop, base.flop))

    def length(self):
        for tokens in (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 23):
            call = self.forward(tokens, 64, *TWO, heads=8)
            self.compare(f"length {tokens} d64 h8", {"annulus": call}, call.flop, tokens=tokens)
            del call
            self.torch.cuda.empty_cache()

    def fp32(self):
        torch = self.torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        for head_dim in (64, 128):
            q, k, v = [torch.randn(1, HEADS, 8192, head_dim, device="cuda") for _ in range(3)]

            def peer():
                with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                    return torch.nn.functional.scaled_dot_product_attention(q, k, v)

            ours = self.forward(8192, head_dim, [8192], [1], dtype="fp32")
            with torch.no_grad():
                self.compare(f"fp32 d{head_dim} 8192", {"annulus": ours, "torch": peer}, ours.flop)
            generic = self.forward(8192, head_dim, [8192], [1], kernel="mma")
            self.compare(f"bf16 d{head_dim} 8192 kernel mma", {"annulus": generic}, generic.flop)


def composed(torch, q, k, v, segments, dilations, causal):
    """What a user would write: views, cuDNN for each branch, a merge by the softmax denominators (head blocks)."""
    batch, tokens, heads, head_dim = q.shape
    outs, lses = [], []
    for w, r in zip(segments, dilations):
        count, block = tokens // w, heads // r if heads >= r else 1

        def cut(t):
            t = t.view(batch, count, w // r, r, r, block, head_dim)
            return (torch.diagonal(t, dim1=3, dim2=4).permute(0, 1, 2, 5, 3, 4)
                    .reshape(batch * count, w // r, heads, head_dim).transpose(1, 2))

        result = torch.ops.aten._scaled_dot_product_cudnn_attention(cut(q), cut(k), cut(v), None, True, 0.0, causal, False)
        a, l = result[0], result[1].squeeze(-1)
        out = torch.zeros(batch, count, w // r, r, r, block, head_dim, device=q.device, dtype=q.dtype)
        torch.diagonal(out, dim1=3, dim2=4).copy_(
            a.transpose(1, 2).reshape(batch, count, w // r, r, block, head_dim).permute(0, 1, 2, 4, 5, 3))
        lse = torch.full((batch, count, w // r, r, r, block), -1e8, device=q.device)
        torch.diagonal(lse, dim1=3, dim2=4).copy_(
            l.transpose(1, 2).reshape(batch, count, w // r, r, block).permute(0, 1, 2, 4, 3))
        outs.append(out.view(batch, tokens, heads, head_dim))
        lses.append(lse.view(batch, tokens, heads))
    weights = torch.softmax(torch.stack(lses), 0).to(q.dtype)
    return sum(weights[i].unsqueeze(-1) * outs[i] for i in range(len(outs)))


def find_torch():
    """torch with a GPU; None where there is none, and the reason is printed."""
    try:
        import torch
    except ImportError:
        print("Skipped: no torch in this python3; the peer is PyTorch's cuDNN attention")
        return None
    if not torch.cuda.is_available():
        print("Skipped: torch sees no GPU here")
        return None
    return torch


def main(kind=Bench, parts=("dense", "patterns", "general", "length", "fp32"), text=__doc__):
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True, help="libannulus.so, with libannulus_cuda.so beside it")
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--busy-ms", type=float, default=120)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", metavar="PATTERN", default="*", help="rows with such names, such as '*d64 m2048 r1'")
    parser.add_argument("--times", type=int, default=1, help="measure each part so often")
    parser.add_argument("parts", nargs="*", default=[])
    arguments = parser.parse_args()
    torch = find_torch()
    if not torch:
        return 0
    library = c_abi.load_library(arguments.library)
    properties = torch.cuda.get_device_properties(0)
    device = (f"{properties.name}, sm_{properties.major}{properties.minor}, "
              f"{properties.multi_processor_count} multiprocessors")
    bench = kind(torch, library, arguments)
    print(device, "torch", torch.__version__, "cuDNN", torch.backends.cudnn.version(), flush=True)
    for part in [part for part in arguments.parts or parts for _ in range(arguments.times)]:
        getattr(bench, part)()
        torch.cuda.empty_cache()
        if arguments.json:  # as far as it has come
            report = {"environment": {"device": device, "torch": torch.__version__,
                                      "cudnn": torch.backends.cudnn.version()},
                      "busy_ms": arguments.busy_ms, "rounds": arguments.rounds, "results": bench.results}
            pathlib.Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
