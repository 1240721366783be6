"""The plan against what is really allocated: real tensors of a real run, part by part and as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import exporting
import fitting
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Callback

from adaflash.drafters.dflash import DFlash
from adaflash.length.adaptive import AdaptiveLength
from adaflash.plan.command import parse
from adaflash.plan.estimate import Plan, estimate
from adaflash.plan.job import Job
from adaflash.plan.meter import Meter, grown, nbytes
from adaflash.plan.rollout import buffer_bytes, rollout_of
from adaflash.plan.update import update_of
from adaflash.plan.vocabulary import chunk_bytes, workspace_bytes
from adaflash.rollouts.base import Players
from adaflash.rollouts.live import LiveRollout
from adaflash.targets.hf import HFTarget
from adaflash.types import Prompt

PROMPT, RESPONSE, BATCH, ROLLOUT = 40, 24, 2, 4
SIZES = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 4}


class Watch(Callback):
    """The largest memory that each batch takes, beyond what was there before it."""

    def __init__(self) -> None:
        self.peaks: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.meter = Meter()
        self.meter.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.meter.__exit__(None, None, None)
        self.peaks.append(self.meter.peak)


def job_for(folder: Path, target: str, **model: Any) -> Job:
    """The job of a configuration like that of `run`."""
    given = {
        "target": target,
        "model": {
            "target_options": {"dtype": "float32"},
            "drafter": {"class_path": "adaflash.drafters.dflash.DFlash",
                        "init_args": {"num_layers": 2, "block_size": 8, "context_layers": [0, 2], "mask_id": 96}},
            "rollout": {"class_path": "adaflash.rollouts.live.LiveRollout",
                        "init_args": {"max_new_tokens": RESPONSE, "lanes": 4}},
            "num_anchors": 16, "chunk_rows": 64, "lanes": 4, "max_new_tokens": RESPONSE, **model,
        },
        "data": {"batch_size": BATCH, "rollout_size": ROLLOUT, "reuse": 2, "max_prompt_tokens": PROMPT},
        "trainer": {"accelerator": "cpu", "devices": 1, "max_steps": 4},
    }  # fmt: skip
    (folder / "plan.yaml").write_text(yaml.safe_dump(given))
    return parse(["-c", str(folder / "plan.yaml")])[0]


def run(folder: Path, target: str, steps: int = 4) -> tuple[Any, Watch]:
    """A real fit of the same sizes: prompts of the longest length, responses that never stop."""
    made = fitting.module(
        HFTarget.load(target),
        drafter=DFlash(num_layers=2, block_size=8, context_layers=[0, 2], mask_id=96, init="random"),
        length=AdaptiveLength(),
        rollout=LiveRollout(max_new_tokens=RESPONSE, lanes=4),
        num_anchors=16,
    )
    made.step.chunk_rows = 64
    prompts = [Prompt(f"p{i}", "a", tuple(range(i, i + PROMPT))) for i in range(ROLLOUT * 2)]
    data = fitting.data(folder, prompts, batch_size=BATCH, rollout_size=ROLLOUT, reuse=2, max_prompt_tokens=PROMPT)
    watch = Watch()
    fitting.trainer(folder, steps, [watch]).fit(made, data)
    return made, watch


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return exporting.save_target(tmp_path_factory.mktemp("target"), "qwen3", **SIZES)


@pytest.fixture(scope="module")
def done(target: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Watch, Job, Plan]:
    folder = tmp_path_factory.mktemp("run")
    made, watch = run(folder, target)
    job = job_for(folder, target)
    return made, watch, job, estimate(job)


def test_the_meter_counts_what_is_alive() -> None:
    before = torch.zeros(1000)
    with Meter() as meter:
        one = before + 1  # 4,000 bytes
        view = one[:10]
        assert meter.now == 4000
        two = one.double()  # 8,000 more
        del one
        assert meter.now == 12000 and len(view) == 10  # the view keeps it
        del view
        assert meter.now == 8000 and meter.peak == 12000
        before.add_(1)
        assert meter.now == 8000
    assert nbytes([two, two[:5], before]) == 12000


def test_weights_gradients_and_moments_to_the_byte(done: Any) -> None:
    made, _, _, plan = done
    parts = {part.name: part.largest for part in plan.parts}
    assert parts["target weights"] == nbytes(list(made.target.model.parameters()))
    assert parts["drafter weights"] == nbytes(list(made.drafter.parameters()))
    assert parts["length policy"] == nbytes(list(made.length.parameters()))
    assert parts["gradients"] == sum(p.nbytes for p in made.parameters())
    optimizer = made.trainer.optimizers[0]
    assert parts["optimizer state"] == sum(nbytes(state) for state in optimizer.state.values())


def test_pools_and_buffer_to_the_byte(done: Any) -> None:
    made, _, job, _ = done
    engine = made.engine(lanes=4)
    engine.generate([made._request(Prompt(f"p{i}", "a", tuple(range(i, i + PROMPT)))) for i in range(4)])
    assert made.max_new_tokens != RESPONSE  # the module of the tests validates shorter texts: compare at its length
    from dataclasses import replace

    decoding = rollout_of(replace(job, response=made.max_new_tokens))
    assert engine.memory == {"target_pool": decoding.target_pool, "draft_pool": decoding.draft_pool}
    kept = made.buffer.trajectories
    assert len(kept) == ROLLOUT and all(len(each.tokens) == PROMPT + RESPONSE for each in kept)
    assert buffer_bytes(job) == nbytes([[each.tokens, each.context, each.teacher] for each in kept])


def test_the_workspace_to_the_byte(done: Any) -> None:
    from adaflash.losses.chunked import Walk
    from adaflash.losses.rows import Rows

    made, _, job, _ = done
    rows, size = 64, made.target.embedding_rows
    walk = Walk(job.losses, torch.randn(rows, 128), made.target.head, rows, rows)
    hidden, index = torch.randn(rows, 128), torch.arange(rows)
    with Meter() as meter:
        walk.run(Rows(index, hidden, index, index), torch.ones(rows), [torch.zeros_like(hidden)])
    like = torch.empty(rows, size)
    assert walk.work.bytes() == workspace_bytes(like, job.losses, gpu=False, workers=torch.get_num_threads())
    computed = walk.work.bytes() + chunk_bytes(like, job.losses, gpu=False)
    assert meter.peak == pytest.approx(computed, rel=0.1)


def test_activations_are_what_autograd_keeps(done: Any) -> None:
    """The same forward on real tensors: bytes of what autograd saves, and of what is alive."""
    made, _, job, _ = done
    from adaflash.drafters.base import embed_blocks
    from adaflash.types import Blocks, Segments

    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        return tensor

    weights = {p.untyped_storage()._cdata for p in made.drafter.parameters()}
    count, tokens = BATCH * 16, torch.zeros(BATCH * 16, 8, dtype=torch.int64)
    anchors = torch.full((count,), PROMPT)
    blocks = Blocks(
        torch.arange(BATCH).repeat_interleave(16), anchors, tokens, tokens[:, 1:], tokens[:, 1:] == 0, anchors > 0
    )
    states = [torch.randn(PROMPT + RESPONSE - 2, 256) for _ in range(BATCH)]
    with Meter() as meter, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        context = torch.cat(states)
        embeds = embed_blocks(made.target, tokens, torch.float32)
        hidden = made.drafter(embeds, blocks, context, Segments.whole([PROMPT + RESPONSE - 2] * BATCH))
    by_hooks = sum(size for key, size in saved.items() if key not in weights)
    planned = update_of(job).activations
    assert planned == meter.now
    assert by_hooks <= planned <= 1.1 * by_hooks  # beside them: the packed inputs, which autograd may not need
    assert hidden.requires_grad and context.shape[1] == 256


def test_more_requests_go_on_along_the_line_of_few(done: Any) -> None:
    """Played with 2 and 4 and drawn out to 6, against 6 played."""
    from adaflash.plan.rollout import _draft, _verify
    from adaflash.plan.update import _passes

    _, _, job, _ = done
    for play in (
        lambda n: _draft(job.models, job.precision, n, 72, True),
        lambda n: _verify(job.models, job.precision, n, 72),
        lambda n: _passes(job.models, job.precision, n, 4, 64, False)[0],
        lambda n: sum(_passes(job.models, job.precision, n, 4, 64, False)),
    ):
        assert grown(play, 6) == pytest.approx(play(6), rel=0.02)


def test_a_whole_update(done: Any) -> None:
    """Batches 1 and 3 train on a rollout that is there."""
    _, watch, _, plan = done
    stays = ("target weights", "drafter weights", "length policy", "optimizer state", "rollout buffer")
    standing = sum(part.largest for part in plan.parts if part.name in stays)
    planned = max(plan.total(phase) for phase in ("update", "step")) - standing
    assert watch.peaks[3] == pytest.approx(planned, rel=0.1)


def test_a_whole_rollout(done: Any) -> None:
    """Pools, passes and the states that are kept, while a rollout is made."""
    made, _, job, _ = done
    prompts = [Prompt(f"p{i}", "a", tuple(range(i, i + PROMPT))) for i in range(ROLLOUT)]
    with torch.no_grad(), Meter() as meter:
        kept = made.rollout.collect(prompts, Players(made.target, made.drafter, made.length, 9, 0))
    assert all(len(each.response) == RESPONSE for each in kept)
    decoding = rollout_of(job)
    planned = decoding.target_pool + decoding.draft_pool + decoding.passes + buffer_bytes(job)
    assert 0.5 * planned <= meter.peak <= planned
    assert meter.now == pytest.approx(buffer_bytes(job), rel=0.02)


def test_one_rollout_goes_before_the_next_comes(done: Any) -> None:
    made, _, _, _ = done
    from adaflash.rollouts.base import RolloutSource
    from adaflash.rollouts.buffer import RolloutBuffer
    from adaflash.types import PromptBatch, Trajectory

    class Witness(RolloutSource):
        def collect(self, prompts: Any, players: Players) -> list[Trajectory]:
            assert not buffer.trajectories
            return made.buffer.trajectories[:2]

    buffer, players = RolloutBuffer(), Players(made.target, made.drafter, made.length, 0, 0)
    for number in range(2):
        assert buffer.take(PromptBatch((), number, 0, 1, 2, 0), Witness(), players)[1]
    assert len(buffer.trajectories) == 2
