"""From GGUF to a Hugging Face folder: a tiny file made here, and the real target where it was fetched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from adaflash.targets.fetch import fetched_path
from adaflash.targets.gguf import ConversionError, _check, convert

REAL = fetched_path("smollm2-135m")
WIDE, INNER, HEADS, LAYERS = 64, 128, 4, 2
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def words() -> tuple[list[str], list[str]]:
    """A byte-level vocabulary: three special tokens, all bytes, and merges of two spaces and two line ends."""
    from tokenizers.pre_tokenizers import ByteLevel

    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "ĠĠ", "ĊĊ"], ["Ġ Ġ", "Ċ Ċ"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of two layers with Q4_1 matrices and the `smollm` kind of vocabulary."""
    gguf = pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tokens, merges = words()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDE)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int) -> None:
        kind = gguf.GGMLQuantizationType.Q4_1
        packed = gguf.quants.quantize(rng.normal(size=(rows, columns)).astype(np.float32), kind)
        writer.add_tensor(name, packed, raw_dtype=kind)

    matrix("token_embd.weight", len(tokens), WIDE)
    writer.add_tensor("output_norm.weight", np.ones(WIDE, np.float32))
    for layer in range(LAYERS):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"blk.{layer}.{part}.weight", WIDE, WIDE)
        matrix(f"blk.{layer}.ffn_gate.weight", INNER, WIDE)
        matrix(f"blk.{layer}.ffn_up.weight", INNER, WIDE)
        matrix(f"blk.{layer}.ffn_down.weight", WIDE, INNER)
        for part in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{part}.weight", np.ones(WIDE, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def folder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converted") / "tiny"
    convert(source, out)
    return out


def test_weights_are_the_dequantised_ones_and_fp32(source: Path, folder: Path) -> None:
    import gguf

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight  # no output matrix in the file: tied
    assert model.config.rope_parameters["rope_theta"] == 50000.0
    tensors = {t.name: t for t in gguf.GGUFReader(source).tensors}
    for name, parameter in (
        ("token_embd.weight", model.model.embed_tokens.weight),
        ("blk.1.ffn_down.weight", model.model.layers[1].mlp.down_proj.weight),
    ):
        wanted = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)
        assert np.array_equal(parameter.detach().numpy(), wanted)


def test_the_folder_is_an_ordinary_one(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["rope_theta"] == 50000.0  # where transformers 4 looks for it
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    assert "local_files_only" not in tokenizer
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "again")  # a quantised one would refuse
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


def test_tokenizer_chat_template_and_stop_id(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens, _ = words()
    assert len(tokenizer) == len(tokens)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], return_dict=False)
    assert ids == [1, tokens.index("a"), 2]
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id == 2


def test_digits_are_split_off_first(folder: Path) -> None:
    """White space before a digit is one token, as the vocabulary was trained; plain GPT-2 rules give two."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("a\n\n12  3") == ["a", "ĊĊ", "1", "2", "ĠĠ", "3"]


def test_what_is_not_the_model_that_was_read_is_refused(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def refused(match: str, change: Any) -> None:
        out = tmp_path / match.replace(" ", "-")
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        change(out)
        with pytest.raises(ConversionError, match=match):
            _check(out, model, tokenizer)

    def halve(out: Path) -> None:
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16).save_pretrained(out)

    def disturb(out: Path) -> None:
        other = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            other.model.layers[1].mlp.down_proj.weight[0, 0] += 1
        other.save_pretrained(out)

    refused("not every weight is fp32", halve)
    refused("down_proj.weight differs", disturb)
    refused("chat template is missing", lambda out: (out / "chat_template.jinja").unlink())


@pytest.mark.real
@pytest.mark.skipif(REAL is None, reason="adaflash fetch smollm2-135m was not run")
def test_the_real_target_reloads_with_equal_logits(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(str(REAL)).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(REAL))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model.generation_config.eos_token_id, len(tokenizer), bool(tokenizer.chat_template)) == (2, 49152, True)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        logits = model(ids).logits
        assert torch.equal(logits, again(ids).logits)
    # Read off the GGUF itself (transformers 5.24, fp32): " Paris" leads.
    assert logits[0, -1].topk(2).indices.tolist() == [7042, 260]
    assert logits[0, -1].topk(2).values.tolist() == pytest.approx([17.3713, 14.8886], abs=2e-3)
