"""dilated_attention on the CPU against the definition, in every shape and layout that users bring, and its refusals."""

import math
import re

import numpy
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as draw

import annulus
from annulus._spec import make_spec

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3, torch.float64: 1e-12}


def tensors(batch=2, tokens=37, heads=4, kv_heads=None, head_dim=8, dtype=torch.float32, requires_grad=True):
    shapes = [(batch, tokens, each, head_dim) for each in (heads, kv_heads or heads, kv_heads or heads)]
    return [torch.randn(shape).to(dtype).requires_grad_(requires_grad) for shape in shapes]


def close(ours, theirs, dtype):
    """Against fp64, in units of the largest value."""
    scale = max(1.0, theirs.abs().nan_to_num(posinf=0).max().item()) if theirs.numel() else 1.0
    return torch.allclose(ours.double(), theirs.double(), rtol=0, atol=TOLERANCE[dtype] * scale)


def check(q, k, v, segments, dilations, **options):
    """Output, lse and all gradients against the oracle in fp64."""
    out, lse = annulus.dilated_attention(q, k, v, segments, dilations, return_lse=True, **options)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact_out, exact_lse = oracle.attend(*wide, segments, dilations, **options)
    dout = torch.randn(q.shape, dtype=torch.float64)
    exact = torch.autograd.grad((exact_out * dout).sum(), wide)
    ours = torch.autograd.grad((out.double() * dout).sum(), (q, k, v))
    assert out.dtype == q.dtype and not lse.requires_grad
    assert close(out, exact_out, q.dtype)
    assert torch.equal(lse == -math.inf, exact_lse == -math.inf)
    assert close(
        lse.nan_to_num(neginf=0), exact_lse.nan_to_num(neginf=0), torch.float32 if q.dtype != torch.float64 else q.dtype
    )
    for name, a, b in zip(("dq", "dk", "dv"), ours, exact, strict=True):
        assert a.dtype == q.dtype and close(a, b, q.dtype), name


@given(draw.data())
def test_problems_of_every_kind(data):
    number = draw.integers
    kv_heads = data.draw(number(1, 3), "kv_heads")
    heads = kv_heads * data.draw(number(1, 3), "group")
    tokens = data.draw(number(1, 60), "tokens")
    branches = data.draw(number(1, 3), "branches")
    segments = data.draw(draw.lists(number(1, 70), min_size=branches, max_size=branches), "segments")
    dilations = data.draw(draw.lists(number(1, 6), min_size=branches, max_size=branches), "dilations")
    options = {
        "causal": data.draw(draw.booleans(), "causal"),
        "phase": data.draw(draw.sampled_from(["by_head", "by_head_block", "every"]), "phase"),
        "softmax_scale": data.draw(draw.sampled_from([None, 0.3]), "scale"),
    }
    if data.draw(draw.booleans(), "documents"):
        cuts = data.draw(draw.lists(number(0, tokens), max_size=3), "cuts")
        options["cu_seqlens"] = sorted([0, *cuts, tokens])
    dtype = data.draw(draw.sampled_from(list(TOLERANCE)), "dtype")
    sizes = {"batch": data.draw(number(1, 2), "batch"), "head_dim": data.draw(number(1, 20), "head_dim")}
    check(*tensors(tokens=tokens, heads=heads, kv_heads=kv_heads, dtype=dtype, **sizes), segments, dilations, **options)


def test_one_long_segment_is_dense_attention():
    q, k, v = tensors(tokens=50, heads=4, head_dim=16)
    ours = annulus.dilated_attention(q, k, v, [50], [1], causal=True)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    theirs = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_torchscale_names_are_taken():
    q, k, v = tensors()
    ours = annulus.dilated_attention(q, k, v, segment_length=[8, 37], dilated_ratio=[1, 3])
    assert torch.equal(ours, annulus.dilated_attention(q, k, v, [8, 37], [1, 3]))


