"""One rank of a job of ranks_test.py: `ranks_worker.py CASE`. What one rank alone computes is computed here too, on
every rank, and compared."""

import copy
import datetime
import gc
import io
import os
import signal
import sys
import threading
import time
import weakref

import torch
import torch.distributed as dist

import annulus

PATTERN = {"segment_lengths": [16, 50, 101], "dilation_rates": [1, 2, 5]}
TOKENS = 101


def uneven(ranks):
    """Some ranks have little, and with three or more one has nothing."""
    lengths = [7, 0, 31, TOKENS][:ranks]
    lengths[-1] = TOKENS - sum(lengths[:-1])
    return lengths


def rest(ranks, layout):
    return [annulus.positions(TOKENS, rank=rank, ranks=ranks, layout=layout).numel() for rank in range(ranks)]


def shardings(ranks):
    even = rest(ranks, "contiguous")
    yield from (("contiguous", even), ("contiguous", uneven(ranks)))
    yield from ((layout, rest(ranks, layout)) for layout in ("zigzag", "striped"))


class Model(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            annulus.MultiheadDilatedAttention(
                24, 4, *PATTERN.values(), num_kv_heads=2, causal=True, rotary="xpos", layer_norm=True, **options
            )
            for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def two_layer_model(group, rank, ranks):
    """Loss and gradients of a model over ranks are those of one rank."""
    torch.manual_seed(0)
    alone, whole, weight = Model(), torch.randn(2, TOKENS, 24), torch.randn(2, TOKENS, 24)
    expected = (alone(whole) * weight).square().sum()
    expected.backward()
    worst = 0.0
    for layout, lengths in shardings(ranks):
        shared = {"layout": layout, "shard_lengths": lengths}
        model = Model(group=group, **shared)
        model.load_state_dict(alone.state_dict())
        mine, my_weight = (annulus.shard(x, group, **shared) for x in (whole, weight))
        loss = (model(mine) * my_weight).square().sum()
        loss.backward()
        dist.all_reduce(loss := loss.detach())
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            dist.all_reduce(ours.grad)
            worst = max(worst, ((ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max()).item())
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5 * theirs.grad.abs().max().item())
    if rank == 0:
        print(f"two_layer_model: {ranks} ranks, largest relative difference of a gradient {worst:.1e}")


def attend(q, k, v, dout, **options):
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out, lse = annulus.dilated_attention(*inputs, **PATTERN, return_lse=True, **options)
    return out.detach(), lse, *torch.autograd.grad(out, inputs, dout)


def every_strategy(group, rank, ranks):
    """Each strategy, type and gradient gives one rank's rows; reproducible mode its bits, in fp32."""
    torch.manual_seed(1)
    q, k, v, dout = (torch.randn(1, TOKENS, heads, 8) for heads in (4, 2, 2, 4))
    shared = {"layout": "contiguous", "shard_lengths": uneven(ranks)}
    cases = [{"strategy": name} for name in ("auto", "exchange", "reshard", "ring", "gather")]
    cases += [{"preset": "torchscale"}, {"cu_seqlens": [0, 40, 40, TOKENS], "causal": True}, {"reproducible": True}]
    for options in cases:
        for dtype in (torch.float32, torch.bfloat16):
            tensors = [x.to(dtype) for x in (q, k, v, dout)]
            alone = attend(
                *tensors, **{name: x for name, x in options.items() if name not in ("strategy", "reproducible")}
            )
            mine = attend(*(annulus.shard(x, group, **shared) for x in tensors), group=group, **shared, **options)
            for name, ours, theirs in zip(("out", "lse", "dq", "dk", "dv"), mine, alone, strict=True):
                theirs = annulus.shard(theirs, group, dim=2 if name == "lse" else 1, **shared)
                if "reproducible" in options and dtype == torch.float32:
                    assert torch.equal(ours, theirs), (name, options, dtype)
                close = {"rtol": 0, "atol": 1e-4 if dtype == torch.float32 else 0.1}
                torch.testing.assert_close(
                    ours, theirs, **close, msg=lambda text, n=name, o=options: f"{n} {o}: {text}"
                )
    # All ranks have the same out, and get the same dout back: dq is whole on all of them.
    own_keys = [annulus.shard(x, group, **shared) for x in (k, v)]
    mine = attend(q, *own_keys, dout, group=group, strategy="replicated", **shared)
    for name, ours, theirs in zip(("out", "lse", "dq", "dk", "dv"), mine, attend(q, k, v, dout), strict=True):
        theirs = annulus.shard(theirs, group, **shared) if name in ("dk", "dv") else theirs
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4, msg=lambda text, n=name: f"replicated {n}: {text}")


