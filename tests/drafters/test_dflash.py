"""DFlash against a plain reading of its formula; its keys, its defaults, its first weights."""

from __future__ import annotations

import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import Tensor

from adaflash.blocks import build_blocks
from adaflash.drafters.base import default_context_layers, embed_blocks
from adaflash.drafters.dflash import DFlash
from adaflash.errors import UserError
from adaflash.types import Segments

B = 8


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [S, heads, D]."""
    half = x.shape[-1] // 2
    angle = positions[:, None, None].double() * theta ** -(torch.arange(half).double() / half)
    one, two = x[..., :half], x[..., half:]
    return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], -1)


def formula(drafter: DFlash, embeds: Tensor, context: Tensor, anchor: int) -> Tensor:
    """One block [B, H], word by word: context through `hidden_norm(fc(.))` once, then each layer's own keys and values."""
    w, c = drafter.state_dict(), drafter.config
    theta, groups = c.rope_parameters["rope_theta"], c.num_attention_heads // c.num_key_value_heads
    seen = rms(context[:anchor] @ w["fc.weight"].T, w["hidden_norm.weight"], c.rms_norm_eps)
    x = embeds
    for i in range(c.num_hidden_layers):

        def at(name: str, i: int = i) -> Tensor:
            return w[f"layers.{i}.{name}.weight"]

        def heads(states: Tensor, name: str) -> Tensor:
            return (states @ at(f"self_attn.{name}_proj").T).unflatten(-1, (-1, c.head_dim))

        h = rms(x, at("input_layernorm"), c.rms_norm_eps)
        both = torch.cat([seen, h])  # the context is not normed by `input_layernorm`
        places = torch.cat([torch.arange(anchor), anchor + torch.arange(B)])
        q = rope(rms(heads(h, "q"), at("self_attn.q_norm"), c.rms_norm_eps), places[anchor:], theta)
        k = rope(rms(heads(both, "k"), at("self_attn.k_norm"), c.rms_norm_eps), places, theta)
        k, v = k.repeat_interleave(groups, 1), heads(both, "v").repeat_interleave(groups, 1)
        weights = (torch.einsum("qhd,khd->hqk", q, k) * c.head_dim**-0.5).softmax(-1)
        x = x + torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ at("self_attn.o_proj").T
        h = rms(x, at("post_attention_layernorm"), c.rms_norm_eps)
        x = x + (F.silu(h @ at("mlp.gate_proj").T) * (h @ at("mlp.up_proj").T)) @ at("mlp.down_proj").T
    return rms(x, w["norm.weight"], c.rms_norm_eps)


@torch.no_grad()
def test_states_are_those_of_the_formula() -> None:
    target = tiny.target(dtype=torch.float64)
    drafter = tiny.drafter(target, B, noise=0.1)
    drafter.rotary.inv_freq = drafter.rotary.inv_freq.double()
    drafter.rotary.inv_freq = drafter.config.rope_parameters["rope_theta"] ** -(torch.arange(8).double() / 8)
    base = tiny.trajectory(target, drafter, [*range(40, 70)], 6)
    anchors = torch.tensor([6, 13, 20])
    blocks = build_blocks([base], [anchors], B, drafter.mask_id)
    embeds = embed_blocks(target, blocks.tokens, torch.float64)
    hidden = drafter(embeds, blocks, base.context[:28], Segments.whole([28]))
    for n, anchor in enumerate(anchors.tolist()):
        # angles are taken in fp32, as transformers does
        torch.testing.assert_close(hidden[n], formula(drafter, embeds[n], base.context, anchor), rtol=0, atol=1e-5)


def test_keys_and_shapes_are_those_of_dflash_checkpoints() -> None:
    drafter = tiny.drafter(tiny.target(), B)
    layer = {
        "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
        "self_attn.o_proj": (64, 64), "self_attn.q_norm": (16,), "self_attn.k_norm": (16,), "mlp.gate_proj": (128, 64),
        "mlp.up_proj": (128, 64), "mlp.down_proj": (64, 128), "input_layernorm": (64,), "post_attention_layernorm": (64,),
    }  # fmt: skip
    expected = {"fc.weight": (64, 128), "hidden_norm.weight": (64,), "norm.weight": (64,)}
    expected |= {f"layers.{i}.{name}.weight": shape for i in range(2) for name, shape in layer.items()}
    assert {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()} == expected


@pytest.mark.parametrize(("layers", "count", "expected"), [
    (28, 5, (1, 7, 13, 19, 25)),
    (30, 5, (1, 8, 14, 20, 27)),
    (36, 5, (1, 9, 17, 25, 33)),
    (28, 1, (14,)),
    (30, 2, (1, 27)),
])  # fmt: skip
def test_default_context_layers(layers: int, count: int, expected: tuple[int, ...]) -> None:
    assert default_context_layers(layers, count) == expected


@pytest.mark.parametrize(("layers", "says"), [
    ([0, 3], r"layers \[3\].*allowed are 0 \.\. 2"),  # the last layer: post-norm in Hugging Face
    ([-1, 2], r"layers \[-1\]"),
    ([1, 1], "repeated or unsorted"),
    ([2, 0], "repeated or unsorted"),
])  # fmt: skip
def test_wrong_context_layers_are_refused_with_the_key(layers: list[int], says: str) -> None:
    with pytest.raises(UserError, match=f"model.drafter.init_args.context_layers.*{says}"):
        DFlash(context_layers=layers, mask_id=1).build(tiny.target())


