"""The formats a drafter can be written in: what its config says, which tensors it has, how it is served.

| | sglang (our own) | vllm | hf |
|---|---|---|---|
| read by | SGLang, z-lab, SpecForge, AdaFlash | vLLM, `speculators` | transformers' own DFlash generator |
| context layer i | `target_layer_ids` i | `aux_hidden_state_layer_ids` i + 1 | `target_layer_ids` i |
| block | `block_size`, the anchor counts | the same; speculative tokens = block_size - 1 | `block_size` |
| paper's length head | `thresh_head_two_model.*` | sidecar | sidecar |
| fewer tokens than the target | refused | `d2t`, `t2d` and the rows as `lm_head` | refused |

`adaflash` is the first of them with `d2t` and `t2d` where there are some: the project's own, which no server need know.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adaflash.errors import UserError
from adaflash.export.config import dflash_config, layer_fields
from adaflash.export.keys import native
from adaflash.export.pairing import target_name

if TYPE_CHECKING:
    from adaflash.drafters.dflash import DFlash
    from adaflash.targets.hf import HFTarget

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Format:
    """One way to write a drafter."""

    config: Callable[[DFlash, HFTarget, str, int], dict[str, Any]]  # drafter, target, dtype, width of the length head
    tensors: Callable[[Tensors, HFTarget], Tensors]  # from documented names to what is stored
    serve: Callable[[Path, str, int], str]  # folder, target, block_size -> a command
    head_inside: bool = False  # the paper's length head lies among the drafter's tensors
    cannot_limit: str = ""  # who reads it and would take the target's whole head for a drafter with fewer tokens

    def check(self, drafter: DFlash) -> None:
        """Raise UserError for a drafter that its readers would read wrongly."""
        if drafter.said is not None and self.cannot_limit:
            raise UserError(
                f"the drafter can say {drafter.said.describe()}; {self.cannot_limit} knows no d2t and t2d, and would draft "
                "with all rows of the target's head. Export it --to vllm, keep it --to adaflash, or train one without "
                "model.drafter.init_args.vocabulary"
            )


def _own_config(drafter: DFlash, target: HFTarget, dtype: str, bottleneck: int) -> dict[str, Any]:
    said = drafter.said
    limit = {} if said is None else {"draft_vocab_size": len(said.tokens)}
    return {**dflash_config(drafter, target, dtype, bottleneck), **limit}


def _go_on(folder: Path, target: str, block_size: int) -> str:
    return (
        f"adaflash fit -c experiment/adaflash --target {shlex.quote(target)} "
        f"--model.drafter.init_args.block_size {block_size} --model.drafter.init_args.checkpoint {shlex.quote(str(folder))}"
    )


def _as_they_are(tensors: Tensors, target: HFTarget) -> Tensors:
    return tensors


def _serve_sglang(folder: Path, target: str, block_size: int) -> str:
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path {shlex.quote(str(folder))} --speculative-num-draft-tokens {block_size}"
    )


def _vllm_config(drafter: DFlash, target: HFTarget, dtype: str, bottleneck: int) -> dict[str, Any]:
    layers = {"model_type": "qwen3", **layer_fields(drafter), "tie_word_embeddings": False}
    proposal = {"proposal_type": "greedy", "speculative_tokens": drafter.block_size - 1}
    verifier = {"name_or_path": target_name(target), "architectures": list(target.config.architectures or [])}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "dtype": dtype,
        "torch_dtype": dtype,
        "transformer_layer_config": layers,
        "draft_vocab_size": drafter.config.vocab_size if drafter.said is None else len(drafter.said.tokens),
        "target_hidden_size": target.hidden_size,
        "block_size": drafter.block_size,
        "mask_token_id": drafter.mask_id,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in drafter.context_layers],
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "tie_word_embeddings": False,
    }


def _vllm_tensors(tensors: Tensors, target: HFTarget) -> Tensors:
    """Embedding and head are the target's, and are not stored; a family that scales its embedding gets a scaled copy.

    A server that shares the embedding would hand the drafter unscaled rows, which it has never seen. A drafter with fewer
    tokens brings its rows of the head: readers cannot cut them out of the target's.
    """
    if "t2d" in tensors:
        head = target.model.get_output_embeddings().weight.detach()
        dtype = next(value.dtype for value in tensors.values() if value.is_floating_point())
        tensors = {**tensors, "lm_head.weight": head.cpu()[tensors["t2d"]].to(dtype)}
    if not scales_embedding(target):
        return tensors
    rows = target.embed(torch.arange(target.embedding_rows, device=target.device))
    return {**tensors, "embed_tokens.weight": rows.detach().to("cpu", next(iter(tensors.values())).dtype)}


def _serve_vllm(folder: Path, target: str, block_size: int) -> str:
    how = json.dumps({"method": "dflash", "model": str(folder), "num_speculative_tokens": block_size - 1})
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(how)}"


def _hf_config(drafter: DFlash, target: HFTarget, dtype: str, bottleneck: int) -> dict[str, Any]:
    """The class of transformers that is DFlash, with full attention in every layer (its default is sliding)."""
    left_out = {"sliding_window", "use_sliding_window", "attention_bias", "tie_word_embeddings", "initializer_range"}
    return {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        "dtype": dtype,
        **{name: value for name, value in layer_fields(drafter).items() if name not in left_out},
        "block_size": drafter.block_size,
        "mask_token_id": drafter.mask_id,
        "target_layer_ids": list(drafter.context_layers),
        "num_target_layers": target.num_layers,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _hf_tensors(tensors: Tensors, target: HFTarget) -> Tensors:
    return native(tensors)


def _serve_hf(folder: Path, target: str, block_size: int) -> str:
    return (
        "python -c 'import sys, torch\n"
        "from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer\n"
        "folder, name, text = sys.argv[1:]\n"
        'target = AutoModelForCausalLM.from_pretrained(name, attn_implementation="eager")\n'
        'drafter = AutoModel.from_pretrained(folder, dtype=target.dtype, attn_implementation="eager")\n'
        "tokenizer = AutoTokenizer.from_pretrained(name)\n"
        'ids = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, '
        'return_tensors="pt", return_dict=True)\n'
        'out = target.generate(**ids, assistant_model=drafter, speculation_type="dflash", do_sample=False, '
        "max_new_tokens=64)\n"
        f"print(tokenizer.decode(out[0]))' {shlex.quote(str(folder))} {shlex.quote(target)} 'What is 17 times 24?'"
    )


def scales_embedding(target: HFTarget) -> bool:
    """Whether the family multiplies its embedding rows before the first layer (Gemma does)."""
    ids = torch.arange(min(4, target.embedding_rows), device=target.device)
    return not torch.equal(target.embed(ids), target.model.get_input_embeddings().weight[ids])


FORMATS: dict[str, Format] = {
    "adaflash": Format(_own_config, _as_they_are, _go_on, head_inside=True),
    "sglang": Format(dflash_config, _as_they_are, _serve_sglang, True, "SGLang (and z-lab's and SpecForge's code)"),
    "vllm": Format(_vllm_config, _vllm_tensors, _serve_vllm),
    "hf": Format(_hf_config, _hf_tensors, _serve_hf, False, "transformers' DFlash generator"),
}
OWN = FORMATS["adaflash"]
