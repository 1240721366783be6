"""The target: embed, read, head. Everything else in the project knows a target only through these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from adaflash.linear import PackedLinear, pack_linears
from adaflash.targets.attention import NAME, Layout, PackedPass
from adaflash.targets.families import check_family, final_softcap
from adaflash.targets.kv import PoolCache
from adaflash.targets.ranks import Ranks
from adaflash.types import Features, KeyValues, Segments


@dataclass
class TargetOptions:
    """How the frozen target is loaded.

    Attributes:
        dtype: Number format of the target's weights. `auto` is bfloat16 where the machine multiplies it natively (a GPU,
            a CPU with AMX), else float32. The drafter keeps float32 master weights whatever this is.
        mask_token: Reserved special token that fills the empty slots of a block, for tokenizers without a mask token
            and models without a spare embedding row.
        revision: Branch, tag or commit on the Hub.
        stop_ids: More token ids that end a response, beside those of the generation config.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "float32"
    mask_token: str = ""
    revision: str = "main"
    stop_ids: list[int] | None = None

    @property
    def format(self) -> torch.dtype:
        """`dtype` on this machine."""
        if self.dtype != "auto":
            return getattr(torch, self.dtype)
        cpu = torch.cpu.get_capabilities()
        native = torch.cuda.is_available() or bool(cpu.get("amx_bf16") or cpu.get("avx512_bf16"))
        return torch.bfloat16 if native else torch.float32


class HFTarget:
    """A frozen Hugging Face causal LM, read over packed rows.

    Not an `nn.Module` on purpose: the target belongs to no optimizer, checkpoint or `train()` switch.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, stop_ids: Sequence[int] = ()) -> None:
        check_family(model.config)
        self.model = model.eval().requires_grad_(False)
        self.model.set_attn_implementation(NAME)
        pack_linears(self.model)
        self.config = model.config
        self.tokenizer = tokenizer
        self._extra_stop_ids = tuple(stop_ids)
        self._softcap = final_softcap(model.config)
        self.ranks = Ranks()

    def __deepcopy__(self, memo: dict[int, Any]) -> HFTarget:
        """A copy of what holds a target (a module whose weights are averaged) shares it: it never changes."""
        return self

    @classmethod
    def load(cls, name: str, options: TargetOptions | None = None) -> HFTarget:
        """Load from a fetched name, a local directory or a Hub id.

        Raises:
            TargetNotFound: the name is neither fetched nor a directory with a model.
            UnsupportedTarget: the model's family is not proven.
        """
        from adaflash.targets.fetch import resolve

        options = options or TargetOptions()
        path = resolve(name)
        check_family(AutoConfig.from_pretrained(path, revision=options.revision))
        with _no_bar():
            model = AutoModelForCausalLM.from_pretrained(
                path, revision=options.revision, dtype=options.format, attn_implementation=NAME
            )
        tokenizer = AutoTokenizer.from_pretrained(path, revision=options.revision)
        return cls(model, tokenizer, options.stop_ids or ())

    def to(self, device: torch.device) -> HFTarget:
        """Move the weights; returns self."""
        self.model.to(device)
        return self

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def max_positions(self) -> int:
        return int(self.config.max_position_embeddings)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, first to last."""
        return self.model.base_model.layers

    @property
    def final_norm(self) -> nn.Module:
        return self.model.base_model.norm

    @property
    def embedding_rows(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Every token id that ends a response: all of the generation config's, and the user's."""
        eos = self.model.generation_config.eos_token_id if self.model.generation_config else None
        listed = [eos] if isinstance(eos, int) else list(eos or [])
        return tuple(sorted({*listed, *self._extra_stop_ids}))

    def autocast(self) -> AbstractContextManager[object]:
        """A drafter's float32 weights compute in this target's half precision here, if it has one."""
        half = self.dtype in (torch.bfloat16, torch.float16)
        return torch.autocast(self.device.type, self.dtype) if half else nullcontext()

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings [..., H] of token ids [...], scaled as the family does."""
        return self.model.get_input_embeddings()(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of post-norm hidden states [..., H], soft-capped as the family does."""
        return self._capped(self.model.get_output_embeddings()(hidden.to(self.dtype)))

    def head_rows(self, tokens: Tensor) -> Callable[[Tensor], Tensor]:
        """`head` for some tokens [n] only: states [..., H] -> logits [..., n]. Their rows are copied once."""
        head = self.model.get_output_embeddings()
        rows = PackedLinear(self.hidden_size, len(tokens), head.bias is not None, device="meta")
        rows.weight = nn.Parameter(head.weight.detach()[tokens], requires_grad=False)
        if head.bias is not None:
            rows.bias = nn.Parameter(head.bias.detach()[tokens], requires_grad=False)
        return lambda hidden: self._capped(rows(hidden.to(self.dtype)))

    def _capped(self, logits: Tensor) -> Tensor:
        if self._softcap is None:
            return logits
        return torch.tanh(logits / self._softcap) * self._softcap

    def read(
        self,
        tokens: Tensor,
        segments: Segments,
        context_layers: Sequence[int] = (),
        pool: KeyValues | None = None,
        layout: Layout = "auto",
    ) -> Features:
        """Read packed tokens [M]; with a pool they continue its lanes, and are stored there.

        Context layer id l means the output of decoder layer l. The layout of attention changes the speed only.
        """
        self.ranks.before_pass()
        return self.run(tokens, segments, context_layers, pool, layout)

    def run(
        self,
        tokens: Tensor,
        segments: Segments,
        context_layers: Sequence[int] = (),
        pool: KeyValues | None = None,
        layout: Layout = "auto",
    ) -> Features:
        """`read` without a word to other ranks; see there."""
        out = self.model.base_model(
            input_ids=tokens[None],
            position_ids=segments.positions.to(tokens.device)[None],
            cache=None if pool is None else PoolCache(pool, segments, self.num_layers),
            use_cache=pool is not None,
            output_hidden_states=[layer + 1 for layer in context_layers] if context_layers else False,
            packed=PackedPass(segments, pool, tokens.device, layout, self.dtype),
        )
        hidden = out.last_hidden_state[0]
        states = [out.hidden_states[layer + 1][0] for layer in context_layers]
        context = torch.cat(states, dim=-1) if states else hidden[:, :0]
        return Features(context, hidden)


@contextmanager
def _no_bar() -> Iterator[None]:
    """Without transformers' own progress bar: loading is short, and it would tear our output."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
