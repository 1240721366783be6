"""DraftStep against the plain oracle: values, gradients, chunks, splits, errors, and what it never computes."""

import dataclasses
import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adaflash.blocks import agreeing_prefix
from adaflash.losses import (
    DynamicConfidence,
    Evaluation,
    ExponentialDecay,
    FirstMismatch,
    FirstPass,
    ForwardKL,
    FunctionTerm,
    JensenShannon,
    LossTerm,
    NegativeLogAcceptance,
    NumericalError,
    PositionWeight,
    ReverseKL,
    SlotSampling,
    TeacherCrossEntropy,
    TokenCrossEntropy,
    TotalVariation,
    Uniform,
)
from adaflash.losses.oracle import plain_loss
from adaflash.step import DraftStep, expected_acceptance
from adaflash.types import Blocks
from adaflash.vocabulary import DraftHead, DraftVocabulary

ROWS, BLOCK, HIDDEN, VOCABULARY = 3, 5, 6, 23
LENGTHS, PROMPTS = (14, 9, 11), (4, 3, 8)


class Case:
    """Blocks over three trajectories with overlapping anchors, cut off at the ends; one block has nothing to learn."""

    def __init__(self, dtype=torch.float64, vocabulary=VOCABULARY):
        generator = torch.Generator().manual_seed(3)
        self.rows = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
        self.anchors = torch.tensor([4, 5, 7, 12, 3, 3, 8, 9])
        ends = torch.tensor(LENGTHS)[self.rows]
        supervised = self.anchors[:, None] + torch.arange(1, BLOCK) < ends[:, None]
        supervised[5] = False
        labels = torch.randint(vocabulary, supervised.shape, generator=generator) * supervised
        count = len(self.anchors)
        self.blocks = Blocks(
            self.rows,
            self.anchors,
            torch.zeros(count, BLOCK, dtype=torch.int64),
            labels,
            supervised,
            torch.ones(count, dtype=torch.bool),
        )
        self.hidden = torch.randn(count, BLOCK, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
        self.hidden.requires_grad_()
        # trajectory r holds teacher rows P .. E - 2, packed one after the other
        counts = [end - 1 - prompt for end, prompt in zip(LENGTHS, PROMPTS, strict=True)]
        starts = [0, *itertools.accumulate(counts)][:-1]
        self.offsets = torch.tensor([start - prompt for start, prompt in zip(starts, PROMPTS, strict=True)])[self.rows]
        self.teacher = torch.randn(sum(counts), HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
        self.matrix = torch.randn(vocabulary, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
        self.calls = []

    def head(self, states):
        self.calls.append(len(states))
        return states @ self.matrix.T

    def run(self, terms, weights=None, chunk=256, part=slice(None), drafted=None, **options):
        step = DraftStep(terms, weights or ExponentialDecay(), chunk, **options)
        return step(self.hidden[part], self.cut(part), self.teacher, self.offsets[part], self.head, drafted=drafted)

    def cut(self, part):
        return Blocks(**{f.name: getattr(self.blocks, f.name)[part] for f in dataclasses.fields(Blocks)})

    def taught(self):
        """[N, K, H]: the state at a + k - 1, looked up one by one."""
        states = torch.zeros(len(self.rows), BLOCK - 1, HIDDEN, dtype=self.teacher.dtype)
        for n, k in self.blocks.supervised.nonzero().tolist():
            states[n, k] = self.teacher[self.offsets[n] + self.anchors[n] + k]
        return states

    def oracle(self, terms, weights=None, drafted=None):
        weight = (weights or ExponentialDecay())(self.blocks.supervised)
        head = lambda x: x @ self.matrix.T  # noqa: E731
        loss = plain_loss(self.hidden, self.blocks.labels, weight, self.taught(), terms, head, drafted)
        return loss, weight.double().sum()

    def gradient(self, loss):
        return torch.autograd.grad(loss, self.hidden)[0]


def paper(clip="entry", **kwargs):
    return [TeacherCrossEntropy(weight=0.8, name="ce"), ReverseKL(weight=0.2, name="rkl", clip=clip, **kwargs)]


def cubed(student, teacher, token):
    """A loss somebody else wrote, which does not even ignore a shift of the logits."""
    return ((student - teacher) ** 3).mean(-1) + student.gather(-1, token[:, None])[:, 0]


MIXTURES = {
    "paper": paper,
    "token": lambda: paper("token", threshold=0.4),
    "none": lambda: paper("none", temperature=2.0),
    "official": lambda: paper("official"),
    "dflash": lambda: [TokenCrossEntropy(name="ce")],
    "osd": lambda: [ForwardKL(weight=1.5, temperature=2.0)],
    "all": lambda: [
        *paper(),
        TokenCrossEntropy(0.3),
        JensenShannon(0.5),
        TotalVariation(-0.2),
        NegativeLogAcceptance(),
        FunctionTerm(cubed, 0.1),
    ],
    "top-k": lambda: [ForwardKL(top_k=4, weight=0.5), *paper(top_k=3)],
    "two of a kind": lambda: [*paper(), TokenCrossEntropy(name="a"), TokenCrossEntropy(0.5, "b"), ReverseKL("token")],
    "foreign": lambda: [FunctionTerm(cubed)],
}


@pytest.mark.parametrize("chunk", [1, 3, 7, 1000])
@pytest.mark.parametrize("name", MIXTURES)
def test_value_and_gradient_equal_the_oracle(name, chunk):
    case, terms = Case(), MIXTURES[name]()
    result = case.run(terms, chunk=chunk)
    loss, weight = case.oracle(terms)
    assert torch.allclose(result.loss, loss, rtol=1e-12) and result.loss.dtype == torch.float64
    assert torch.allclose(result.weight, weight) and not result.weight.requires_grad
    found, expected = case.gradient(result.loss * 3.0), case.gradient(loss * 3.0)
    assert torch.allclose(found, expected, atol=1e-12) and expected.abs().max() > 1e-3
    assert found[:, 0].abs().max() == 0 and found[5].abs().max() == 0  # slot 0, and the block without supervision
    total = sum(term.weight * result.terms[term.name] for term in terms)
    assert torch.allclose(total, loss, rtol=1e-12) and not total.requires_grad


@pytest.mark.parametrize("name", ["paper", "all"])
def test_float32_is_close_to_the_oracle_in_float64(name):
    single, double = Case(torch.float32), Case(torch.float64)
    result, (loss, _) = single.run(MIXTURES[name](), chunk=4), double.oracle(MIXTURES[name]())
    assert result.loss.dtype == torch.float32
    assert result.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    assert (single.gradient(result.loss) - double.gradient(loss)).abs().max() < 1e-4


def test_bfloat16_states_and_head():
    half = Case(torch.bfloat16)
    result = half.run(paper(), chunk=4)
    loss, _ = half.oracle(paper())
    assert result.loss.item() == pytest.approx(loss.item(), rel=2e-2)
    found, expected = half.gradient(result.loss).float(), half.gradient(loss).float()
    assert found.dtype == torch.float32 and (found - expected).abs().max() < 2e-2 * expected.abs().max()


@pytest.mark.parametrize("cuts", [(0, 8), (0, 4, 6, 8), (0, 1, 2, 3, 4, 5, 6, 7, 8)])
def test_micro_batches_add_up(cuts):
    case = Case()
    whole = case.run(paper())
    parts = [case.run(paper(), part=slice(a, b)) for a, b in itertools.pairwise(cuts)]
    assert torch.allclose(sum(p.loss for p in parts), whole.loss, rtol=1e-12)
    assert torch.allclose(sum(p.weight for p in parts), whole.weight, rtol=1e-12)
    for name in ("rkl/removed", "rkl/cut"):
        stats = [p.stats[name] for p in parts if name in p.stats]
        assert torch.allclose(sum(stats), whole.stats[name], rtol=1e-12)
    assert torch.equal(torch.cat([p.candidates for p in parts]), whole.candidates)
    assert torch.allclose(case.gradient(sum(p.loss for p in parts)), case.gradient(whole.loss), atol=1e-12)


def test_official_is_the_only_mode_that_sees_the_split():
    for clip, same in (("entry", True), ("token", True), ("none", True), ("official", False)):
        case, threshold = Case(), {"threshold": 0.05} if clip != "none" else {}
        whole = case.run(paper(clip, **threshold)).loss
        parts = sum(case.run(paper(clip, **threshold), part=slice(a, a + 4)).loss for a in (0, 4))
        assert bool(torch.allclose(whole, parts, rtol=1e-9)) is same, clip


def test_candidates_are_the_argmax_of_every_supervised_row():
    case = Case()
    logits = case.hidden.detach()[:, 1:] @ case.matrix.T
    expected = torch.where(case.blocks.supervised, logits.argmax(-1), -1)
    for terms, weights, chunk in itertools.product(
        ([], paper()), (ExponentialDecay(), FirstMismatch(), HalfSilent()), (1, 4, 100)
    ):
        assert torch.equal(case.run(terms, weights, chunk).candidates, expected)


class HalfSilent(PositionWeight):
    """Even candidates weigh nothing."""

    def __call__(self, supervised, results=None):
        return supervised.float() * (torch.arange(supervised.shape[1]) % 2)


def test_rows_without_weight_are_not_differentiated():
    case = Case()
    taught = []

    def seen(student, teacher, token):
        taught.append(len(token))
        return student[:, 0]

    result = case.run([FunctionTerm(seen)], HalfSilent(), chunk=4)
    supervised = int(case.blocks.supervised[:, 1::2].sum())
    assert sum(taught) == supervised and result.weight == supervised
    assert case.gradient(result.loss)[:, [1, 3]].abs().max() == 0


def test_the_teacher_is_computed_once_per_position_and_never_more_than_a_chunk():
    case = Case()
    positions = {(int(case.rows[n]), int(case.anchors[n]) + k) for n, k in case.blocks.supervised.nonzero().tolist()}
    supervised = int(case.blocks.supervised.sum())
    assert len(positions) < supervised  # blocks overlap
    case.run(paper(), chunk=5)
    assert sum(case.calls) == supervised + len(positions)
    assert min(case.calls) > 0 and max(case.calls) <= 5


def test_no_teacher_for_the_data_token():
    case = Case()
    step = DraftStep([TokenCrossEntropy()], Uniform(), 4)
    step(case.hidden, case.blocks, None, None, case.head)
    assert sum(case.calls) == int(case.blocks.supervised.sum())
    with pytest.raises(ValueError, match=r"\['ce', 'rkl'\] need the teacher"):
        DraftStep(paper(), Uniform())(case.hidden, case.blocks, None, None, case.head)


def test_positions_outside_the_teacher_are_refused():
    case = Case()
    for shift in (-1, 1):
        with pytest.raises(ValueError, match="teacher rows"):
            DraftStep(paper(), Uniform())(case.hidden, case.blocks, case.teacher, case.offsets + shift, case.head)


def test_nothing_flows_to_teacher_or_head():
    case = Case()
    case.teacher.requires_grad_()
    case.matrix.requires_grad_()
    case.run(paper(), chunk=4).loss.backward()
    assert case.teacher.grad is None and case.matrix.grad is None and case.hidden.grad.abs().max() > 0


class Scaled(LossTerm):
    """A term that learns."""

    def __init__(self):
        super().__init__(weight=0.7)
        self.scale = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))

    def forward(self, student, teacher, token):
        return self.scale[0] * student[:, 0] + self.scale[1] ** 2 * teacher[:, 1]


def test_parameters_of_a_term_learn():
    case, term = Case(), Scaled()
    term.frozen = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    inputs = [case.hidden, term.scale]
    found = torch.autograd.grad(case.run([*paper(), term], chunk=3).loss, inputs)
    expected = torch.autograd.grad(case.oracle([*paper(), term])[0], inputs)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-11)


