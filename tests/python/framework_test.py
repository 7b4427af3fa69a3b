"""PyTorch's own judges: gradcheck, opcheck, torch.compile, checkpointing, FakeTensors."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import annulus
from annulus._spec import make_spec

PATTERN = {"segment_lengths": [4, 11], "dilation_rates": [1, 3]}


def doubles(tokens=11, heads=4, kv_heads=None, head_dim=3):
    shapes = [(1, tokens, each, head_dim) for each in (heads, kv_heads or heads, kv_heads or heads)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("phase", ["by_head", "by_head_block", "every"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("documents", [None, [0, 3, 3, 11]])
def test_gradcheck(phase, causal, kv_heads, documents):
    def call(*inputs):
        return annulus.dilated_attention(*inputs, **PATTERN, phase=phase, causal=causal, cu_seqlens=documents)

    assert torch.autograd.gradcheck(call, doubles(kv_heads=kv_heads))


def test_gradcheck_finds_the_detached_gradient():
    """It is not the derivative of the output, and gradcheck must say so."""
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(lambda *x: annulus.dilated_attention(*x, **PATTERN, gradient="detached"), doubles())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_opcheck(dtype):
    spec = make_spec([8, 37], [1, 3], causal=True)
    q = torch.randn(2, 37, 4, 8).to(dtype).requires_grad_()
    k, v = (torch.randn(2, 2, 37, 8).to(dtype).transpose(1, 2).requires_grad_() for _ in range(2))
    torch.library.opcheck(torch.ops.annulus.forward.default, (q, k, v, spec))
    out, lse = torch.ops.annulus.forward(*(x.detach() for x in (q, k, v)), spec)
    inputs = (torch.randn(q.shape).to(dtype), *(x.detach() for x in (q, k, v)), out, lse, spec)
    torch.library.opcheck(torch.ops.annulus.backward.default, inputs)


class Model(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            annulus.MultiheadDilatedAttention(32, 4, [8, 40], [1, 3], causal=True, **options) for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def loss_and_gradients(model, x):
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return [loss, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("options", [{}, {"rotary": "xpos", "num_kv_heads": 2, "layer_norm": True}])
def test_compile_has_no_graph_breaks_and_equals_eager(options):
    model, x = Model(**options), torch.randn(2, 40, 32)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for a, b in zip(loss_and_gradients(compiled, x), loss_and_gradients(model, x), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(
    torch.__version__.startswith("2.4."), reason="torch 2.4 with dynamic=True makes symbols of a module's own numbers"
)
def test_compile_with_lengths_that_change():
    model = Model()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (17, 40, 53):
        x = torch.randn(1, tokens, 32)
        assert torch.allclose(compiled(x), model(x), atol=1e-6)
    assert torch._dynamo.utils.counters["graph_break"] == {}


def test_compile_with_autocast_and_documents():
    q = torch.randn(1, 40, 2, 16)

    def call(q):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return annulus.dilated_attention(q, q, q, [8, 40], [1, 3], cu_seqlens=[0, 13, 40], return_lse=True)

    torch._dynamo.reset()
    for a, b in zip(torch.compile(call, fullgraph=True, backend="aot_eager")(q), call(q), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    model, x = Model(), torch.randn(2, 40, 32, requires_grad=True)

    def gradients(call):
        return torch.autograd.grad(call(x).square().mean(), [x, *model.parameters()] if not reentrant else [x])

    def checkpointed(x):
        return checkpoint(model, x, use_reentrant=reentrant)

    if reentrant:  # which allows backward alone
        checkpointed(x).square().mean().backward()
        ours = [x.grad]
    else:
        ours = gradients(checkpointed)
    for a, b in zip(ours, gradients(model), strict=True):
        assert torch.equal(a, b)


def test_deterministic_algorithms():
    q = torch.randn(1, 200, 2, 16, requires_grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [torch.autograd.grad(annulus.dilated_attention(q, q, q, [64, 200], [1, 4]).sin().sum(), q) for _ in "ab"]
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(runs[0][0], runs[1][0])


def test_fake_tensors_need_no_memory():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(1, 1 << 30, 16, 128, dtype=torch.bfloat16)
        k = torch.empty(1, 1 << 30, 4, 128, dtype=torch.bfloat16)
        out, lse = annulus.dilated_attention(q, k, k, [2048], [1], return_lse=True)
    assert out.shape == q.shape and lse.shape == (1, 16, 1 << 30) and lse.dtype == torch.float32


def test_second_derivatives_are_refused():
    q, k, v = doubles()
    (dq,) = torch.autograd.grad(annulus.dilated_attention(q, k, v, **PATTERN).sin().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="annulus"):
        dq.sum().backward()


def test_forward_mode_is_refused():
    from torch.autograd import forward_ad

    q, k, v = (x.detach() for x in doubles())
    for each in (q, q.float()):
        rest = (k.to(each.dtype), v.to(each.dtype))
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="tangent"):
            annulus.dilated_attention(forward_ad.make_dual(each, torch.ones_like(each)), *rest, **PATTERN)
        with pytest.raises(NotImplementedError, match="reverse mode"):
            torch.func.jvp(lambda q, r=rest: annulus.dilated_attention(q, *r, **PATTERN), (each,), (each,))
    with forward_ad.dual_level():  # with no tangent
        annulus.dilated_attention(q, k, v, **PATTERN)


def test_transforms_of_torch_func():
    q, k, v = (x.detach().float() for x in doubles())

    def loss(q):
        return annulus.dilated_attention(q, k, v, **PATTERN).sin().sum()

    def outputs(q):
        return annulus.dilated_attention(q, k, v, **PATTERN).sum((0, 1, 2))

    x = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(x), x)
    assert torch.equal(torch.func.grad(loss)(q), expected)
    assert torch.equal(torch.func.vjp(loss, q)[1](torch.tensor(1.0))[0], expected)
    rows = torch.stack([torch.autograd.grad(outputs(x)[i], x)[0] for i in range(3)])
    assert torch.allclose(torch.func.jacrev(outputs)(q), rows, atol=1e-6)
    assert torch.allclose(torch.autograd.grad(outputs(x), x, torch.eye(3), is_grads_batched=True)[0], rows, atol=1e-6)
    assert torch.equal(torch.func.vmap(torch.func.grad(loss))(torch.stack([q, q]))[1], expected)
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(q)


def test_compile_with_options_that_change():
    q = torch.randn(1, 11, 2, 8)

    def call(q, segment, scale):
        return annulus.dilated_attention(q, q, q, [segment, 11], [1, 3], softmax_scale=scale)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for options in ((4, 0.3), (5, 0.4), (6, 0.5)):
        assert torch.equal(compiled(q, *options), call(q, *options))


def test_meta_tensors():
    layer = annulus.MultiheadDilatedAttention(32, 4, [8, 40], [1, 3], rotary="xpos", device="meta")
    assert layer(torch.empty(2, 40, 32, device="meta")).shape == (2, 40, 32)
    with pytest.raises(ValueError, match="one type"):
        q = torch.empty(1, 8, 2, 4, device="meta")
        annulus.dilated_attention(q, q.half(), q, [8], [1])


def test_plain_calls_and_the_operator_agree():
    """A plain call takes a shorter way; whoever has to see an operator sees one."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(function.name())
            return function(*args, **(kwargs or {}))

    q, k, v, dout = (torch.randn(1, 40, 2, 16) for _ in range(4))
    packed = torch.stack((q, k, v), dim=-1)  # heads that are not contiguous
    results, names = [], []
    for inputs in ((q, k, v), packed.unbind(-1)):
        inputs = [x.detach().requires_grad_() for x in inputs]
        for mode in (None, Seen()):
            with mode or torch.enable_grad():
                out, lse = annulus.dilated_attention(*inputs, [8, 40], [1, 3], return_lse=True)
                assert not lse.requires_grad
                results.append((out.detach(), lse, *torch.autograd.grad(out, inputs, dout)))
    for each in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(each, results[0], strict=True))
    assert {"annulus::forward", "annulus::backward"} <= set(names)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        annulus.dilated_attention(q, k, v, [8, 40], [1, 3])
    assert any(event.key == "annulus::forward" for event in profile.key_averages())
