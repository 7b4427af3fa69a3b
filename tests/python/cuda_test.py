"""On a GPU, against the CPU. A build or a device that cannot say so is skipped with its own words."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import annulus

PATTERN = {"segment_lengths": [64, 300], "dilation_rates": [1, 4]}


def unavailable() -> str:
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    try:
        annulus.plan(300, 4, 64, *PATTERN.values(), dtype=torch.bfloat16, device="cuda")
    except RuntimeError as error:
        return str(error)
    return ""


REASON = unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON or "never")


def tensors(dtype, heads=4, kv_heads=4, head_dim=64, tokens=300):
    return [torch.randn(2, tokens, each, head_dim, device="cuda", dtype=dtype) for each in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 128])
def test_forward(dtype, causal, head_dim):
    q, k, v = tensors(dtype, kv_heads=2, head_dim=head_dim)
    out, lse = annulus.dilated_attention(q, k, v, **PATTERN, causal=causal, return_lse=True)
    wide = [x.cpu().float() for x in (q, k, v)]
    expected, expected_lse = annulus.dilated_attention(*wide, **PATTERN, causal=causal, return_lse=True)
    assert out.device.type == "cuda" and out.dtype == dtype
    torch.testing.assert_close(out.cpu().float(), expected, rtol=0, atol=2e-2 if dtype != torch.float32 else 1e-4)
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=0, atol=1e-2 if dtype != torch.float32 else 1e-4)


def test_views_are_read_where_they_lie():
    packed = torch.randn(2, 300, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    views = [packed[:, :, i] for i in range(3)]
    assert torch.equal(
        annulus.dilated_attention(*views, **PATTERN),
        annulus.dilated_attention(*(x.contiguous() for x in views), **PATTERN),
    )


def test_the_current_stream_is_used():
    q, k, v = tensors(torch.bfloat16)
    expected = annulus.dilated_attention(q, k, v, **PATTERN)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = q * 1  # in order behind this on the same stream, or wrong
        out = annulus.dilated_attention(late, k, v, **PATTERN)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(out, expected)


def test_memory_is_that_of_the_plan():
    q, k, v = tensors(torch.bfloat16, tokens=100_003, heads=8, kv_heads=8)
    annulus.dilated_attention(q, k, v, **PATTERN)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    requested = "requested_bytes.all."  # what was asked for; torch may hand out blocks that are a little larger
    before = torch.cuda.memory_stats()[requested + "current"]
    annulus.dilated_attention(q, k, v, **PATTERN)
    torch.cuda.synchronize()
    taken = torch.cuda.memory_stats()[requested + "peak"] - before
    plan = annulus.plan(100_003, 8, 64, *PATTERN.values(), batch=2, dtype=torch.bfloat16, device="cuda").forward
    new = plan.memory["out"] + plan.memory["lse"] + plan.workspace_bytes
    assert taken == new


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("gradient", ["exact", "detached"])
def test_backward(dtype, head_dim, gradient):
    options = {**PATTERN, "causal": True, "gradient": gradient}
    q, k, v = (x.requires_grad_() for x in tensors(dtype, kv_heads=2, head_dim=head_dim))
    out = annulus.dilated_attention(q, k, v, **options)
    dout = torch.randn_like(out)
    ours = torch.autograd.grad(out, (q, k, v), dout)
    wide = [x.detach().cpu().float().requires_grad_() for x in (q, k, v)]
    exact = torch.autograd.grad(annulus.dilated_attention(*wide, **options), wide, dout.cpu().float())
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}[dtype]
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a.cpu().float(), b, rtol=0, atol=tolerance * b.abs().max().item())


def test_deterministic_gradients_repeat():
    q, k, v = (x.requires_grad_() for x in tensors(torch.bfloat16, tokens=5000))
    pattern = {"segment_lengths": [512, 5000], "dilation_rates": [1, 4]}
    dout = torch.randn_like(q)
    for deterministic, everywhere in (True, False), (False, True):
        torch.use_deterministic_algorithms(everywhere)
        try:
            runs = []
            for _ in range(3):
                out = annulus.dilated_attention(q, k, v, **pattern, deterministic=deterministic)
                runs.append(torch.autograd.grad(out, (q, k, v), dout))
        finally:
            torch.use_deterministic_algorithms(False)
        for run in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_double_is_refused():
    q = torch.randn(1, 8, 1, 8, device="cuda", dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="CPU"):
        annulus.dilated_attention(q, q, q, [8], [1])


def test_compile():
    q, k, v = tensors(torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q: annulus.dilated_attention(q * 2, k, v, **PATTERN), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(q), annulus.dilated_attention(q * 2, k, v, **PATTERN))


WORKER = str(pathlib.Path(__file__).with_name("cuda_ranks_worker.py"))
RANKS, LIMIT_SECONDS = 2, 100
needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no torch.distributed with gloo"
)
with_nccl = pytest.param(
    "nccl",
    "nccl",
    marks=pytest.mark.skipif(not (dist.is_available() and dist.is_nccl_available()), reason="this torch has no NCCL"),
)
ways = pytest.mark.parametrize(("backend", "payload"), [("gloo", "staged"), with_nccl])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@needs_gloo
@ways
def test_ranks_give_what_one_rank_gives(backend, payload):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), WORKER, "all_right", backend, payload]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(RANKS):
        assert f"rank {rank} of {RANKS}: all right" in done.stdout
    print(done.stdout)


@needs_gloo
@ways
def test_trouble_is_an_error_and_never_a_hang(backend, payload):
    """Without torchrun, which ends the other rank itself as soon as one is killed."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
    jobs = [
        subprocess.Popen(
            [sys.executable, WORKER, "all_wrong", backend, payload],
            env={**os.environ, **place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        outputs = [job.communicate(timeout=LIMIT_SECONDS) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    for rank, (job, (out, errors)) in enumerate(zip(jobs, outputs, strict=True)):
        print(out)
        assert job.returncode == (-9 if rank == RANKS - 1 else 0), f"rank {rank}:\n{out}\n{errors}"
        assert f"rank {rank}: done" in out