@pytest.mark.parametrize("weights", [DynamicConfidence(), FirstMismatch(ExponentialDecay())])
@pytest.mark.parametrize("teacherless", [False, True])
def test_weights_that_need_results(weights, teacherless):
    case = Case()
    terms = [TokenCrossEntropy()] if teacherless else paper()
    student = (case.hidden.detach()[:, 1:] @ case.matrix.T).log_softmax(-1)
    right = case.blocks.labels if teacherless else (case.taught() @ case.matrix.T).argmax(-1)
    mask = case.blocks.supervised
    agrees = (student.argmax(-1) == right) & mask
    confidence = torch.where(mask, student.gather(-1, right[..., None])[..., 0].exp(), 0.0)
    weight = weights(mask, FirstPass(student.argmax(-1), agrees, confidence))
    result = case.run(terms, weights, chunk=3)
    expected = plain_loss(case.hidden, case.blocks.labels, weight, case.taught(), terms, lambda x: x @ case.matrix.T)
    assert torch.allclose(result.loss, expected, rtol=1e-6)
    assert torch.allclose(case.gradient(result.loss), case.gradient(expected), atol=1e-6)


def test_without_gradients_only_values():
    case = Case()
    with torch.no_grad():
        quiet = case.run(paper(), chunk=3)
    assert not quiet.loss.requires_grad
    assert torch.allclose(quiet.loss.double(), case.run(paper()).loss.detach(), rtol=1e-6)


