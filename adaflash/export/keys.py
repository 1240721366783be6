"""Names of a drafter's tensors: the documented ones, and what other projects call them.

The documented names are those of DFlash checkpoints of z-lab, SpecForge and SGLang (DESIGN section 3). TorchSpec calls
the encoder `context_proj` and `context_norm`; transformers' own class calls it `encoder.fc`.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

HEAD = "thresh_head_two_model."  # the paper's length head, as SGLang's AdaFlash reads it
POLICY_HEAD = "head."  # the same tensors in `AdaptiveLength.state_dict()`
# Copies of the target that some projects keep beside the drafter; they must equal the target's own.
BORROWED = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
MAPS = ("d2t", "t2d")  # of a drafter that cannot say all of the target's tokens; see `adaflash.vocabulary`
_LAYER = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm",
    "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm",
)  # fmt: skip
_WRAPPERS = ("draft_model.", "model.", "module.")
_ELSEWHERE = {
    "context_proj.": "fc.",
    "context_norm.": "hidden_norm.",
    "final_norm.": "norm.",
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
}
_BUFFERS = ("inv_freq", "cos_cached", "sin_cached")  # rotary tables: made from the config, never read


def drafter_keys(num_layers: int) -> set[str]:
    """Exactly the tensors of a drafter with so many layers."""
    layers = {f"layers.{i}.{part}.weight" for i in range(num_layers) for part in _LAYER}
    return {"fc.weight", "hidden_norm.weight", "norm.weight"} | layers


def documented(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under the documented names, without rotary tables; unknown names stay as they are."""
    return {_rename(_unwrap(name)): value for name, value in tensors.items() if not name.endswith(_BUFFERS)}


def native(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Documented names -> those of transformers' own DFlash class."""
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    return {names.get(name, name): value for name, value in tensors.items()}


def listed(names: Iterable[str], most: int = 6) -> str:
    """Names for an error message: the first few, and how many more."""
    ordered = sorted(names)
    rest = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + rest


def _unwrap(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper)
    return name


def _rename(name: str) -> str:
    for theirs, ours in _ELSEWHERE.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name