def helpers(group, rank, ranks):
    whole = torch.randn(2, TOKENS, 3, generator=torch.Generator().manual_seed(2))
    for layout, lengths in shardings(ranks):
        shared = {"layout": layout, "shard_lengths": lengths}
        places = annulus.positions(TOKENS, group, **shared)
        mine = annulus.shard(whole, group, **shared)
        assert torch.equal(mine, whole[:, places])
        mine = mine.detach().clone().requires_grad_()
        again = annulus.unshard(mine, group, **shared)
        assert torch.equal(again, whole)
        (again * (rank + 1)).sum().backward()  # the loss is the sum over ranks: 1 + 2 + ... + p a row
        assert torch.equal(mine.grad, torch.full_like(mine, ranks * (ranks + 1) / 2))
        assert torch.equal(
            annulus.shard(whole.transpose(0, 1), group, dim=0, **shared), whole[:, places].transpose(0, 1)
        )


def plan_and_refusals(group, rank, ranks):
    """What `plan` foresees is what the ranks then know; a mistake that one rank can see alone is a ValueError."""
    from annulus._groups import group_of
    from annulus._handles import Sizes
    from annulus._spec import make_spec

    options = {"shard_lengths": uneven(ranks), "causal": True}
    foreseen = annulus.plan(TOKENS, 4, 8, *PATTERN.values(), ranks=ranks, rank=rank, **options)
    if ranks > 1:
        spec = make_spec(*PATTERN.values(), group=group.group_name, **options)
        handle = group_of(group.group_name).handle(spec, Sizes(1, TOKENS, 4, 4, 8), torch.float32, torch.device("cpu"))
        for which, each in enumerate((foreseen.forward, foreseen.backward)):
            assert each.memory == handle.memory(which)
            assert (each.sent_bytes, each.received_bytes) == handle.traffic(which)
    x = torch.randn(1, uneven(ranks)[rank] + 1, 2, 8)
    for wrong in ([1] * (ranks + 1), [TOKENS] * ranks):
        refused(ValueError, "shard_lengths", x, [8], [1], shard_lengths=wrong)
    if ranks > 1:
        refused(NotImplementedError, "float64", x.double(), [8], [1])
        refused(ValueError, "one of them", x, [8], [1], segment_length=[8])
        alone = dist.new_group([ranks - 1])
        if rank != ranks - 1:
            for call in (
                lambda: annulus.dilated_attention(x, x, x, [8], [1], group=alone),
                lambda: annulus.shard(x, alone),
                lambda: annulus.unshard(x, alone),
                lambda: annulus.positions(5, alone),
            ):
                expect(ValueError, call, "not in")


def refused(error, word, x, *pattern, **options):
    """On every rank, in a group of its own: what is wrong on one rank ends the group for all."""
    passing = dist.new_group(list(range(dist.get_world_size())))
    expect(error, lambda: annulus.dilated_attention(x, x, x, *pattern, group=passing, **options), word)
    dist.barrier()


def expect(kind, call, *parts):
    try:
        call()
    except kind as error:
        assert all(part in str(error) for part in parts), (parts, str(error))
        return
    raise AssertionError(f"no {kind.__name__} with {parts}")