def test_nothing_to_learn_is_a_loss_of_zero_that_still_backpropagates():
    case = Case()
    case.blocks.supervised[:] = False
    result = case.run(paper())
    result.loss.backward()
    assert result.loss == 0 and result.weight == 0 and (result.candidates == -1).all()
    assert case.hidden.grad.shape == case.hidden.shape and case.hidden.grad.abs().max() == 0
    empty = case.run(paper(), part=slice(0, 0))
    assert empty.loss == 0 and empty.loss.requires_grad and empty.candidates.shape == (0, BLOCK - 1)


@pytest.mark.parametrize("terms", [[], paper(), [TokenCrossEntropy()]])
def test_a_bad_state_is_named_by_block_and_candidate(terms):
    case = Case()
    with torch.no_grad():
        case.hidden[2, 3] = float("nan")
    with pytest.raises(NumericalError, match=r"student logits.*NaN.*trajectory 0, anchor 7, candidate 3"):
        case.run(terms, chunk=3)


def test_a_bad_teacher_state_is_named():
    case = Case()
    case.teacher[case.offsets[case.rows == 2][0] + 9] = float("inf")
    with pytest.raises(NumericalError, match=r"teacher logits.*trajectory 2, anchor 8, candidate 2"):
        case.run(paper(), chunk=3)


