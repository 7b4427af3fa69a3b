"""Modules: shapes, grouped heads, checkpoints of torchscale and prov-gigapath, rotary positions."""

import math

import oracle
import pytest
import torch

import annulus

PATTERN = ([8, 37], [1, 3])


def test_the_layer_is_its_parts():
    layer = annulus.MultiheadDilatedAttention(24, 4, *PATTERN, num_kv_heads=2, causal=True, layer_norm=True)
    x = torch.randn(2, 37, 24)
    q = layer.q_proj(x).view(2, 37, 4, 6)
    k, v = (projection(x).view(2, 37, 2, 6) for projection in (layer.k_proj, layer.v_proj))
    attended, _ = oracle.attend(q, k, v, *PATTERN, causal=True)
    expected = layer.out_proj(layer.inner_attn_ln(attended.flatten(-2)))
    assert torch.allclose(layer(x), expected, atol=1e-5)
    assert not torch.allclose(layer(x, torch.randn_like(x)), expected, atol=1e-3)


def test_attention_without_parameters():
    attention = annulus.DilatedAttention(*PATTERN, causal=True)
    q = torch.randn(1, 37, 4, 8)
    assert torch.equal(attention(q, q, q), annulus.dilated_attention(q, q, q, *PATTERN, causal=True))
    _, lse = attention(q, q, q, return_lse=True)
    assert lse.shape == (1, 4, 37) and not list(attention.parameters())
    assert "segment_lengths=(8, 37)" in repr(attention)


def test_documents_do_not_see_each_other():
    layer = annulus.MultiheadDilatedAttention(16, 2, *PATTERN)
    a, b = torch.randn(1, 14, 16), torch.randn(1, 23, 16)
    together = layer(torch.cat([a, b], 1), cu_seqlens=[0, 14, 37])
    assert torch.allclose(together, torch.cat([layer(a), layer(b)], 1), atol=1e-5)


def torchscale_state(prefix="", wrapped=False):
    """As their layers name them; `wrapped`: a multiway layer of which one half exists."""
    middle = ".A" if wrapped else ""
    names = [
        f"{layer}{middle}.{kind}" for layer in ("q_proj", "k_proj", "v_proj", "out_proj") for kind in ("weight", "bias")
    ]
    state = {prefix + name: torch.randn(16, 16) if name.endswith("weight") else torch.randn(16) for name in names}
    state |= {f"{prefix}inner_attn_ln{middle}.{kind}": torch.randn(16) for kind in ("weight", "bias")}
    return state | {f"{prefix}xpos.scale": torch.randn(4)}


@pytest.mark.parametrize("wrapped", [False, True])
def test_loads_torchscale_names(wrapped):
    state = torchscale_state(wrapped=wrapped)
    layer = annulus.MultiheadDilatedAttention(16, 2, *PATTERN, layer_norm=True, preset="torchscale")
    layer.load_state_dict(dict(state))  # strictly
    middle = ".A" if wrapped else ""
    assert torch.equal(layer.k_proj.weight, state[f"k_proj{middle}.weight"])
    assert torch.equal(layer.inner_attn_ln.bias, state[f"inner_attn_ln{middle}.bias"])


def test_loads_prov_gigapath_names():
    class EncoderLayer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.self_attn = annulus.MultiheadDilatedAttention(16, 2, *PATTERN, layer_norm=True, preset="torchscale")

    encoder = torch.nn.Module()
    encoder.layers = torch.nn.ModuleList(EncoderLayer() for _ in range(2))
    state = torchscale_state("layers.0.self_attn.") | torchscale_state("layers.1.self_attn.")
    encoder.load_state_dict(dict(state))
    assert torch.equal(encoder.layers[1].self_attn.q_proj.bias, state["layers.1.self_attn.q_proj.bias"])


def test_a_second_modality_is_not_dropped_in_silence():
    state = torchscale_state(wrapped=True)
    state["q_proj.B.weight"] = torch.randn(16, 16)
    with pytest.raises(RuntimeError, match="q_proj.B.weight"):
        annulus.MultiheadDilatedAttention(16, 2, *PATTERN, layer_norm=True).load_state_dict(state)


