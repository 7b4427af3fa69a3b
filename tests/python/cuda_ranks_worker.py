"""One rank of a job of cuda_test.py: `cuda_ranks_worker.py CASE BACKEND PAYLOAD`. All ranks share one GPU, which NCCL
takes for several where every process says that it is on a host of its own."""

import datetime
import os
import signal
import sys
import time

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CASE, BACKEND, PAYLOAD = sys.argv[1:4]
if PAYLOAD == "nccl":
    os.environ |= {"NCCL_HOSTID": f"annulus-{RANK}", "NCCL_SOCKET_IFNAME": "lo"}

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import annulus  # noqa: E402

PATTERN = {"segment_lengths": [64, 200, 701], "dilation_rates": [1, 2, 5]}
TOKENS, UNEVEN = 701, [311, 390]
TIMEOUT_SECONDS = 24


class Model(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            annulus.MultiheadDilatedAttention(
                256, 4, *PATTERN.values(), num_kv_heads=2, causal=True, rotary="rotary", **options
            )
            for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def sum_over_ranks(x, control):
    """Through the host: NCCL itself is left to Annulus here."""
    total = x.detach().cpu()
    dist.all_reduce(total, group=control)
    return total


def two_layer_model(group, control):
    """Loss and gradients of a model over ranks are those of one rank."""
    torch.manual_seed(0)
    alone = Model().cuda()
    whole, weight = (torch.randn(2, TOKENS, 256, device="cuda") for _ in range(2))
    expected = (alone(whole) * weight).square().sum()
    expected.backward()
    worst = 0.0
    even = [annulus.positions(TOKENS, rank=rank, ranks=RANKS, layout="zigzag").numel() for rank in range(RANKS)]
    for layout, lengths in (("contiguous", UNEVEN), ("zigzag", even)):
        shared = {"layout": layout, "shard_lengths": lengths}
        model = Model(group=group, **shared).cuda()
        model.load_state_dict(alone.state_dict())
        mine, my_weight = (annulus.shard(x, group, **shared) for x in (whole, weight))
        loss = (model(mine) * my_weight).square().sum()
        loss.backward()
        torch.testing.assert_close(sum_over_ranks(loss, control), expected.detach().cpu(), rtol=1e-4, atol=0)
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            gradient, exact = sum_over_ranks(ours.grad, control), theirs.grad.cpu()
            worst = max(worst, ((gradient - exact).abs().max() / exact.abs().max()).item())
    assert worst < 1e-3, worst
    print(f"rank {RANK}: largest relative difference of a gradient {worst:.1e}", flush=True)


def every_strategy(group):
    """bf16 on a stream of its own, each strategy, uneven shards: one rank's rows."""
    torch.manual_seed(1)
    q, k, v, dout = (torch.randn(1, TOKENS, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))

    def attend(tensors, **options):
        inputs = [x.detach().clone().requires_grad_() for x in tensors[:3]]
        out = annulus.dilated_attention(*inputs, **PATTERN, **options)
        return out.detach(), *torch.autograd.grad(out, inputs, tensors[3])

    shared = {"shard_lengths": UNEVEN}
    alone = [annulus.shard(x, group, **shared) for x in attend((q, k, v, dout))]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for strategy in ("auto", "exchange", "reshard", "ring", "gather"):
        with torch.cuda.stream(stream):
            late = [annulus.shard(x, group, **shared) * 1 for x in (q, k, v, dout)]
            mine = attend(late, group=group, strategy=strategy, **shared)
        torch.cuda.current_stream().wait_stream(stream)
        for ours, theirs in zip(mine, alone, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0.03 * theirs.abs().max().item())


def plan(group):
    """What is foreseen is what the ranks then hold."""
    from annulus._groups import group_of
    from annulus._handles import Sizes
    from annulus._spec import make_spec

    kind = {"dtype": torch.bfloat16, "device": "cuda"}
    foreseen = annulus.plan(TOKENS, 4, 64, *PATTERN.values(), ranks=RANKS, rank=RANK, shard_lengths=UNEVEN, **kind)
    spec = make_spec(*PATTERN.values(), group=group.group_name, shard_lengths=UNEVEN)
    sizes, device = Sizes(1, TOKENS, 4, 4, 64), torch.device("cuda", 0)
    handle = group_of(group.group_name).handle(spec, sizes, torch.bfloat16, device)
    assert f"payload by {PAYLOAD}" in handle.explain(), handle.explain()  # as the ranks have decided on their own
    for which, each in enumerate((foreseen.forward, foreseen.backward)):
        assert each.memory == handle.memory(which)
        assert (each.sent_bytes, each.received_bytes) == handle.traffic(which)


def all_right(group, control):
    two_layer_model(group, control)
    every_strategy(group)
    plan(group)
    print(f"rank {RANK} of {RANKS}: all right", flush=True)


def all_wrong(group, control):
    """Ranks that disagree, in a group of their own; then a rank that is killed."""
    x = torch.randn(1, 100, 2, 64, device="cuda", dtype=torch.bfloat16)
    other = dist.new_group(list(range(RANKS)), backend="gloo", timeout=datetime.timedelta(seconds=TIMEOUT_SECONDS))
    expect_error(lambda: annulus.dilated_attention(x, x, x, [64], [1], group=other, causal=RANK == 1), "causal")
    for step in range(1000):
        if step == 3 and RANK == RANKS - 1:
            print(f"rank {RANK}: done", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 3:
            expect_error(lambda: train(x, group), f"rank {RANKS - 1}", "lost")
            expect_error(lambda: train(x, group), "lost")  # and says so again
            break
        train(x, group)
    print(f"rank {RANK}: done", flush=True)
    os._exit(0)  # a world that has lost a rank cannot be taken down in order


def train(x, group):
    x = x.detach().requires_grad_()
    annulus.dilated_attention(x, x, x, [64, 200], [1, 2], group=group).square().sum().backward()


def expect_error(call, *parts):
    begin = time.monotonic()
    try:
        call()
    except annulus.TransportError as error:
        print(f"rank {RANK}: after {time.monotonic() - begin:.1f} s: {error}", flush=True)
        assert all(part in str(error) for part in parts), (parts, str(error))
        return
    raise AssertionError(f"no TransportError with {parts}")


def main():
    torch.cuda.set_device(0)
    dist.init_process_group(BACKEND, timeout=datetime.timedelta(seconds=TIMEOUT_SECONDS))
    control = dist.new_group(list(range(RANKS)), backend="gloo")
    globals()[CASE](dist.group.WORLD, control)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
