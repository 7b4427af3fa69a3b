"""plan and positions without ranks, and what the package says about itself."""

import subprocess
import sys

import pytest
import torch

import annulus

SIZES = {"tokens": 1000, "heads": 4, "head_dim": 16, "segment_lengths": [64, 500], "dilation_rates": [1, 4]}


def test_tensors_to_the_byte():
    plan = annulus.plan(**SIZES, batch=2, kv_heads=2, dtype=torch.bfloat16)
    of_q, of_k, of_lse = 2 * 1000 * 4 * 16 * 2, 2 * 1000 * 2 * 16 * 2, 2 * 1000 * 4 * 4
    tensors = {"q": of_q, "k": of_k, "v": of_k, "out": of_q, "lse": of_lse}
    assert {name: plan.forward.memory[name] for name in tensors} == tensors
    assert plan.forward.bytes == sum(tensors.values()) + plan.forward.workspace_bytes
    assert plan.backward.memory["dq"] == of_q and plan.backward.memory["dk"] == of_k
    assert plan.forward.sent_bytes == plan.backward.received_bytes == 0
    assert "segment 500, dilation 4" in str(plan) and "backward:" in str(plan)


def test_workspace_does_not_grow_with_tokens():
    longer = annulus.plan(**{**SIZES, "tokens": 1_000_000})
    assert longer.forward.workspace_bytes == annulus.plan(**{**SIZES, "tokens": 10_000}).forward.workspace_bytes


def test_ranks_share_and_what_is_sent_is_received():
    plans = [annulus.plan(**SIZES, ranks=4, rank=rank, layout="zigzag", causal=True) for rank in range(4)]
    assert sum(plan.forward.memory["q"] for plan in plans) == annulus.plan(**SIZES).forward.memory["q"]
    for which in ("forward", "backward"):
        passes = [getattr(plan, which) for plan in plans]
        assert sum(each.sent_bytes for each in passes) == sum(each.received_bytes for each in passes) > 0
    assert "4 ranks, layout zigzag" in str(plans[0])


def test_a_billion_tokens_on_many_ranks():
    plan = annulus.plan(
        1 << 30, 16, 128, [2048, 1 << 20], [1, 16], dtype=torch.bfloat16, ranks=1024, rank=511, strategy="exchange"
    )
    assert plan.forward.memory["q"] == (1 << 20) * 16 * 128 * 2


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("ranks", [1, 3, 7, 20])
def test_positions_are_everybodys_once(layout, ranks):
    shards = [annulus.positions(13, rank=rank, ranks=ranks, layout=layout) for rank in range(ranks)]
    assert sorted(torch.cat(shards).tolist()) == list(range(13))


def test_positions_of_given_lengths():
    assert annulus.positions(10, rank=2, ranks=3, shard_lengths=[4, 0, 6]).tolist() == [4, 5, 6, 7, 8, 9]
    assert annulus.positions(5).tolist() == [0, 1, 2, 3, 4]


REFUSED = {
    "sum to tokens": lambda: annulus.positions(10, rank=0, ranks=2, shard_lengths=[4, 5]),
    "has shards of": lambda: annulus.positions(10, rank=0, ranks=2, shard_lengths=[1, 9], layout="striped"),
    "go together": lambda: annulus.positions(10, rank=0),
    "lies in": lambda: annulus.positions(10, rank=2, ranks=2),
    "one a rank": lambda: annulus.plan(**SIZES, ranks=2, shard_lengths=[1000]),
    "that sum to": lambda: annulus.plan(**SIZES, shard_lengths=[999]),
    "for 1000 tokens": lambda: annulus.plan(**SIZES, ranks=2, shard_lengths=[1, 999], layout="zigzag"),
    "rank 2 of 2": lambda: annulus.plan(**SIZES, ranks=2, rank=2),
    "rank 1 of 1": lambda: annulus.plan(**SIZES, rank=1),
    "rank 0 of 0": lambda: annulus.positions(10, rank=0, ranks=0),
    "torch.float64": lambda: annulus.plan(**SIZES, dtype=torch.float64),
    "tokens must": lambda: annulus.positions(-1),
    "whole numbers": lambda: annulus.positions(10, rank=0, ranks=2, shard_lengths=[4.5, 5.5]),
}


@pytest.mark.parametrize("word", REFUSED)
def test_bad_shards(word):
    with pytest.raises(ValueError, match=word):
        REFUSED[word]()


def test_an_option_that_is_not_there():
    with pytest.raises(TypeError, match="annulus.plan has no option 'casual'.*causal"):
        annulus.plan(**SIZES, casual=True)


def test_a_device_that_is_not_there_is_an_error_that_says_so():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU; cuda_test.py has the rest")
    with pytest.raises(RuntimeError, match="cuda|CUDA|GPU"):
        annulus.plan(**SIZES, device="cuda")


def test_info():
    shown = subprocess.run([sys.executable, "-m", "annulus.info"], capture_output=True, text=True, check=True).stdout
    assert annulus.__version__ in shown and "finite" in shown and "NO" not in shown


def test_a_missing_library_says_what_to_do(tmp_path):
    command = [sys.executable, "-c", "import annulus"]
    environment = {"ANNULUS_LIBRARY": str(tmp_path / "nothing.so"), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "pip install ." in done.stderr