def names_and_copies(group, rank, ranks):
    """Groups by name and as a mesh; modules keep a name, so they can be copied, pickled, and outlived by nothing."""
    x = torch.randn(1, 5, 24, generator=torch.Generator().manual_seed(rank))
    name, mesh = group.group_name, dist.init_device_mesh("cpu", (ranks,))
    assert torch.equal(annulus.unshard(x, name), annulus.unshard(x, mesh))
    assert torch.equal(annulus.positions(5 * ranks, name), annulus.positions(5 * ranks, group))
    heads = x.unflatten(-1, (4, 6))
    expected = annulus.dilated_attention(heads, heads, heads, **PATTERN, group=group)
    for each in (name, mesh):
        assert torch.equal(annulus.dilated_attention(heads, heads, heads, **PATTERN, group=each), expected)
    model = Model(group=group)
    expected = model(x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for again in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert again.layers[0].group is group and torch.equal(again(x), expected)
    attention = copy.deepcopy(annulus.DilatedAttention(*PATTERN.values(), group=group))
    assert attention.group is group and attention(heads, heads, heads).shape == heads.shape
    passing = dist.new_group(list(range(ranks)))
    kept, seen, name = Model(group=passing), weakref.ref(passing), passing.group_name
    assert torch.equal(kept(x), kept(x))
    dist.barrier()
    dist.destroy_process_group(passing)
    del passing
    assert seen() is None
    expect(ValueError, lambda: kept(x), name, "destroyed")


def compiled(group, rank, ranks):
    """No graph breaks with a group, and the same numbers."""
    torch.manual_seed(3)
    lengths = uneven(ranks)
    model, x = Model(group=group, shard_lengths=lengths), torch.randn(1, lengths[rank], 24)
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    gradients = []
    for each in (model, fast):
        model.zero_grad()
        each(x).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for eager, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)


def groups_end(group, rank, ranks):
    """A process group that is destroyed is gone, and all that was made for it: its threads must not outlive it."""
    threads = threading.active_count()
    for _ in range(3):
        passing = dist.new_group(list(range(ranks)))
        x = torch.randn(1, 6, 2, 8)
        annulus.dilated_attention(x, x, x, [64], [1], group=passing)
        seen = weakref.ref(passing)
        dist.destroy_process_group(passing)
        del passing
        assert seen() is None
        assert threading.active_count() <= threads, threading.enumerate()  # at once: Python may end now


def all_right(group, rank, ranks):
    for case in (helpers, plan_and_refusals, names_and_copies, two_layer_model, every_strategy, compiled, groups_end):
        case(group, rank, ranks)
    subgroup = dist.new_group(list(range(ranks)))  # another group in the same process
    x = torch.randn(1, 6, 2, 8, generator=torch.Generator().manual_seed(rank))
    out = annulus.dilated_attention(x, x, x, [64], [1], group=subgroup)
    assert torch.equal(out, annulus.dilated_attention(x, x, x, [64], [1], group=group))
    print(f"rank {rank} of {ranks}: all right", flush=True)


def expect_transport_error(call, *parts):
    begin = time.monotonic()
    try:
        call()
    except annulus.TransportError as error:
        seconds = time.monotonic() - begin
        print(f"rank {dist.get_rank()}: after {seconds:.1f} s: {error}", flush=True)
        assert all(part in str(error) for part in parts), (parts, str(error))
        return
    raise AssertionError(f"no TransportError with {parts}")


def disagreement(group, rank, ranks):
    x = torch.randn(1, 20, 2, 8)
    expect_transport_error(
        lambda: annulus.dilated_attention(x, x, x, [64], [1], group=group, causal=rank == 1), "causal", "rank 1"
    )


def other_calls(group, rank, ranks):
    """Both plans are known to all ranks, and then they run different ones."""
    x = torch.randn(1, 20, 2, 8)

    def attend_in(segment):
        return annulus.dilated_attention(x, x, x, [segment], [1], group=group, strategy="exchange")

    attend_in(64), attend_in(48)
    expect_transport_error(lambda: attend_in(64 if rank == 0 else 48), "disagree", "bytes at step")