class TestRotary:
    def test_only_distance_matters(self):
        q, k = torch.randn(1, 1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 1, 8, dtype=torch.float64)

        def logit(at_q, at_k, **more):
            turned = (
                annulus.rotate(q, torch.tensor([at_q]), **more),
                annulus.rotate(k, torch.tensor([at_k]), is_key=True, **more),
            )
            return (turned[0] * turned[1]).sum().item()

        for more in ({}, {"xpos_scale_base": 512.0}, {"xpos_scale_base": 512.0, "xpos_centre": 50}):
            assert math.isclose(logit(7, 3, **more), logit(107, 103, **more), rel_tol=1e-9)
            assert not math.isclose(logit(7, 3, **more), logit(7, 4, **more), rel_tol=1e-3)

    def test_far_positions_are_exact(self):
        x = torch.randn(1, 1, 1, 8, dtype=torch.float64)
        far = 10_000_019
        single = annulus.rotate(x.float(), torch.tensor([far]))
        assert torch.allclose(single.double(), annulus.rotate(x.float().double(), torch.tensor([far])), atol=1e-6)

    def test_by_complex_numbers(self):
        x, places = torch.randn(2, 5, 3, 8, dtype=torch.float64), torch.tensor([0, 3, 4, 100, 7])
        angles = places[:, None] * 10000.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
        turned = (
            torch.view_as_complex(x.unflatten(-1, (4, 2))) * torch.polar(torch.ones_like(angles), angles)[None, :, None]
        )
        assert torch.allclose(annulus.rotate(x, places), torch.view_as_real(turned).flatten(-2))

    def test_odd_heads_are_refused(self):
        with pytest.raises(ValueError, match="even head_dim"):
            annulus.rotate(torch.randn(1, 2, 1, 7), torch.arange(2))

    def test_xpos_refuses_what_overflows(self):
        """Up to the limit that it names all is finite, queries and keys; beyond it is an error with the remedy."""
        for dtype, limit in ((torch.float16, 2832), (torch.bfloat16, 34559), (torch.float32, 34561)):
            x = torch.full((1, 2, 1, 8), 40.0, dtype=dtype)
            for is_key in (False, True):
                places = torch.tensor([-limit, limit])
                turned = annulus.rotate(x, places + 7, xpos_scale_base=512.0, xpos_centre=7, is_key=is_key)
                assert turned.isfinite().all() and (turned != 0).any(-1).all()
                with pytest.raises(ValueError, match="at least 513"):
                    annulus.rotate(x, places + 8, xpos_scale_base=512.0, xpos_centre=7, is_key=is_key)
        layer = annulus.MultiheadDilatedAttention(2, 1, [8], [1], rotary="xpos", causal=True)
        with pytest.raises(ValueError, match="34561 positions"):
            layer(torch.randn(1, 70_000, 2))
        layer = annulus.MultiheadDilatedAttention(2, 1, [8], [1], rotary="xpos", xpos_scale_base=600.0, causal=True)
        assert layer(torch.randn(1, 70_000, 2)).isfinite().all()

    def test_positions_are_those_of_the_rows(self):
        for places in (torch.arange(3), torch.arange(2)[None], torch.tensor(0)):
            with pytest.raises(ValueError, match="one for each of the 2 rows"):
                annulus.rotate(torch.randn(1, 2, 1, 8), places)

    def test_given_positions(self):
        layer = annulus.MultiheadDilatedAttention(16, 2, *PATTERN, rotary="rotary")
        x = torch.randn(1, 37, 16)
        shifted = layer(x, positions=torch.arange(1000, 1037))
        assert torch.allclose(shifted, layer(x), atol=1e-4)  # only distances matter
        assert not torch.allclose(layer(x, positions=2 * torch.arange(37)), layer(x), atol=1e-3)


REFUSED = {
    "num_kv_heads 3": {"num_kv_heads": 3},
    "'xpos'": {"rotary": "alibi"},
    "num_heads 0": {"num_heads": 0},
    "embed_dim 25": {"embed_dim": 25},
    "even head_dim": {"embed_dim": 20, "rotary": "rotary"},
    "same length": {"segment_lengths": [8]},
    "zigzag": {"layout": "spiral"},
    "reshard": {"strategy": "prayer"},
}


@pytest.mark.parametrize("word", REFUSED)
def test_bad_sizes_are_refused(word):
    sizes = {"embed_dim": 24, "num_heads": 4, "segment_lengths": [8, 37], "dilation_rates": [1, 3]}
    with pytest.raises(ValueError, match=word):
        annulus.MultiheadDilatedAttention(**{**sizes, **REFUSED[word]})


def test_options_that_are_not_there_are_refused():
    for name, remedy in (("return_lse", "DilatedAttention returns both"), ("cu_seqlens", "to forward")):
        with pytest.raises(TypeError, match=remedy):
            annulus.MultiheadDilatedAttention(24, 4, *PATTERN, **{name: True})
    for make in (
        lambda **options: annulus.MultiheadDilatedAttention(24, 4, *PATTERN, **options),
        lambda **options: annulus.DilatedAttention(*PATTERN, **options),
    ):
        with pytest.raises(TypeError, match="annulus.*Attention has no option 'casual'.*causal"):
            make(casual=True)


def test_modules_show_what_they_were_given():
    shown = repr(annulus.MultiheadDilatedAttention(24, 4, *PATTERN, num_kv_heads=2, rotary="xpos", causal=True))
    assert "embed_dim=24, num_heads=4, num_kv_heads=2" in shown and "rotary=xpos" in shown and "causal=True" in shown