def test_names_are_checked_again_when_terms_join_later():
    terms = paper()
    step, case = DraftStep(terms, Uniform()), Case()
    terms.append(TotalVariation(name="ce"))
    with pytest.raises(ValueError, match="share the name 'ce'"):
        step(case.hidden, case.blocks, case.teacher, case.offsets, case.head)
    with pytest.raises(ValueError, match="share the name"):
        DraftStep(terms, Uniform())


def test_a_loss_of_the_wrong_shape_is_named():
    with pytest.raises(ValueError, match="'total' must give one value per row"):
        Case().run([FunctionTerm(lambda s, t, y: s.sum(), name="total")])


@pytest.mark.parametrize("name", ["paper", "token", "none", "official", "dflash", "osd", "all"])
def test_closed_forms_equal_autograd(name):
    case = Case()
    fast, slow = (case.run(MIXTURES[name](), chunk=4, closed_form=closed) for closed in (True, False))
    assert torch.allclose(fast.loss, slow.loss, rtol=1e-12)
    assert torch.allclose(case.gradient(fast.loss), case.gradient(slow.loss), atol=1e-12)
    assert fast.stats.keys() == slow.stats.keys()
    for key, pair in slow.stats.items():
        assert torch.allclose(fast.stats[key], pair, rtol=1e-9), key
    assert torch.equal(fast.candidates, slow.candidates)


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["paper", "token", "osd", "all"])
def test_a_vocabulary_of_many_blocks_in_many_tiles(name, threads, monkeypatch):
    """700 entries are two blocks of the fast argmax and a rest; tiles of two rows, shared between threads."""
    monkeypatch.setattr("adaflash.losses.workspace.TILE", 1400)
    case = Case(vocabulary=700)
    result, (loss, _) = case.run(MIXTURES[name](), chunk=7), case.oracle(MIXTURES[name]())
    assert torch.allclose(result.loss, loss, rtol=1e-12)
    assert torch.allclose(case.gradient(result.loss), case.gradient(loss), atol=1e-12)
    expected = torch.where(case.blocks.supervised, (case.hidden[:, 1:] @ case.matrix.T).argmax(-1), -1)
    assert torch.equal(result.candidates, expected)
    assert torch.get_num_threads() == threads and inherited_threads() == threads