def bad_argument(group, rank, ranks):
    """One rank's own mistake, found before anything is sent, reaches the others at once."""
    x = torch.randn(1, 20, 2, 8)
    if rank == 1:
        try:
            annulus.dilated_attention(x, x, x, [0], [1], group=group)
        except ValueError as error:
            print(f"rank 1: {error}", flush=True)
    else:
        expect_transport_error(
            lambda: annulus.dilated_attention(x, x, x, [64], [1], group=group), "rank 1 gave up", "at least 1"
        )


def bad_tensors(group, rank, ranks):
    """So does one that the package sees before the library does."""
    x = torch.randn(1, 20, 2, 8)
    if rank == 1:
        expect(ValueError, lambda: annulus.dilated_attention(x, x.half(), x, [64], [1], group=group), "one type")
    else:
        expect_transport_error(
            lambda: annulus.dilated_attention(x, x, x, [64], [1], group=group), "rank 1 gave up", "one type"
        )


def no_memory(group, rank, ranks):
    """And one in the middle of a training step."""
    from annulus._handles import Handle

    def none_left(self, which, device):
        raise MemoryError("no room")

    x = torch.randn(1, 20, 2, 8, requires_grad=True)
    loss = annulus.dilated_attention(x, x, x, [64], [1], group=group).sum()
    room = Handle._room
    if rank == 1:
        Handle._room = none_left
        expect(MemoryError, loss.backward, "no room")
        Handle._room = room
    else:
        expect_transport_error(loss.backward, "rank 1 gave up", "no room")


def uneven_rows(group, rank, ranks):
    """Without shard_lengths ranks take it that all have as many rows; the error says so."""
    x = torch.randn(1, 20 + rank, 2, 8)
    expect_transport_error(lambda: annulus.dilated_attention(x, x, x, [64], [1], group=group), "give shard_lengths")


def callback_exception(group, rank, ranks):
    """An exception inside a callback comes out with its text, on the rank itself and on the others."""
    from annulus._groups import group_of

    x = torch.randn(1, 20, 2, 8)
    annulus.dilated_attention(x, x, x, [64], [1], group=group)
    if rank == 1:

        def broken(exchange):
            raise OSError("the network cable is out")

        group_of(group.group_name)._courier.post = broken
    expect_transport_error(
        lambda: annulus.dilated_attention(x, x, x, [64], [1], group=group), "rank 1 gave up", "the network cable is out"
    )
    # The group is of no more use, and says so.
    expect_transport_error(lambda: annulus.dilated_attention(x, x, x, [64], [1], group=group), "network cable")


def train_until(group, last):
    torch.manual_seed(0)
    model = Model(group=group)
    x = torch.randn(1, 40, 24)
    for step in range(1000):
        if step == 3:
            last()
        model(x).square().sum().backward()


def stopped(group, rank, ranks):
    def last():
        if rank == ranks - 1:
            time.sleep(8)  # twice the timeout of the group
            raise annulus.TransportError("the rank that slept: lost")

    expect_transport_error(lambda: train_until(group, last), "lost")


def killed(group, rank, ranks):
    def last():
        if rank == ranks - 1:
            print(f"rank {rank}: done with {killed.__name__}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    expect_transport_error(lambda: train_until(group, last), f"rank {ranks - 1}", "lost")


def all_wrong(world, rank, ranks):
    """A group fails and harms nothing else in the process: each case has one of its own. The last one ends a rank."""
    mistakes = (disagreement, other_calls, bad_argument, bad_tensors, no_memory, uneven_rows)
    for case in (*mistakes, callback_exception, stopped, killed):
        seconds = 4 if case is stopped else 120
        group = dist.new_group(list(range(ranks)), timeout=datetime.timedelta(seconds=seconds))
        case(group, rank, ranks)
        print(f"rank {rank}: done with {case.__name__}", flush=True)
        if case is killed:
            os._exit(0)  # a world that has lost a rank cannot be taken down in order
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == ranks


def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    globals()[sys.argv[1]](dist.group.WORLD, rank, ranks)
    print(f"rank {rank}: done", flush=True)
    world = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    gc.collect()
    assert world() is None, "threads of gloo's that outlive their group may take the process down when Python ends"


if __name__ == "__main__":
    main()
