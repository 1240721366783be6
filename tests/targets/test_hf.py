"""The target: context layers, heads and stop ids are Hugging Face's own; pieces equal the whole; strangers are refused."""

from __future__ import annotations

import pytest
import tiny
import torch
from transformers import AutoConfig

from adaflash.decoding.cache import LanePool
from adaflash.decoding.engine import Engine
from adaflash.targets.families import PROVEN, UnsupportedTarget, check_family
from adaflash.targets.hf import HFTarget, TargetOptions
from adaflash.types import Request, Segments

TOKENS = torch.arange(20) * 7 % 90


@pytest.mark.parametrize("layer", [0, 1, 2])
@torch.no_grad()
def test_context_feature_is_the_output_of_that_layer(layer: int) -> None:
    """FAULTS 23: id l is `hidden_states[l + 1]`, the output of decoder layer l, for first, middle and T - 2; bitwise."""
    target = tiny.target()
    caught: list[torch.Tensor] = []
    hook = target.layers[layer].register_forward_hook(
        lambda module, args, out: caught.append(out[0] if isinstance(out, tuple) else out)
    )
    features = target.read(TOKENS, Segments.whole([20]), [layer])
    hook.remove()
    assert torch.equal(features.context, caught[0].reshape(20, 64))
    others = target.read(TOKENS, Segments.whole([20]), [other for other in range(3) if other != layer]).context
    assert not any(torch.equal(part, features.context) for part in others.split(64, dim=1))


@torch.no_grad()
def test_context_layers_are_concatenated_in_their_order() -> None:
    target = tiny.target()
    one, two = (target.read(TOKENS, Segments.whole([20]), [layer]).context for layer in (0, 2))
    assert torch.equal(target.read(TOKENS, Segments.whole([20]), [0, 2]).context, torch.cat([one, two], 1))
    assert target.read(TOKENS, Segments.whole([20])).context.shape == (20, 0)


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
@torch.no_grad()
def test_states_and_logits_are_hugging_faces_own(family: str) -> None:
    """Scaled embeddings, soft caps, sliding windows and sinks included (gemma3 and gpt-oss have them)."""
    model = tiny.model(family)
    oracle = tiny.oracle(model)
    theirs = oracle(TOKENS[None], output_hidden_states=True)
    target = HFTarget(model)
    features = target.read(TOKENS, Segments.whole([20]), [0, 2])
    logits = target.head(features.hidden)
    scale = float(theirs.logits.abs().max())
    torch.testing.assert_close(logits, theirs.logits[0], rtol=0, atol=2e-5 * scale)
    states = torch.cat([theirs.hidden_states[1], theirs.hidden_states[3]], -1)[0]
    torch.testing.assert_close(features.context, states, rtol=0, atol=2e-5 * float(states.abs().max()))
    torch.testing.assert_close(target.embed(TOKENS), theirs.hidden_states[0][0], rtol=0, atol=0)


def test_the_soft_cap_and_the_embedding_scale_are_there_to_be_seen() -> None:
    """Or the comparison above would prove nothing about them."""
    target = tiny.target("gemma3_text")
    assert target.head(torch.randn(4, 64) * 30).abs().max() <= 8
    raw = target.model.get_input_embeddings().weight[TOKENS]
    torch.testing.assert_close(target.embed(TOKENS), raw * 64**0.5)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("pieces", [[20], [7, 13], [1] * 20, [12, 1, 1, 6]])
