"""GGUF -> an ordinary Hugging Face directory: de-quantised fp32 weights, tokenizer, chat template, generation config.

Source: transformers' own GGUF reader, which de-quantises on loading; this file undoes what it leaves behind (a model
still marked as quantised, which refuses to be saved; a tokenizer without the vocabulary's digit rule) and then proves
that what lies on disk is the model that was read.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

PROBE = "The capital of France is"
MARKS = ("hf_quantizer", "quantization_method", "is_quantized")


class ConversionError(RuntimeError):
    """What was written is not the model that was read; names the part that differs."""


def convert(source: Path, out: Path) -> None:
    """Write the model of the GGUF file `source` into the folder `out` and check it.

    Raises ConversionError when the written directory does not load as a plain fp32 model with equal tensors, equal
    logits on a short input, a chat template and a stop id.
    """
    with _quiet():
        model, tokenizer = _read(source)
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        _make_plain(out)
        _check(out, model, tokenizer)


def _read(source: Path) -> tuple[Any, Any]:
    """The model (fp32, no mark of a quantised one) and the tokenizer of a GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"gguf_file": source.name, "local_files_only": True}
    # dequantize=True: otherwise an installed `kernels` package would keep the weights packed.
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **where
    )
    for mark in MARKS:
        vars(model).pop(mark, None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
    _restore_digit_rule(tokenizer, source)
    tokenizer.model_max_length = model.config.max_position_embeddings
    return model.eval(), tokenizer


def _restore_digit_rule(tokenizer: Any, source: Path) -> None:
    """Split digits off before the byte-level rule, as a vocabulary of the kind `smollm` was trained.

    The GGUF names the rule (`tokenizer.ggml.pre = smollm`, which llama.cpp honours); transformers 5.24 does not know
    that name and falls back to plain GPT-2. The ids differ only where white space of two or more characters meets a
    digit ("\\n\\n1."): there the fallback never yields the tokens the model itself writes.
    """
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    rule = GGUFReader(source).get_field("tokenizer.ggml.pre")
    if rule is not None and rule.contents() == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


def _make_plain(out: Path) -> None:
    """Drop what only this conversion knows, and add what transformers 4 (older servers) reads under other names."""

    def edit(name: str, drop: tuple[str, ...], **values: Any) -> None:
        path = out / name
        content = {key: value for key, value in json.loads(path.read_text()).items() if key not in drop}
        path.write_text(json.dumps(content | values, indent=2, ensure_ascii=False) + "\n")

    rope = json.loads((out / "config.json").read_text())["rope_parameters"]
    edit("config.json", ("_name_or_path", "_model_name_or_path"), rope_theta=rope["rope_theta"], torch_dtype="float32")
    edit("generation_config.json", ("_from_model_config",))
    edit(
        "tokenizer_config.json", ("is_local", "local_files_only", "backend"), tokenizer_class="PreTrainedTokenizerFast"
    )
    for path in out.iterdir():
        path.chmod((out / "config.json").stat().st_mode)  # safetensors are written for their owner only


def _check(out: Path, model: Any, tokenizer: Any) -> None:
    """Load `out` as anybody would and compare it with the model in memory."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    again = AutoModelForCausalLM.from_pretrained(out, local_files_only=True).eval()
    words = AutoTokenizer.from_pretrained(out, local_files_only=True)
    _require(not getattr(again, "is_quantized", False), "the model is still marked as quantised", out)
    _require({p.dtype for p in again.parameters()} == {torch.float32}, "not every weight is fp32", out)
    before, after = model.state_dict(), again.state_dict()
    _require(before.keys() == after.keys(), "the tensors' names differ", out)
    for name, tensor in before.items():
        _require(torch.equal(tensor, after[name]), f"tensor {name} differs", out)
    _require(bool(words.chat_template), "the chat template is missing", out)
    _require(words.chat_template == tokenizer.chat_template, "the chat template differs", out)
    _require(again.generation_config.eos_token_id == tokenizer.eos_token_id, "the stop id is missing", out)
    ids = words(PROBE, return_tensors="pt").input_ids
    _require(ids.tolist() == [tokenizer(PROBE).input_ids], "the tokenizer gives other ids", out)
    with torch.no_grad():
        gap = (model(ids).logits - again(ids).logits).abs().max().item()
    _require(gap <= 1e-5, f"the logits differ by {gap:.2g}", out)


def _require(fact: bool, problem: str, out: Path) -> None:
    """Raise ConversionError about `out` unless the fact holds."""
    if not fact:
        raise ConversionError(f"{problem} in the converted model ({out})")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' own bars and hints, which would tear the caller's progress line."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):  # one bar of the GGUF reader obeys no switch
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
