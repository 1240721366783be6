"""Run by another Python: load a vLLM export with `speculators` and write the block logits it computes for the probe.

usage: python speculators_logits.py EXPORT_FOLDER OUT.npz
"""

import sys
from pathlib import Path

import numpy as np
import torch
from speculators import SpeculatorModel, SpeculatorModelConfig


def main() -> None:
    folder, out = Path(sys.argv[1]), sys.argv[2]
    config = SpeculatorModelConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(str(folder), config=config, dtype=torch.float32).eval()
    probe = np.load(folder / "probe.npz")
    logits = {}
    for i in range(2):
        tokens, context = torch.from_numpy(probe[f"tokens_{i}"]), torch.from_numpy(probe[f"context_{i}"])
        anchor, beyond = len(context), config.block_size + 1
        # Rows at and after the anchor are noise: nobody may look at them.
        torch.manual_seed(i)
        states = torch.cat([context, torch.randn(beyond, context.shape[1])])[None]
        ids = torch.cat([tokens, tokens[:1].expand(beyond - 1)])[None]
        mask = torch.zeros(1, len(ids[0]), dtype=torch.long)
        mask[0, anchor] = 1  # the only place where a block may start
        with torch.no_grad():
            _, block, *_ = model._backbone_forward(
                states, ids, mask, torch.zeros(1, len(ids[0]), model.hidden_size), torch.zeros_like(ids), max_anchors=1
            )
        logits[f"logits_{i}"] = block[0].numpy()
    d2t = np.zeros(config.transformer_layer_config.vocab_size, int) if model.d2t is None else model.d2t.numpy()
    np.savez(out, mask=config.mask_token_id, kind=type(model).__name__, d2t=d2t, **logits)


if __name__ == "__main__":
    main()