def inherited_threads():
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


def test_an_error_in_a_worker_reaches_the_caller(threads, monkeypatch):
    monkeypatch.setattr("adaflash.losses.workspace.TILE", 2 * VOCABULARY)
    case = Case()
    with torch.no_grad():
        case.hidden[2, 3] = float("nan")
    with pytest.raises(NumericalError, match="anchor 7, candidate 3"):
        case.run(paper())
    monkeypatch.setattr("adaflash.losses.closed_form.argmax_rows", None)
    with pytest.raises(TypeError, match="not callable"):
        Case().run(paper())
    assert torch.get_num_threads() == threads and inherited_threads() == threads


@pytest.mark.parametrize("name", ["paper", "token", "none", "dflash", "osd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_closed_forms_at_the_extremes(name, dtype):
    """Logits of +-1e4 and -inf entries: finite, and what autograd says."""
    case = Case(dtype)
    with torch.no_grad():
        case.hidden[0] *= 3e3
        case.teacher[2] *= 3e3

    def head(states):
        logits = states @ case.matrix.T
        return torch.where(torch.arange(VOCABULARY) % 5 == 4, -torch.inf, logits)

    case.blocks.labels[case.blocks.labels % 5 == 4] = 0
    case.head = head
    fast, slow = (case.run(MIXTURES[name](), chunk=4, closed_form=closed) for closed in (True, False))
    assert fast.loss.isfinite() and fast.loss.item() == pytest.approx(slow.loss.item(), rel=1e-4)
    found, expected = (case.gradient(result.loss).float() for result in (fast, slow))
    assert found.isfinite().all()
    bound = 1e-4 if dtype == torch.float32 else 3e-2
    assert (found - expected).abs().max() <= bound * expected.abs().max()


def test_stats_have_the_same_keys_with_nothing_to_learn():
    case = Case()
    full, empty = case.run(paper()), case.run(paper(), part=slice(0, 0))
    assert full.stats.keys() == empty.stats.keys() == {"rkl/removed", "rkl/cut", "ce/of_loss", "rkl/of_loss"}
    assert full.terms.keys() == empty.terms.keys() == {"ce", "rkl"}


def test_sampled_slots_are_unbiased_and_all_of_weight_one():
    """Row i is kept with p = w_i and counts 1: the average over draws is the full gradient, within its error."""
    case = Case()
    full = case.run(paper())
    expected, total = case.gradient(full.loss), full.weight
    torch.manual_seed(0)
    draws = []
    for _ in range(400):
        result = case.run(paper(), sampling=SlotSampling())
        assert result.weight == total  # the denominator is that of the full weights
        draws.append(torch.cat([result.loss.detach()[None], case.gradient(result.loss).flatten()]))
    draws = torch.stack(draws)
    target = torch.cat([full.loss.detach()[None], expected.flatten()])
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - target).abs() <= 4.5 * error + 1e-12).all()
    assert (error > 1e-4).any()  # it does vary