def test_too_many_default_layers_for_a_shallow_target_are_refused() -> None:
    with pytest.raises(UserError, match="repeated"):
        DFlash(num_context_layers=5, mask_id=1).build(tiny.target())


@pytest.mark.parametrize(("layers", "context"), [(3, [0, 2]), (1, [0, 1, 2]), (6, [1])])
def test_layers_and_context_layers_are_independent(layers: int, context: list[int]) -> None:
    target = tiny.target()
    drafter = tiny.drafter(target, B, num_layers=layers, context_layers=context)
    assert drafter.fc.weight.shape == (64, 64 * len(context))
    base = tiny.trajectory(target, drafter, [*range(30)], 6)
    blocks = build_blocks([base], [torch.tensor([9])], B, drafter.mask_id)
    hidden = drafter(embed_blocks(target, blocks.tokens, torch.float32), blocks, base.context, Segments.whole([30]))
    assert hidden.shape == (1, B, 64)
    assert hidden.isfinite().all()


def test_build_makes_weights_once() -> None:
    target = tiny.target()
    drafter = tiny.drafter(target, B)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    drafter.build(target)
    assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.state_dict().items())
    assert not DFlash().built


# ---- rotary base (FAULTS 26) ----


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_rotary_frequencies_are_the_targets(family: str) -> None:
    target = tiny.target(family)
    drafter = tiny.drafter(target, B)
    theirs = target.model.base_model.rotary_emb
    inv_freq = getattr(theirs, "full_attention_inv_freq", None)
    torch.testing.assert_close(
        drafter.rotary.inv_freq, theirs.inv_freq if inv_freq is None else inv_freq, rtol=0, atol=0
    )


def test_a_base_of_a_million_is_kept() -> None:
    rope_parameters = {"rope_type": "default", "rope_theta": 1e6}
    drafter = tiny.drafter(tiny.target(rope_parameters=rope_parameters), B)
    assert drafter.config.rope_parameters["rope_theta"] == 1e6
    torch.testing.assert_close(drafter.rotary.inv_freq, 1e6 ** -(torch.arange(8) / 8))


# ---- first weights ----


def noisy(family: str):
    """A target whose norms are neither one nor zero."""
    target = tiny.target(family)
    with torch.no_grad():
        for name, parameter in target.model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return target


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
@torch.no_grad()
def test_warm_start_takes_over_the_targets_last_layers(family: str) -> None:
    """As functions: a family may write the same norm in another way (Gemma's weight is the gain minus one)."""
    target = noisy(family)
    drafter = tiny.drafter(target, B)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(drafter.norm(x), target.final_norm(x), **close)
    context = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(drafter.fc(context), context[:, 64:])  # the last context layer, as it is
    torch.testing.assert_close(drafter.hidden_norm(x), target.layers[2].input_layernorm(x), **close)
    for mine, theirs in zip(drafter.layers, target.layers[2:], strict=True):
        torch.testing.assert_close(mine.input_layernorm(x), theirs.input_layernorm(x), **close)
        before_mlp = getattr(theirs, "pre_feedforward_layernorm", theirs.post_attention_layernorm)
        torch.testing.assert_close(mine.post_attention_layernorm(x), before_mlp(x), **close)
        for part in ("q", "k", "v", "o"):
            assert torch.equal(
                getattr(mine.self_attn, f"{part}_proj").weight, getattr(theirs.self_attn, f"{part}_proj").weight
            )
        if hasattr(theirs.self_attn, "q_norm"):
            keys = torch.randn(5, 2, 16, generator=torch.Generator().manual_seed(2))
            torch.testing.assert_close(mine.self_attn.k_norm(keys), theirs.self_attn.k_norm(keys), **close)
        if not ("moe" in family or family == "gpt_oss"):  # experts have other shapes: the MLP starts at random
            assert torch.equal(mine.mlp.down_proj.weight, theirs.mlp.down_proj.weight)


def test_random_start_does_not_look_at_the_target() -> None:
    drafter = tiny.drafter(tiny.target(), B, init="random")
    assert abs(float(drafter.fc.weight.std()) - 0.02) < 0.003
    assert (drafter.norm.weight == 1).all()


def test_more_drafter_layers_than_the_target_has() -> None:
    target = tiny.target()
    drafter = tiny.drafter(target, B, num_layers=6)
    for mine, theirs in zip(drafter.layers[2:], target.layers, strict=True):
        assert torch.equal(mine.self_attn.q_proj.weight, theirs.self_attn.q_proj.weight)


@pytest.mark.parametrize(("wrong", "key"), [
    ({"block_size": 1}, "block_size is 1"),
    ({"num_layers": 0}, "num_layers is 0"),
    ({"num_context_layers": 0}, "num_context_layers is 0"),
])  # fmt: skip
def test_settings_out_of_range(wrong: dict[str, int], key: str) -> None:
    with pytest.raises(UserError, match=key):
        DFlash(**wrong)
