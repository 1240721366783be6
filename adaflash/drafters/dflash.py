"""DFlash: a block-diffusion drafter that reads the target's hidden states through its keys and values.

Checkpoint keys and config fields are those of DFlash checkpoints as SGLang loads them (DESIGN section 3).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

from adaflash.blocks import slot_positions
from adaflash.drafters.base import Drafter, check_context_layers, default_context_layers
from adaflash.drafters.layers import ContextSpan, DraftLayer, PooledBlocks, block_attention
from adaflash.drafters.warm_start import copy_from_target
from adaflash.errors import UserError
from adaflash.linear import pack_linears
from adaflash.targets.mask import choose_mask_id
from adaflash.types import Blocks, KeyValues, Segments
from adaflash.vocabulary import DraftVocabulary, read_vocabulary

if TYPE_CHECKING:
    from adaflash.export.spec import DraftSpec
    from adaflash.targets.hf import HFTarget


class DFlash(Drafter):
    """Block-diffusion drafter.

    Args:
        num_layers: Decoder layers of the drafter; independent of the number of context layers.
        block_size: Anchor and candidates together; a block proposes block_size - 1 tokens.
        num_context_layers: How many layers of the target are read, spread over its depth.
        context_layers: Exact layer ids instead; id l is the output of decoder layer l.
        mask_id: Token id that fills the empty slots; -1 chooses a safe one and says which.
        mask_token: Reserved special token for targets without a mask token or spare row (linked from the target).
        init: Start from the target's own last layers, or at random.
        intermediate_size: Width of the MLP; 0 takes the target's.
        checkpoint: Go on from this drafter: a folder or Hub id of z-lab, SGLang, SpecForge, vLLM speculators, TorchSpec,
            AdaFlash or `adaflash export`. Its layers, context layers and mask token are taken over; block_size must be
            its own. The folder must stay where it is while runs that name it are used.
        vocabulary: File of the tokens it can say, the most frequent ones of its traffic (`adaflash vocabulary` counts
            them): fewer rows of the output head to compute. Empty: all of the target's, or the checkpoint's.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(
        self,
        num_layers: int = 5,
        block_size: int = 16,
        num_context_layers: int = 5,
        context_layers: list[int] = [],  # noqa: B006  (never changed; jsonargparse reads the type from it)
        mask_id: int = -1,
        init: Literal["target", "random"] = "target",
        intermediate_size: int = 0,
        checkpoint: str = "",
        vocabulary: str = "",
    ) -> None:
        super().__init__()
        key = "model.drafter.init_args"
        if block_size < 2:
            raise UserError(
                f"{key}.block_size is {block_size}; a block needs the anchor and at least one candidate: >= 2"
            )
        if num_layers < 1:
            raise UserError(f"{key}.num_layers is {num_layers}; at least 1 is needed")
        if num_context_layers < 1:
            raise UserError(f"{key}.num_context_layers is {num_context_layers}; at least 1 is needed")
        self.num_layers, self.block_size, self.init = num_layers, block_size, init
        self.context_layers = tuple(context_layers)
        self.num_context_layers, self.mask_id = num_context_layers, mask_id
        self.mask_source = ""
        self.intermediate_size, self.checkpoint, self.vocabulary = intermediate_size, checkpoint, vocabulary
        self._maps: dict[str, Tensor] = {}  # of a checkpoint: d2t and t2d

    @property
    def said(self) -> DraftVocabulary | None:
        return DraftVocabulary.from_maps(self.d2t, self.t2d) if "d2t" in self._buffers else None

    def limit(self, said: DraftVocabulary) -> None:
        """Let it say these tokens and no others from now on."""
        self._limit(said.maps())

    def _limit(self, maps: dict[str, Tensor]) -> None:
        for name, value in maps.items():
            self.register_buffer(name, value.clone())

    def remember(self, weights: dict[str, Tensor]) -> None:
        """The vocabulary of a checkpoint: the file it was counted into need not be there any more."""
        self._maps = {name: weights[name] for name in ("d2t", "t2d") if name in weights}

    def build(self, target: HFTarget, mask_token: str = "") -> None:
        """Make the weights for this target; calling it again does nothing.

        Raises:
            MaskTokenError: no safe mask token.
            ValueError: context layers that the target does not have.
            UserError: the checkpoint is not a drafter for this target, or the vocabulary file not one of it.
        """
        if self.built:
            return
        if self.vocabulary and not self._maps:
            self._maps = read_vocabulary(self.vocabulary, target.embedding_rows, target.stop_ids).maps()
        if self.checkpoint:
            from adaflash.export.importer import read_for  # late: the exporter knows drafters

            spec, tensors, _ = read_for(self.checkpoint, target)
            self.adopt(spec, tensors, target)
            return
        if not self.context_layers:
            self.context_layers = default_context_layers(target.num_layers, self.num_context_layers)
        check_context_layers(self.context_layers, target.num_layers, "model.drafter.init_args.context_layers")
        self.mask_id, self.mask_source = choose_mask_id(
            target.embedding_rows, target.tokenizer, target.stop_ids, self.mask_id, mask_token
        )
        self.config = drafter_config(target, self.num_layers, self.intermediate_size)
        self._make(self.config)
        if self.init == "target":
            copy_from_target(self, target)

    def adopt(self, spec: DraftSpec, tensors: dict[str, Tensor], target: HFTarget) -> None:
        """Take over architecture and weights of a drafter that has been read and checked; weights become float32."""
        from adaflash.export.importer import check_settings

        check_settings(self, spec)
        self.context_layers, self.num_layers = spec.context_layers, spec.config.num_hidden_layers
        self.num_context_layers, self.intermediate_size = len(spec.context_layers), spec.config.intermediate_size
        self.mask_id, self.mask_source = spec.mask_id, f"the drafter of {spec.folder}"
        self.config = spec.config
        self.config.vocab_size = target.embedding_rows
        theirs: dict[str, Tensor] = {name: tensors[name] for name in ("d2t", "t2d") if name in tensors}
        self._maps = self._maps or theirs
        tensors = {name: value for name, value in tensors.items() if name not in theirs} | self._maps
        self._make(self.config)
        self.load_state_dict({name: as_weight(value) for name, value in tensors.items()})

    def _make(self, config: Qwen3Config) -> None:
        self.fc = nn.Linear(len(self.context_layers) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(self.num_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = Qwen3RotaryEmbedding(config)
        self._limit(self._maps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range)
        pack_linears(self)

    def forward(self, embeds: Tensor, blocks: Blocks, context: Tensor, segments: Segments) -> Tensor:
        """Training: hidden states [N, B, H] of blocks over whole trajectories (see `Drafter.forward`)."""
        encoded = self._encode(context)
        context_angles = self._angles(segments.positions.to(encoded.device))
        counts = torch.bincount(blocks.rows, minlength=len(segments.counts)).cumsum(0).tolist()
        block_ranges = list(zip([0, *counts[:-1]], counts, strict=True))
        angles = self._angles(slot_positions(blocks.anchors, self.block_size))
        states = embeds
        for layer in self._stack():
            keys, values = layer.key_values(encoded, context_angles)
            spans = [
                ContextSpan(
                    keys[row : row + count].transpose(0, 1), values[row : row + count].transpose(0, 1),
                    first, last, blocks.anchors[first:last],
                )
                for row, count, (first, last) in zip(segments.offsets, segments.counts, block_ranges, strict=False)
            ]  # fmt: skip
            states = layer(states, angles, partial(block_attention, spans))
        return self.norm(states)

    def ingest(self, context: Tensor, segments: Segments, pool: KeyValues) -> None:
        """Decoding: store the keys and values of newly committed context rows [M, C]."""
        encoded = self._encode(context)
        angles = self._angles(segments.positions.to(encoded.device))
        for index, layer in enumerate(self._stack()):
            keys, values = layer.key_values(encoded, angles)
            pool.write(index, keys.to(values.dtype), values, segments)

    def draft(self, embeds: Tensor, anchors: Tensor, lanes: list[int], pool: KeyValues) -> Tensor:
        """Decoding: hidden states [R, B, H] of one block a lane, reading the pool before `anchors` [R]."""
        angles = self._angles(slot_positions(anchors, self.block_size))
        blocks = PooledBlocks.of(pool, lanes, anchors.tolist(), self.block_size, embeds)
        states = embeds
        for index, layer in enumerate(self._stack()):
            states = layer(states, angles, partial(blocks.attend, index))
        return self.norm(states)

    def units(self) -> list[tuple[nn.Module, tuple[str, ...]]]:
        """Layer by layer."""
        return [(layer, ("key_values",)) for layer in self.layers]

    def _stack(self) -> list[DraftLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    def _encode(self, context: Tensor) -> Tensor:
        """Context rows [M, C] -> [M, H], once for all layers."""
        return self.hidden_norm(self.fc(context.to(self.fc.weight.dtype)))

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        flat = positions.reshape(1, -1)
        cos, sin = self.rotary(torch.zeros(1, dtype=self.fc.weight.dtype, device=positions.device), flat)
        return cos.reshape(*positions.shape, -1), sin.reshape(*positions.shape, -1)


def as_weight(value: Tensor) -> Tensor:
    """A tensor of a checkpoint as it is trained: weights in float32, maps of the vocabulary as they are."""
    return value.float() if value.is_floating_point() else value


def drafter_config(target: HFTarget, num_layers: int, intermediate_size: int) -> Qwen3Config:
    """Qwen3-style config of a drafter for this target: its widths, heads and rotary base."""
    text = target.config
    heads = int(text.num_attention_heads)
    return Qwen3Config(
        vocab_size=target.embedding_rows,
        hidden_size=text.hidden_size,
        intermediate_size=intermediate_size or text.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        max_position_embeddings=text.max_position_embeddings,
        rms_norm_eps=text.rms_norm_eps,
        rope_parameters=_rope(text.rope_parameters),
        tie_word_embeddings=bool(text.tie_word_embeddings),
    )


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings of full attention; families with sliding layers keep one set for each kind of layer."""
    return dict(parameters.get("full_attention", parameters))