@pytest.mark.parametrize("cap", [0.5, 1.0, 2.0])
def test_slot_sampling_by_its_formula(cap):
    weights = torch.tensor([[1.5, 1.0, 0.25, 0.0]])
    sampling = SlotSampling(cap)
    drawn = torch.stack([sampling(weights, torch.Generator().manual_seed(seed))[0] for seed in range(3000)])
    chance = (weights[0] / cap).clamp(max=1)
    value = torch.where(weights[0] > 0, weights[0] / chance, 0.0)
    for k in range(4):
        assert set(drawn[:, k].tolist()) <= {0.0, value[k].item()}
        assert (drawn[:, k] > 0).float().mean().item() == pytest.approx(chance[k].item(), abs=0.03)


def test_sampled_slots_label_acceptance_as_all_of_them_would():
    case = Case()
    case.blocks.labels[:] = case.run(paper()).candidates.clamp(min=0)  # all right, but for what is spoiled here
    case.blocks.labels[0, 2] += 1
    case.blocks.labels[3, 0] += 1
    case.blocks.labels.remainder_(VOCABULARY)
    whole = case.run(paper()).candidates
    expected = agreeing_prefix(whole, case.blocks.labels, case.blocks.supervised)
    skipped = 0
    for seed in range(20):
        torch.manual_seed(seed)
        found = case.run(paper(), sampling=SlotSampling()).candidates
        assert torch.equal(agreeing_prefix(found, case.blocks.labels, case.blocks.supervised), expected)
        known = found >= 0
        assert torch.equal(found[known], whole[known])
        skipped += int((~known & case.blocks.supervised).sum())
    assert skipped > 0


def test_without_gradients_nothing_is_sampled():
    case = Case()
    with torch.no_grad():
        sampled, full = case.run(paper(), sampling=SlotSampling()), case.run(paper())
    assert sampled.loss == full.loss and (sampled.candidates >= 0).equal(case.blocks.supervised)


def test_an_undeclared_share_is_named():
    class Sloppy(TotalVariation):
        def evaluate(self, student, teacher, token):
            values = self(student, teacher, token)
            return Evaluation(values, {"extra": (values, values)})

    with pytest.raises(ValueError, match="share 'extra'"):
        Case().run([Sloppy()])


def test_each_terms_part_of_the_loss():
    case = Case()
    result = case.run(paper())
    part, whole = result.stats["ce/of_loss"]
    assert torch.allclose(whole, result.loss.detach()) and torch.allclose(part, 0.8 * result.terms["ce"])


def test_gradient_norms_of_each_term():
    case = Case()
    step = DraftStep(paper(), ExponentialDecay(), 4)
    norms = step.gradient_norms(case.hidden, case.blocks, case.teacher, case.offsets, case.head)
    for term in paper():
        loss, weight = case.oracle([term])
        norm = float(norms[f"grad_norm/loss/{term.name}"].sqrt() / weight)
        assert norm == pytest.approx(float(case.gradient(loss).norm() / weight), rel=1e-6)


@pytest.mark.parametrize("terms", [paper(), [TokenCrossEntropy()], []])
@pytest.mark.parametrize("weights", [ExponentialDecay(), HalfSilent()])
def test_survival_under_the_law_the_target_samples_from(terms, weights):
    case = Case()

    def law(logits):
        return (logits / 0.7).softmax(-1)

    result = case.run(terms, weights, chunk=3, law=law)
    probability = law(case.taught() @ case.matrix.T)
    chosen = (case.hidden.detach()[:, 1:] @ case.matrix.T).argmax(-1)
    expected = torch.where(case.blocks.supervised, probability.gather(-1, chosen[..., None])[..., 0], 0.0)
    assert torch.allclose(result.survival, expected.float(), atol=1e-6)
    assert torch.equal(result.candidates, torch.where(case.blocks.supervised, chosen, -1))
    assert case.run(terms, weights).survival is None


def test_expected_acceptance_by_hand():
    candidates = torch.tensor([[5, 6, 7], [5, 6, 7], [1, -1, -1]])
    labels = torch.tensor([[5, 6, 0], [0, 6, 7], [1, 0, 0]])
    supervised = torch.tensor([[True] * 3, [True] * 3, [True, False, False]])
    survival = torch.tensor([[0.5, 0.25, 0.125]] * 3)
    found = expected_acceptance(candidates, survival, labels, supervised)
    assert found.tolist() == [0.875, 0.5, 0.5]


