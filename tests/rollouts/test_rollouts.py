"""Where trajectories come from: live and recorded agree, states are the target's, visits see every trajectory."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import tiny
import torch

from adaflash.errors import UserError
from adaflash.length.adaptive import AdaptiveLength
from adaflash.length.fixed import FullBlock
from adaflash.rollouts.base import Players, RolloutSource, seed_of
from adaflash.rollouts.buffer import Reuse, RolloutBuffer
from adaflash.rollouts.live import LiveRollout
from adaflash.rollouts.reading import packs
from adaflash.rollouts.recorded import RecordedRollout
from adaflash.types import Prompt, PromptBatch, Segments, Trajectory

PROMPTS = tiny.prompts(6)


@pytest.fixture(scope="module")
def players() -> Players:
    target = tiny.target()
    return Players(target, tiny.drafter(target, noise=0.05), FullBlock(), updates=0, seed=7)


def record(trajectories: list[Trajectory]) -> list[Prompt]:
    return [
        Prompt(t.id, t.domain, tuple(t.tokens[: t.prompt_length].tolist()), tuple(t.response.tolist()), t.finish)
        for t in trajectories
    ]


@pytest.mark.parametrize("lanes", [1, 4])
@torch.no_grad()
def test_states_of_a_live_rollout_are_those_of_one_read(players: Players, lanes: int) -> None:
    """Context rows 0 .., teacher rows P ..: what the verify passes left is what a second pass would give."""
    for one in LiveRollout(max_new_tokens=20, lanes=lanes).collect(PROMPTS, players):
        end, start = len(one.tokens), one.prompt_length
        whole = players.target.read(one.tokens, Segments.whole([end]), players.drafter.context_layers)
        assert len(one.context) >= end - 2
        assert len(one.teacher) >= end - 1 - start
        for got, expected in (
            (one.context[: end - 2], whole.context[: end - 2]),
            (one.teacher[: end - 1 - start], whole.hidden[start : end - 1]),
        ):
            torch.testing.assert_close(got, expected, rtol=0, atol=3e-5 * float(expected.abs().max()))
        # the teacher's choice at position p is the token at p + 1: greedy text teaches itself
        choices = players.target.head(one.teacher[: end - 1 - start]).argmax(-1)
        assert choices.tolist() == one.tokens[start + 1 :].tolist()


def test_recorded_rollouts_of_live_texts_are_the_same_trajectories(players: Players) -> None:
    live = LiveRollout(max_new_tokens=20).collect(PROMPTS, players)
    for read_rows in (4096, 1, 40):  # in one pack, one by one, a few at a time
        recorded = RecordedRollout(read_rows=read_rows).collect(record(live), players)
        for one, other in zip(live, recorded, strict=True):
            assert torch.equal(one.tokens, other.tokens)
            assert (one.id, one.domain, one.prompt_length, one.finish) == (
                other.id,
                other.domain,
                other.prompt_length,
                other.finish,
            )
            rows = len(one.tokens) - 2
            torch.testing.assert_close(
                other.context[:rows], one.context[:rows], rtol=0, atol=3e-5 * float(one.context.abs().max())
            )
            rows = len(one.response) - 1
            torch.testing.assert_close(
                other.teacher[:rows], one.teacher[:rows], rtol=0, atol=3e-5 * float(one.teacher.abs().max())
            )


def test_live_rollouts_log_the_blocks_that_were_started(players: Players) -> None:
    for one in LiveRollout(max_new_tokens=20).collect(PROMPTS, players):
        starts = torch.cat([torch.tensor([one.prompt_length]), one.prompt_length + one.blocks.committed.cumsum(0)[:-1]])
        assert one.blocks.anchors.tolist() == starts.tolist()
        assert int(one.blocks.committed.sum()) + one.plain_steps + 1 == len(one.response)


def test_greedy_rollouts_do_not_depend_on_the_seed_and_sampled_ones_do(players: Players) -> None:
    def texts(rollout: RolloutSource, seed: int) -> list[list[int]]:
        return [t.tokens.tolist() for t in rollout.collect(PROMPTS, dataclasses.replace(players, seed=seed))]

    greedy, sampled = LiveRollout(max_new_tokens=12), LiveRollout(max_new_tokens=12, temperature=1.0)
    assert texts(greedy, 1) == texts(greedy, 2)
    assert texts(sampled, 1) == texts(sampled, 1)
    assert texts(sampled, 1) != texts(sampled, 2)
    alone = [
        LiveRollout(max_new_tokens=12, temperature=1.0, lanes=1).collect([p], dataclasses.replace(players, seed=1))[0]
        for p in PROMPTS
    ]
    assert [t.tokens.tolist() for t in alone] == texts(sampled, 1)  # a prompt's noise is its own


def test_a_learned_policy_plays_once_it_is_warm(players: Players) -> None:
    policy = AdaptiveLength(rate=100.0)  # says the whole block
    policy.build(64, 8)
    rollout = LiveRollout(max_new_tokens=20, warm_updates=10, warm_length=2)
    for updates, longest in ((0, 2), (9, 2), (10, 7)):
        made = rollout.collect(PROMPTS, dataclasses.replace(players, policy=policy, updates=updates))
        assert max(int(t.blocks.lengths.max()) for t in made) == longest
    unlearned = rollout.collect(PROMPTS, players)  # FullBlock has nothing to warm up
    assert max(int(t.blocks.lengths.max()) for t in unlearned) == 7


def test_recorded_responses_are_cut_at_the_limit(players: Players) -> None:
    prompt = Prompt("p", "a", (1, 2, 3), tuple(range(10, 30)), "stop")
    whole = RecordedRollout(max_new_tokens=20).collect([prompt], players)[0]
    cut = RecordedRollout(max_new_tokens=19).collect([prompt], players)[0]
    assert (whole.finish, len(whole.response)) == ("stop", 20)
    assert (cut.finish, len(cut.response)) == ("length", 19)
    assert cut.response.tolist() == [*range(10, 29)]


def test_prompts_without_a_response_are_named(players: Players) -> None:
    with pytest.raises(UserError, match=r"2 prompts have none \(first: 'p0'\)"):
        RecordedRollout().collect([*PROMPTS[:2], Prompt("q", "a", (1,), (2, 3))], players)


def test_a_prompt_longer_than_the_context_is_named(players: Players) -> None:
    with pytest.raises(UserError, match=r"'long' has 256 tokens.*context holds 256"):
        RecordedRollout().collect([Prompt("long", "a", (1,) * 256, (2, 3))], players)


@pytest.mark.parametrize("wrong", [{"max_new_tokens": 1}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}])
def test_settings_out_of_range(wrong: dict) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        LiveRollout(**wrong)


def test_seeds_are_stable_and_tell_every_part_apart() -> None:
    assert seed_of(42, "p1", 3) == 3905024993576424373  # the same in every process and version
    assert len({seed_of(1, "ab"), seed_of(1, "a", "b"), seed_of("1", "ab"), seed_of(2, "ab"), seed_of(1, "ba")}) == 5
    assert all(0 <= seed_of(i) < 2**63 for i in range(1000))


# ---- the buffer ----


class Counting(RolloutSource):
    """Makes trajectories without a model, and counts how often."""

    def __init__(self) -> None:
        self.made = 0

    def collect(self, prompts, players):
        self.made += 1
        return [Trajectory(p.id, p.domain, torch.tensor(p.tokens), 1, "length", None) for p in prompts]  # type: ignore[arg-type]


def visits(
    buffer: RolloutBuffer, source: Counting, players: Players, rollout_id: int, rows: int, count: int
) -> list[list[str]]:
    taken = []
    for visit in range(count):
        batch = PromptBatch(tuple(PROMPTS), rollout_id, visit, count, rows, 0)
        trajectories, fresh = buffer.take(batch, source, dataclasses.replace(players, updates=visit))
        assert fresh == (visit == 0)
        taken.append([t.id for t in trajectories])
    return taken


@pytest.mark.parametrize(("rows", "reuse"), [(2, 2), (3, 2), (6, 3), (1, 1)])
def test_every_pass_sees_every_trajectory_once(players: Players, rows: int, reuse: int) -> None:
    source, buffer = Counting(), RolloutBuffer()
    per_pass = 6 // rows
    taken = visits(buffer, source, players, 0, rows, per_pass * reuse)
    assert source.made == 1
    for turn in range(reuse):
        ids = [id for part in taken[turn * per_pass : (turn + 1) * per_pass] for id in part]
        assert collections.Counter(ids) == collections.Counter(p.id for p in PROMPTS)
    assert buffer.born == 0
    assert taken == visits(RolloutBuffer(), Counting(), players, 0, rows, per_pass * reuse)  # and in the same order


def test_passes_have_orders_of_their_own(players: Players) -> None:
    taken = visits(RolloutBuffer(), Counting(), players, 0, 1, 18)
    orders = {tuple(id for part in taken[i : i + 6] for id in part) for i in (0, 6, 12)}
    assert len(orders) == 3


def test_a_new_rollout_is_made_at_its_first_visit(players: Players) -> None:
    source, buffer = Counting(), RolloutBuffer()
    for rollout in range(3):
        visits(buffer, source, players, rollout, 2, 6)
    assert source.made == 3


def test_a_stale_rollout_is_made_again_by_the_drafter_of_then(players: Players) -> None:
    source, buffer = Counting(), RolloutBuffer(Reuse(max_age=2))
    ages, fresh = [], []
    for visit in range(8):  # an update a visit
        batch = PromptBatch(tuple(PROMPTS), 0, visit, 8, 6, 0)
        _, new = buffer.take(batch, source, dataclasses.replace(players, updates=10 + visit))
        ages.append(buffer.age)
        fresh.append(new)
    assert ages == [0, 1, 2, 0, 1, 2, 0, 1]
    assert fresh == [age == 0 for age in ages] and source.made == 3


def test_a_rollout_made_again_has_noise_of_its_own(players: Players) -> None:
    sampled, buffer = LiveRollout(max_new_tokens=12, temperature=1.0), RolloutBuffer(Reuse(max_age=1))
    texts = []
    for visit in (0, 2):
        batch = PromptBatch(tuple(PROMPTS[:2]), 0, visit, 4, 2, 0)
        buffer.take(batch, sampled, dataclasses.replace(players, updates=visit))
        texts.append([each.tokens.tolist() for each in buffer.trajectories])
    assert texts[0] != texts[1]


def test_without_its_tensors_a_rollout_is_made_again_and_that_is_told(players: Players) -> None:
    source, buffer = Counting(), RolloutBuffer(Reuse(checkpoint="boundary"))
    buffer.take(PromptBatch(tuple(PROMPTS), 3, 1, 4, 6, 0), source, players)
    state = buffer.state_dict()
    assert state["trajectories"] == [] and state["visits_left"] == 2
    resumed = RolloutBuffer(Reuse(checkpoint="boundary"))
    with pytest.warns(UserWarning, match=r"model\.reuse\.checkpoint = boundary"):
        resumed.load_state_dict(state)
    _, fresh = resumed.take(PromptBatch(tuple(PROMPTS), 3, 2, 4, 6, 0), source, players)
    assert fresh


def test_reuse_is_checked() -> None:
    with pytest.raises(UserError, match=r"model\.reuse\.max_age must be at least 0"):
        Reuse(max_age=-1)


def test_trajectories_of_one_pack_do_not_see_each_other(players: Players) -> None:
    """FAULTS 82: other tokens in one of them do not move the states of the others by one bit; the order is that asked."""
    prompts = [Prompt(f"p{i}", "a", (1, 2 + i, 3), tuple(range(10, 18 + i % 3)), "stop") for i in range(5)]
    other = dataclasses.replace(prompts[2], tokens=(40, 41, 42), response=tuple(range(60, 70)))
    changed = [*prompts[:2], other, *prompts[3:]]
    before, after = (RecordedRollout().collect(each, players) for each in (prompts, changed))
    assert [each.id for each in before] == [each.id for each in after] == [p.id for p in prompts]
    for index, (one, two) in enumerate(zip(before, after, strict=True)):
        same = torch.equal(one.context, two.context) and torch.equal(one.teacher, two.teacher)
        assert same == (index != 2)


def test_packs_are_of_like_lengths_and_hold_everything() -> None:
    lengths = [9, 2, 7, 3, 8, 2, 30]
    bare = [Trajectory(str(n), "a", torch.zeros(n), 1, "stop", None) for n in lengths]  # type: ignore[arg-type]
    assert [[len(each.tokens) for each in pack] for pack in packs(sorted(bare, key=lambda t: len(t.tokens)), 10)] == [
        [2, 2, 3], [7], [8], [9], [30],
    ]  # fmt: skip