def test_presets_set_phase_and_gradient():
    q, k, v = tensors()

    def gradients(**options):
        return torch.autograd.grad(
            annulus.dilated_attention(q, k, v, [8, 37], [1, 3], **options).sin().sum(), (q, k, v)
        )

    torchscale = gradients(preset="torchscale")
    spelt_out = gradients(phase="by_head_block", gradient="detached")
    exact = gradients(preset="torchscale", gradient="exact")
    assert all(map(torch.equal, torchscale, spelt_out))
    assert not torch.equal(torchscale[0], exact[0])
    assert torch.equal(torchscale[2], exact[2])  # dv is the same in both
    assert all(map(torch.equal, gradients(preset="residue"), gradients(phase="every")))


def test_a_table_says_the_same_as_the_rule():
    q, k, v = tensors(heads=4)
    table = [[0, 0, 0, 0], [0, 1, 2, 0]]
    ours = annulus.dilated_attention(q, k, v, [8, 37], [1, 3], phase="table", classes=table)
    assert torch.equal(ours, annulus.dilated_attention(q, k, v, [8, 37], [1, 3]))


def test_head_groups():
    q, k, v = tensors(heads=4)
    out = annulus.dilated_attention(q, k, v, [8, 20], [1, 2], preset="head_groups")
    first, _ = oracle.attend(q[:, :, :2], k[:, :, :2], v[:, :, :2], [8], [1], phase="every")
    assert torch.allclose(out[:, :, :2], first / 2, atol=1e-5)


class TestLayouts:
    """Inputs are read where they lie."""

    def test_packed_projection(self):
        packed = torch.randn(2, 37, 3, 4, 8)
        check(*(packed[:, :, i].requires_grad_() for i in range(3)), [8, 37], [1, 3])

    def test_heads_first(self):
        check(*(torch.randn(2, 4, 37, 8).transpose(1, 2).requires_grad_() for _ in range(3)), [8, 37], [1, 3])

    def test_expanded_keys(self):
        q, k, v = tensors(kv_heads=1)
        expanded = [x.expand(-1, -1, 4, -1) for x in (k, v)]
        wide = annulus.dilated_attention(q, *expanded, [8, 37], [1, 3])
        assert torch.allclose(wide, annulus.dilated_attention(q, k, v, [8, 37], [1, 3]), atol=1e-6)

    def test_elements_of_a_head_apart_are_copied(self):
        check(*(torch.randn(2, 37, 8, 4).transpose(2, 3).requires_grad_() for _ in range(3)), [8, 37], [1, 3])

    def test_a_slice_of_tokens(self):
        check(*(torch.randn(2, 90, 4, 8)[:, 5:79:2].requires_grad_() for _ in range(3)), [8, 37], [1, 3])

    def test_a_gradient_without_strides(self):
        q, k, v = tensors()
        annulus.dilated_attention(q, k, v, [8, 37], [1, 3]).sum().backward()  # its dout is one number, expanded
        assert q.grad.isfinite().all()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [(0, 5, 2, 4), (2, 0, 2, 4)])
def test_nothing_in_nothing_out(shape, dtype):
    q = torch.randn(shape).to(dtype).requires_grad_()
    out, lse = annulus.dilated_attention(q, q, q, [4], [2], return_lse=True)
    out.sum().backward()
    assert out.shape == shape and lse.shape == (shape[0], shape[2], shape[1]) and q.grad.shape == shape


@pytest.mark.parametrize("enabled", [torch.bfloat16, torch.float16])
def test_autocast(enabled):
    q, k, v = tensors()
    with torch.autocast("cpu", dtype=enabled):
        out = annulus.dilated_attention(q, k, v, [8, 37], [1, 3])
        mixed = annulus.dilated_attention(q, k.bfloat16(), v, [8, 37], [1, 3])
    assert out.dtype == mixed.dtype == enabled
    out.sum().backward()
    assert q.grad.dtype == torch.float32
    assert torch.equal(out, annulus.dilated_attention(*(x.to(enabled) for x in (q, k, v)), [8, 37], [1, 3]))


def test_autocast_leaves_float64_alone():
    q, k, v = tensors(requires_grad=False)
    with torch.autocast("cpu"):
        assert annulus.dilated_attention(*(x.double() for x in (q, k, v)), [8], [1]).dtype == torch.float64
        for mixed in ((q.double(), k, v), (q, k.double(), v)):
            with pytest.raises(ValueError, match="one type"):
                annulus.dilated_attention(*mixed, [8], [1])