def test_expected_acceptance_is_what_sampling_gives():
    """Trajectories drawn token by token from the law; a drafter that always proposes the likeliest token."""
    generator = torch.Generator().manual_seed(0)
    law = torch.rand(3, 4, generator=generator).softmax(-1)  # position by position, whatever came before
    drafted = law.argmax(-1)
    truth = sum(float(law.amax(-1)[: k + 1].prod()) for k in range(3))
    labels = torch.stack([torch.multinomial(law[k], 40_000, True, generator=generator) for k in range(3)], 1)
    everything = torch.ones_like(labels, dtype=torch.bool)
    survival = law.amax(-1).expand(len(labels), 3)
    found = expected_acceptance(drafted.expand_as(labels), survival, labels, everything)
    assert found.mean().item() == pytest.approx(truth, abs=4 * float(found.std()) / 200)


@pytest.mark.parametrize("name", ["paper", "osd", "foreign"])
def test_under_autocast_as_the_oracle(name):
    case, terms = Case(torch.float32), MIXTURES[name]()
    with torch.autocast("cpu", torch.bfloat16):
        result, (loss, _) = case.run(terms, chunk=4), case.oracle(terms)
    assert result.loss.dtype == torch.float32 and result.loss.item() == pytest.approx(loss.item(), rel=1e-2)
    found, expected = case.gradient(result.loss), case.gradient(loss)
    assert found.dtype == torch.float32 and (found - expected).abs().max() < 2e-2 * expected.abs().max()


