"""The real target: a drafter trained on it for a moment, and the text that comes out with and without it."""

from __future__ import annotations

import os

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from adaflash.blocks import build_blocks, choose_anchors, context_rows
from adaflash.data.chat import ChatRenderer
from adaflash.data.prompts import PromptDataModule
from adaflash.data.sources import ShippedSource
from adaflash.decoding.engine import Engine
from adaflash.drafters.base import embed_blocks
from adaflash.drafters.dflash import DFlash
from adaflash.length.fixed import FullBlock
from adaflash.losses import ExponentialDecay, TeacherCrossEntropy
from adaflash.step import DraftStep
from adaflash.targets.fetch import fetched_path
from adaflash.targets.hf import HFTarget
from adaflash.types import Prompt, Request, Segments, Trajectory

pytestmark = pytest.mark.real
NAME, LONG = "smollm2-135m", 32


@pytest.fixture(scope="module")
def target() -> HFTarget:
    if fetched_path(NAME) is None:
        message = f"the real target is not here: adaflash fetch {NAME} (`make test` does it)"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    return HFTarget.load(NAME)


@pytest.fixture(scope="module")
def prompts(target: HFTarget) -> list[Prompt]:
    """Eight shipped evaluation prompts of three domains."""
    sources = [ShippedSource(domain=name, split="eval", limit=3) for name in ("math", "code", "chat")]
    for source in sources:
        source.open()
    renderer = ChatRenderer(target.tokenizer)
    return [renderer.prompt(source.row(i)) for i in range(3) for source in sources][:8]


def train(target: HFTarget, trajectories: list[Trajectory], updates: int) -> DFlash:
    """A drafter that has seen these very trajectories often enough to have some candidates accepted."""
    torch.manual_seed(0)
    drafter = DFlash(num_layers=1, block_size=4, num_context_layers=3)
    drafter.build(target, "<empty_output>")
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3, betas=(0.9, 0.95))
    step, generator = DraftStep([TeacherCrossEntropy()], ExponentialDecay()), torch.Generator().manual_seed(0)
    segments = Segments.whole([context_rows(len(each.tokens)) for each in trajectories])
    pairs = list(zip(trajectories, segments.counts, strict=True))
    context = torch.cat([each.context[:count] for each, count in pairs])  # type: ignore[index]
    teacher = torch.cat([each.teacher for each in trajectories])  # type: ignore[misc]
    starts = torch.tensor([0, *[len(each.teacher) for each in trajectories]]).cumsum(0)[:-1]  # type: ignore[arg-type]
    offsets = starts - torch.tensor([each.prompt_length for each in trajectories])
    for _ in range(updates):
        anchors = [choose_anchors(each, 12, 0.0, generator) for each in trajectories]
        blocks = build_blocks(trajectories, anchors, 4, drafter.mask_id)
        hidden = drafter(embed_blocks(target, blocks.tokens, torch.float32), blocks, context, segments)
        result = step(hidden, blocks, teacher, offsets[blocks.rows], target.head)
        optimizer.zero_grad()
        (result.loss / result.weight).backward()
        optimizer.step()
    return drafter


def own_greedy(model: PreTrainedModel, prompt: Prompt, stops: tuple[int, ...]) -> list[int]:
    """transformers' own greedy decoding."""
    ids = torch.tensor([prompt.tokens])
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=LONG, do_sample=False, eos_token_id=list(stops)
        )
    return out[0, ids.shape[1] :].tolist()


def margin_at(model: PreTrainedModel, tokens: list[int]) -> float:
    """Top-1/top-2 margin of the logits behind `tokens`."""
    with torch.no_grad():
        best = model(torch.tensor([tokens])).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


def test_greedy_text_with_a_trained_drafter_is_the_targets_own(target: HFTarget, prompts: list[Prompt]) -> None:
    requests = [Request(prompt.tokens, LONG, prompt.id, prompt.domain) for prompt in prompts]
    drafter = DFlash(num_layers=1, block_size=4, num_context_layers=3)
    drafter.build(target, "<empty_output>")
    made = Engine(target, drafter, FullBlock(), lanes=3, keep_states=True).generate(requests[:3])
    trained = train(target, made, updates=80)
    drafted = Engine(target, trained, FullBlock(), lanes=3).generate(requests)
    rounds = sum(len(each.blocks.committed) for each in drafted)
    tau = sum(int(each.blocks.committed.sum()) for each in drafted) / rounds
    assert tau > 1.2, f"tau {tau:.2f}: nothing was accepted, so nothing is proved"
    model = AutoModelForCausalLM.from_pretrained(fetched_path(NAME))
    ties = []
    for prompt, result in zip(prompts, drafted, strict=True):
        wanted, got = own_greedy(model, prompt, target.stop_ids), result.response.tolist()
        if got != wanted:
            at = next(i for i, (a, b) in enumerate(zip([*got, None], [*wanted, None], strict=False)) if a != b)
            ties.append((prompt.id, at, margin_at(model, [*prompt.tokens, *wanted[:at]])))
    print(f"tau {tau:.2f} on {len(prompts)} prompts; near ties: {ties}")
    assert all(margin < 1e-3 for _, _, margin in ties), f"not the target's own text (prompt, position, margin): {ties}"
    assert len(ties) <= 1


def test_shipped_prompts_render_for_it(target: HFTarget) -> None:
    data = PromptDataModule(
        target=NAME,
        train=[ShippedSource(domain="math", split="train")],
        val=[ShippedSource(domain="math", split="eval")],
        val_prompts=2,
    )
    data.setup("fit")
    [batch] = list(data.val_dataloader())
    text = target.tokenizer.decode(batch[0].tokens)
    assert text.startswith("<|im_start|>") and text.endswith("<|im_start|>assistant\n") and len(batch) == 2