def test_the_operators_check_what_they_are_given():
    q, k, v = tensors(requires_grad=False)
    spec = make_spec([8], [1])
    out, lse = torch.ops.annulus.forward(q, k, v, spec)
    for wrong in ((q.double(), k, v), (q, k.half(), v.half()), (q, k[:, 1:], v[:, 1:])):
        with pytest.raises(ValueError, match="must"):
            torch.ops.annulus.forward(*wrong, spec)
        with pytest.raises(ValueError, match="must"):
            torch.ops.annulus.backward(out, *wrong, out, lse, spec)
    for wrong in ((out.double(), out, lse), (out[:, 1:], out, lse), (out, out, lse.double())):
        with pytest.raises(ValueError, match="dout and out must be like q"):
            torch.ops.annulus.backward(wrong[0], q, k, v, *wrong[1:], spec)


def test_the_number_of_threads_changes_no_bit():
    q, k, v = tensors(tokens=300)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(annulus.dilated_attention(q, k, v, [64, 300], [1, 4], deterministic=True))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


REFUSED = {
    "three dimensions": (lambda q, k, v: annulus.dilated_attention(q[0], k, v, [8], [1]), ValueError, "head_dim]"),
    "k unlike v": (lambda q, k, v: annulus.dilated_attention(q, k, v[:, 1:], [8], [1]), ValueError, "k and v"),
    "q unlike k": (lambda q, k, v: annulus.dilated_attention(q[:, 1:], k, v, [8], [1]), ValueError, "36, 4, 8"),
    "heads": (lambda q, k, v: annulus.dilated_attention(q, k[:, :, :3], v[:, :, :3], [8], [1]), ValueError, "multiple"),
    "types": (lambda q, k, v: annulus.dilated_attention(q, k.half(), v, [8], [1]), ValueError, "one type"),
    "integers": (
        lambda q, k, v: annulus.dilated_attention(*(x.long() for x in (q, k, v)), [8], [1]),
        ValueError,
        "int64",
    ),
    "no pattern": (lambda q, k, v: annulus.dilated_attention(q, k, v), ValueError, "segment_lengths"),
    "lists": (lambda q, k, v: annulus.dilated_attention(q, k, v, [8, 9], [1]), ValueError, "same length"),
    "a segment of 0": (lambda q, k, v: annulus.dilated_attention(q, k, v, [0], [1]), ValueError, "at least 1"),
    "phase": (lambda q, k, v: annulus.dilated_attention(q, k, v, [8], [1], phase="x"), ValueError, "by_head_block"),
    "preset": (lambda q, k, v: annulus.dilated_attention(q, k, v, [8], [1], preset="x"), ValueError, "torchscale"),
    "layout": (lambda q, k, v: annulus.dilated_attention(q, k, v, [8], [1], layout="x"), ValueError, "zigzag"),
    "strategy": (lambda q, k, v: annulus.dilated_attention(q, k, v, [8], [1], strategy="x"), ValueError, "reshard"),
    "documents": (lambda q, k, v: annulus.dilated_attention(q, k, v, [8], [1], cu_seqlens=[0, 9]), ValueError, "37"),
    "classes": (lambda q, k, v: annulus.dilated_attention(q, k, v, [8], [1], phase="table"), ValueError, "class"),
    "classes without a table": (
        lambda q, k, v: annulus.dilated_attention(q, k, v, [8], [1], classes=[[0] * 4]),
        ValueError,
        "phase='table'",
    ),
    "both names": (
        lambda q, k, v: annulus.dilated_attention(q, k, v, [8], [1], segment_length=[9]),
        ValueError,
        "give one of them",
    ),
    "head_groups": (
        lambda q, k, v: annulus.dilated_attention(q, k, v, [8], [1], preset="head_groups", phase="every"),
        ValueError,
        "leave phase out",
    ),
    "no documents": (
        lambda q, k, v: annulus.dilated_attention(q, k, v, [8], [1], cu_seqlens=[]),
        ValueError,
        "leave it",
    ),
    "text": (lambda q, k, v: annulus.dilated_attention(q, k, v, "8", [1]), ValueError, "whole numbers"),
    "half a row": (
        lambda q, k, v: annulus.dilated_attention(q, k, v, [8.5], [1]),
        ValueError,
        "segment_lengths must be",
    ),
    "65 bits": (lambda q, k, v: annulus.dilated_attention(q, k, v, [(1 << 64) + 8], [1]), ValueError, "64 bits"),
    "a table of documents": (
        lambda q, k, v: annulus.dilated_attention(q, k, v, [8], [1], cu_seqlens=torch.tensor([[0, 37]])),
        ValueError,
        "cu_seqlens must be whole numbers, in one list",
    ),
    "a scale that learns": (
        lambda q, k, v: annulus.dilated_attention(q, k, v, [8], [1], softmax_scale=torch.ones(1, requires_grad=True)),
        ValueError,
        "multiply q by it",
    ),
    "a scale that is none": (
        lambda q, k, v: annulus.dilated_attention(q, k, v, [8], [1], softmax_scale=math.nan),
        ValueError,
        "finite",
    ),
    "shards of nobody": (
        lambda q, k, v: annulus.dilated_attention(q, k, v, [8], [1], shard_lengths=[37]),
        ValueError,
        "without a group",
    ),
    "copies for nobody": (
        lambda q, k, v: annulus.dilated_attention(q, k, v, [8], [1], strategy="replicated"),
        ValueError,
        "without a group",
    ),
    "a group that is none": (
        lambda q, k, v: annulus.dilated_attention(q, k, v, [8], [1], group=3),
        ValueError,
        "got 3",
    ),
    "no such group": (lambda q, k, v: annulus.dilated_attention(q, k, v, [8], [1], group="x"), ValueError, "'x'"),
    "head_dim": (
        lambda q, k, v: annulus.dilated_attention(*3 * [torch.ones(1, 2, 1, 5000)], [8], [1]),
        NotImplementedError,
        "head sizes",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input(case):
    call, error, word = REFUSED[case]
    with pytest.raises(error, match=re.escape(word)):
        call(*tensors(requires_grad=False))


def test_documents_may_be_a_tensor():
    q, k, v = tensors()
    bounds = torch.tensor([0, 10, 37], dtype=torch.int32)
    ours = annulus.dilated_attention(q, k, v, [8, 37], [1, 3], cu_seqlens=bounds)
    assert torch.equal(ours, annulus.dilated_attention(q, k, v, [8, 37], [1, 3], cu_seqlens=[0, 10, 37]))


def test_options_count_by_their_values():
    """A tensor that changes, or that another one follows at the same place, is not what it was."""
    q, k, v = tensors(requires_grad=False)
    scale, segments, bounds = torch.tensor(0.3), torch.tensor([8, 37]), torch.tensor([0, 10, 37])
    for _ in range(2):
        ours = annulus.dilated_attention(q, k, v, segments, [1, 3], softmax_scale=scale, cu_seqlens=bounds)
        values = {"softmax_scale": scale.item(), "cu_seqlens": bounds.tolist()}
        assert torch.equal(ours, annulus.dilated_attention(q, k, v, segments.tolist(), [1, 3], **values))
        scale.mul_(2), segments.sub_(3), bounds[1].add_(5)
    listed = [torch.tensor(8), torch.tensor(37)]
    first = annulus.dilated_attention(q, k, v, listed, [1, 3])
    listed[0].sub_(4)
    assert not torch.equal(annulus.dilated_attention(q, k, v, listed, [1, 3]), first)


def test_numbers_of_numpy():
    q, k, v = tensors(requires_grad=False)
    options = {"cu_seqlens": [0, 10, 37], "phase": "table", "classes": [[0, 0, 0, 0], [0, 1, 2, 0]]}
    arrays = {name: numpy.array(value) if name != "phase" else value for name, value in options.items()}
    ours = annulus.dilated_attention(q, k, v, numpy.array([8, 37]), [numpy.int64(1), numpy.int32(3)], **arrays)
    assert torch.equal(ours, annulus.dilated_attention(q, k, v, [8, 37], [1, 3], **options))


def test_a_view_that_means_minus_itself():
    q = torch.randn(2, 37, 4, 8, dtype=torch.complex64).conj().imag
    assert q.is_neg()
    ours = annulus.dilated_attention(q, q, q, [8, 37], [1, 3])
    assert torch.equal(ours, annulus.dilated_attention(*3 * [q.resolve_neg()], [8, 37], [1, 3]))