class Widest(TorchDispatchMode):
    """Most rows of any tensor [., V] that an operation makes."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[1] == VOCABULARY and len(out) != HIDDEN:
            self.rows = max(self.rows, len(out))  # the head's own matrix is [H, V]
        return out


@pytest.mark.parametrize("terms", [paper(), [JensenShannon(), FunctionTerm(cubed)]])
def test_memory_grows_with_the_chunk_not_with_the_blocks(terms):
    case = Case()
    many = Blocks(**{f.name: getattr(case.blocks, f.name).repeat_interleave(4, 0) for f in dataclasses.fields(Blocks)})
    hidden = case.hidden.detach().repeat_interleave(4, 0).requires_grad_()
    for chunk in (5, 20):
        with Widest() as widest:
            step = DraftStep(terms, ExponentialDecay(), chunk)
            step(hidden, many, case.teacher, case.offsets.repeat_interleave(4), case.head).loss.backward()
        assert chunk - 2 <= widest.rows <= chunk


# ---- a drafter that cannot say everything ----

SAID = [1, 3, 4, 8, 9, 10, 15, 21, 22]
LIMITED = [name for name in MIXTURES if name not in ("osd", "top-k", "foreign", "all")]


def limited(case):
    """The head of a drafter that can say nine tokens, and the same over the whole vocabulary, -inf elsewhere."""
    said = DraftVocabulary.of(torch.tensor(SAID), VOCABULARY)
    rows = case.matrix[said.tokens]

    def wide(states):
        logits = torch.full((len(states), VOCABULARY), -torch.inf, dtype=states.dtype)
        for place, token in enumerate(SAID):
            logits[:, token] = states @ rows[place]
        return logits

    return DraftHead(lambda states: states @ rows.T, said), wide


@pytest.mark.parametrize("closed_form", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("name", [*LIMITED, "others"])
def test_a_limited_vocabulary_is_one_of_which_the_rest_is_minus_infinity(name, chunk, closed_form):
    """Reverse KL against the whole teacher, whatever is clipped; a cross-entropy that cannot be learned counts zero."""
    case = Case()
    terms = [JensenShannon(), TotalVariation(0.3), *paper()] if name == "others" else MIXTURES[name]()
    head, wide = limited(case)
    result = case.run(terms, chunk=chunk, closed_form=closed_form, drafted=head)
    loss, weight = case.oracle(terms, drafted=wide)
    torch.testing.assert_close(result.loss, loss)
    torch.testing.assert_close(case.gradient(result.loss), case.gradient(loss))
    assert float(loss) < 100 * float(weight)  # nothing counts as -log 0
    drafted = wide(case.hidden[:, 1:].flatten(0, 1)).argmax(-1).view_as(result.candidates)
    assert torch.equal(result.candidates, torch.where(case.blocks.supervised, drafted, -1))
    outside = [n for n in case.calls if n > len(case.teacher)]
    assert not outside  # the target's head has seen the teacher's rows and no other


@pytest.mark.parametrize("name", LIMITED)
def test_shares_of_a_limited_vocabulary_equal_the_plain_ones(name):
    case = Case()
    one, other = (case.run(MIXTURES[name](), closed_form=way, drafted=limited(case)[0]) for way in (True, False))
    for key, value in one.stats.items():
        torch.testing.assert_close(value, other.stats[key], msg=key)


@pytest.mark.parametrize("weights", [DynamicConfidence(), FirstMismatch(ExponentialDecay())])
def test_weights_that_look_first_see_what_a_limited_drafter_says(weights):
    case = Case()
    head, wide = limited(case)
    result = case.run(paper(), weights, chunk=4, drafted=head)
    log_s = wide(case.hidden.detach()[:, 1:].flatten(0, 1)).log_softmax(-1).view(*case.blocks.supervised.shape, -1)
    right = (case.taught() @ case.matrix.T).argmax(-1)
    first = FirstPass(log_s.argmax(-1), log_s.argmax(-1) == right, log_s.gather(-1, right[..., None])[..., 0].exp())
    expected = weights(case.blocks.supervised, first)
    torch.testing.assert_close(result.weight, expected.sum(dtype=torch.float64))


def test_sampled_slots_and_survival_of_a_limited_vocabulary():
    """Candidates are token ids everywhere, and the target samples from all of its tokens."""
    case = Case()
    head, wide = limited(case)
    law = lambda logits: (logits / 0.7).softmax(-1)  # noqa: E731
    torch.manual_seed(0)
    result = case.run(paper(), chunk=3, drafted=head, sampling=SlotSampling(), law=law)
    drafted = wide(case.hidden.detach()[:, 1:].flatten(0, 1)).argmax(-1).view_as(result.candidates)
    seen = result.candidates >= 0
    assert torch.equal(result.candidates[seen], drafted[seen]) and bool((~seen & case.blocks.supervised).any())
    chance = law(case.taught() @ case.matrix.T).gather(-1, drafted[..., None])[..., 0].float()
    torch.testing.assert_close(result.survival[seen], chance[seen])


def test_maps_and_bounds_of_a_vocabulary_by_hand():
    said = DraftVocabulary.of(torch.tensor([7, 2, 5, 2]), 9)
    assert said.tokens.tolist() == [2, 5, 7]
    maps = said.maps()
    assert maps["d2t"].tolist() == [2, 4, 5]
    assert maps["t2d"].nonzero().flatten().tolist() == [2, 5, 7] and len(maps["t2d"]) == 9
    again = DraftVocabulary.from_maps(**maps)
    assert torch.equal(again.tokens, said.tokens) and torch.equal(again.place, said.place)
    assert said.widen(torch.tensor([1.0, 2.0, 3.0])).tolist() == [-math.inf] * 2 + [1.0] + [-math.inf] * 2 + [
        2.0, -math.inf, 3.0, -math.inf,
    ]  # fmt: skip
    labels = torch.tensor([[2, 5, 1], [7, 0, 2], [5, 5, 0]])
    supervised = torch.tensor([[True, True, True], [True, True, True], [True, True, False]])
    bounds = said.bounds(labels, supervised, torch.tensor([True, True, False]))
    assert bounds["vocabulary/coverage"].tolist() == [6, 8]
    assert bounds["vocabulary/tau_bound"].tolist() == [3 + 2, 2]
