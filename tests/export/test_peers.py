"""Other projects read what we write: `speculators` computes the same logits, transformers' generator the same drafts."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from exporting import make_source, save_target
from transformers import AutoModel, AutoModelForCausalLM
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from adaflash.decoding.engine import Engine
from adaflash.export.command import export_drafter
from adaflash.export.own import load_drafter
from adaflash.export.probe import read_probe, states_after
from adaflash.targets.hf import HFTarget
from adaflash.types import Request
from adaflash.vocabulary import DraftVocabulary, write_vocabulary

SCRIPT = Path(__file__).parent / "peers" / "speculators_logits.py"


@pytest.mark.peer
@pytest.mark.parametrize("family", ["qwen3", "llama"])  # tied and untied
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("vocabulary", [0, 40])  # tokens the drafter can say; 0: all
def test_speculators_computes_our_logits(
    family: str, dtype: Any, vocabulary: int, tmp_path: Path, speculators: str
) -> None:
    target = HFTarget.load(save_target(tmp_path / "target", family))
    folder, source = tmp_path / "out", make_source(target)
    if vocabulary:
        file, said = (
            tmp_path / "words.json",
            DraftVocabulary.of(torch.arange(1, tiny.VOCAB, 2)[:vocabulary], tiny.VOCAB),
        )
        write_vocabulary(file, said, {})
        source = replace(source, drafter=tiny.drafter(target, noise=0.05, vocabulary=str(file)))
    export_drafter(source, "vllm", folder, dtype)
    done = subprocess.run(
        [speculators, str(SCRIPT), str(folder), str(tmp_path / "logits.npz")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = np.load(tmp_path / "logits.npz")
    assert str(theirs["kind"]) == "DFlashDraftModel" and int(theirs["mask"]) == tiny.VOCAB - 1
    drafter, _ = load_drafter(folder, target)
    for i, probe in enumerate(read_probe(folder)):
        head, logits = drafter.head(target), torch.from_numpy(theirs[f"logits_{i}"])[1:]
        ours = head(states_after(drafter, target, int(probe.tokens[-1]), probe.context)[0, 1:])
        assert logits.shape[1] == (vocabulary or tiny.VOCAB)
        close = 1e-4 if not vocabulary or dtype == "float32" else 0.1  # rows of the head are rounded with the rest
        torch.testing.assert_close(logits, ours, atol=close, rtol=close)
        places = logits.argmax(-1)
        assert (places + torch.from_numpy(theirs["d2t"])[places]).tolist() == probe.candidates.tolist()


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_transformers_generator_drafts_our_candidates(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hf export as a stranger loads it: AutoModel, AutoModelForCausalLM, generate."""
    target = HFTarget.load(save_target(tmp_path / "target", family))
    folder = tmp_path / "out"
    export_drafter(make_source(target), "hf", folder, "float32")
    theirs, report = AutoModel.from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "target", attn_implementation="eager")
    drafter, _ = load_drafter(folder, target)
    seen: list[tuple[int, list[int]]] = []
    right = DFlashTokenCandidateGenerator.get_candidates

    def record(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        candidates, logits = right(self, input_ids, *args, **kwargs)
        if logits is not None:
            seen.append((input_ids.shape[1] - 1, candidates[0, input_ids.shape[1] :].tolist()))
        return candidates, logits

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", record)
    rounds = 0
    for prompt in (p.tokens for p in tiny.prompts(3, seed=2) if len(p.tokens) > 1):
        seen.clear()
        ids = torch.tensor([prompt])
        out = oracle.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=theirs, speculation_type="dflash",
            max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        (ours,) = Engine(target, drafter, all_candidates=True).generate([Request(prompt, 20)])
        assert ours.response.tolist() == out[0, len(prompt) :].tolist()
        log = list(zip(ours.blocks.anchors.tolist(), ours.blocks.candidates.tolist(), strict=True))
        assert log == seen[: len(log)]
        rounds += len(log)
    assert rounds > 20