@torch.no_grad()
def test_a_read_in_pieces_equals_one_read(family: str, pieces: list[int]) -> None:
    target = tiny.target(family)
    whole = target.read(TOKENS, Segments.whole([20]), [0, 2])
    pool, start, context, hidden = LanePool(3, 32), 0, [], []
    for count in pieces:
        part = target.read(TOKENS[start : start + count], Segments((1,), (start,), (count,)), [0, 2], pool)
        start += count
        context.append(part.context)
        hidden.append(part.hidden)
    for got, expected in ((torch.cat(context), whole.context), (torch.cat(hidden), whole.hidden)):
        torch.testing.assert_close(got, expected, rtol=0, atol=3e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
@torch.no_grad()
def test_rows_of_other_lanes_and_rolled_back_rows_change_nothing(family: str) -> None:
    """Three lanes in one pass; lane 0 first reads five tokens that are then rejected by not advancing."""
    target = tiny.target(family)
    pool = LanePool(3, 32)
    target.read(TOKENS[:8], Segments((0,), (0,), (8,)), [0], pool)
    target.read(torch.full((5,), 3), Segments((0,), (8,), (5,)), [0], pool)
    packed = torch.cat([TOKENS[8:12], TOKENS[:9], TOKENS[3:4]])
    got = target.read(packed, Segments((0, 2, 1), (8, 0, 0), (4, 9, 1)), [0], pool)
    whole = target.read(TOKENS, Segments.whole([20]), [0])
    alone = target.read(TOKENS[3:4], Segments.whole([1]), [0])
    expected = torch.cat([whole.hidden[8:12], whole.hidden[:9], alone.hidden])
    torch.testing.assert_close(got.hidden, expected, rtol=0, atol=3e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads(tied: bool) -> None:
    model = tiny.model(tie_word_embeddings=tied)
    target = HFTarget(model)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    hidden = torch.randn(3, 64)
    torch.testing.assert_close(target.head(hidden), hidden @ model.get_output_embeddings().weight.T)


def test_frozen_and_in_eval_mode() -> None:
    target = tiny.target()
    assert not target.model.training
    assert not any(p.requires_grad for p in target.model.parameters())
    hidden = torch.randn(2, 64, requires_grad=True)
    target.head(hidden).sum().backward()  # a gradient passes through the head, none stays in it
    assert hidden.grad is not None
    assert target.model.get_output_embeddings().weight.grad is None


# ---- stop ids (FAULTS 29) ----


@pytest.mark.parametrize(("eos", "extra", "expected"), [
    (None, (), ()), (7, (), (7,)), ([7, 9], (), (7, 9)), ([9, 7], (3, 9), (3, 7, 9)),
])  # fmt: skip
def test_stop_ids_are_all_of_the_generation_configs_and_the_users(eos, extra, expected) -> None:
    model = tiny.model()
    model.generation_config.eos_token_id = eos
    assert HFTarget(model, stop_ids=extra).stop_ids == expected


def test_text_ends_at_the_second_stop_id_in_the_middle_of_an_accepted_block() -> None:
    """The drafter is the truth itself (a block of it is accepted whole), so the cut is inside the block."""
    target = tiny.target()
    request = Request(tuple(range(5, 14)), 24)
    plain = Engine(target).generate([request])[0].response.tolist()
    at = next(i for i in range(3, 12) if plain[i] not in plain[:i])
    model = target.model
    model.generation_config.eos_token_id = [95, plain[at]]
    stopping = HFTarget(model)
    drafter = tiny.drafter(stopping)

    def truth(embeds, anchors, lanes, pool):  # states whose logits are the coming tokens
        coming = [*request.prompt, *plain]
        head = model.get_output_embeddings().weight
        rows = [head[coming[a : a + 8] + [0] * (8 - len(coming[a : a + 8]))] for a in anchors.tolist()]
        return torch.stack(rows) * 5

    drafter.draft = truth
    result = Engine(stopping, drafter).generate([request])[0]
    assert result.response.tolist() == plain[: at + 1]
    assert result.finish == "stop"
    assert int(result.blocks.committed.sum()) == at  # the token from prefill is not counted, nor the tail
    assert result.blocks.committed[0] > 1


# ---- families ----


@pytest.mark.parametrize("family", ["mamba", "qwen3_next", "gemma2", "phi3", "gpt2", "deepseek_v3"])
def test_families_that_are_not_proven_are_refused_by_name(family: str) -> None:
    with pytest.raises(UnsupportedTarget, match=f"'{family}'.*Proven families: llama"):
        check_family(AutoConfig.for_model(family))


def test_a_proven_family_with_recurrent_layers_is_refused() -> None:
    config = AutoConfig.for_model("qwen3", num_hidden_layers=2)
    config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(UnsupportedTarget, match="linear_attention"):
        check_family(config)


def test_every_proven_family_has_a_tiny_config_that_is_tested() -> None:
    assert set(PROVEN) == set(tiny.FAMILIES)


# ---- loading ----


def test_load_reads_weights_dtype_and_stop_ids_from_a_folder(tmp_path) -> None:
    import fitting

    model = tiny.model()
    model.generation_config.eos_token_id = [7, 9]
    model.save_pretrained(tmp_path)
    fitting.tokenizer().save_pretrained(tmp_path)
    loaded = HFTarget.load(str(tmp_path), TargetOptions(stop_ids=[5]))
    assert loaded.stop_ids == (5, 7, 9)
    assert loaded.dtype == torch.float32
    whole = Segments.whole([20])
    assert torch.equal(loaded.read(TOKENS, whole).hidden, HFTarget(model).read(TOKENS, whole).hidden)
    assert HFTarget.load(str(tmp_path), TargetOptions(dtype="bfloat16")).dtype == torch.bfloat16
    assert len(loaded.tokenizer) == tiny.VOCAB
