"""Values by hand, directions, gradients by finite differences, and rows at the edge of what a float can hold."""

import math

import pytest
import torch

from adaflash.losses import NumericalError
from adaflash.losses import divergences as d

TOKEN = torch.tensor([1])
ALL = [
    d.token_cross_entropy,
    d.teacher_cross_entropy,
    d.forward_kl,
    d.reverse_kl,
    d.jensen_shannon,
    d.total_variation,
    d.negative_log_acceptance,
]
CLIPS = ["entry", "token", "none", "official"]


def logits(*probabilities, shift=0.0):
    return torch.tensor([probabilities]).log() + shift


@pytest.mark.parametrize(
    ("function", "student", "teacher", "expected"),
    [
        (d.teacher_cross_entropy, (0.3, 0.7), (0.9, 0.1), -math.log(0.3)),
        (d.token_cross_entropy, (0.3, 0.7), (0.9, 0.1), -math.log(0.7)),
        (d.forward_kl, (0.5, 0.5), (0.9, 0.1), 0.9 * math.log(1.8) + 0.1 * math.log(0.2)),  # 0.368
        (d.jensen_shannon, (0.5, 0.5), (0.9, 0.1), 0.101749),
        (d.total_variation, (0.5, 0.5), (0.8, 0.2), 0.3),
        (d.negative_log_acceptance, (0.5, 0.5), (0.8, 0.2), -math.log(0.7)),
    ],
)
def test_value_by_hand(function, student, teacher, expected):
    value = function(logits(*student, shift=3.0), logits(*teacher, shift=-5.0), TOKEN)
    assert value.shape == (1,) and value.dtype == torch.float32
    assert value.item() == pytest.approx(expected, abs=1e-5)


def test_directions_are_what_the_names_say():
    student, teacher = logits(0.5, 0.5), logits(0.9, 0.1)
    assert d.forward_kl(student, teacher, TOKEN).item() == pytest.approx(0.368, abs=5e-4)
    assert d.reverse_kl(student, teacher, TOKEN, clip="none").item() == pytest.approx(0.511, abs=5e-4)


@pytest.mark.parametrize(
    ("clip", "threshold", "expected"),
    [
        # entries of student (.5, .5), teacher (.9, .1): .5 ln(.5/.9) + .4 = .106107 and .5 ln 5 - .4 = .404719
        ("entry", 0.2, 0.106107 + 0.2),
        ("entry", None, 0.02),
        ("token", 0.4, 0.4),
        ("token", None, 0.510826),  # below 1 nat
        ("none", None, 0.510826),
        ("official", 0.1, 0.3),  # times the sum of weights, 3
        ("official", None, 0.03),
        ("official", 0.2, 0.510826),  # 0.6 nats are not reached
    ],
)
def test_clip_modes_by_hand(clip, threshold, expected):
    value = d.reverse_kl(logits(0.5, 0.5), logits(0.9, 0.1), TOKEN, clip, threshold, total_weight=3.0)
    assert value.item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("clip", "threshold", "expected"),
    [
        # at T = 2 the teacher is (.75, .25): entries .5 ln(2/3) + .25 = .047267 and .5 ln 2 - .25 = .096574
        ("none", None, 4 * 0.143841),
        ("entry", 0.05, 4 * (0.047267 + 0.05)),
        ("token", 0.1, 4 * 0.1),  # clipped first, then T^2
        ("official", 0.1, 0.3),  # the released code: T^2 first
    ],
)
def test_temperature_and_the_order_of_clip_and_square(clip, threshold, expected):
    student, teacher = logits(0.5, 0.5), logits(0.9, 0.1)
    value = d.reverse_kl(student, teacher, TOKEN, clip, threshold, temperature=2.0, total_weight=3.0)
    assert value.item() == pytest.approx(expected, abs=1e-5)
    forward = d.forward_kl(student, teacher, TOKEN, temperature=2.0).item()
    assert forward == pytest.approx(4 * (0.75 * math.log(1.5) + 0.25 * math.log(0.5)), abs=1e-5)


def test_parts_report_what_was_cut():
    student, teacher = logits(0.5, 0.5), logits(0.9, 0.1)
    entry = d.reverse_kl_parts(student, teacher, "entry", 0.2)
    assert (entry.cut.item(), entry.out_of) == (1, 2)
    assert (entry.whole - entry.clipped).item() == pytest.approx(0.204719, abs=1e-5)
    token = d.reverse_kl_parts(student, teacher, "token", 0.4)
    assert (token.cut.item(), token.out_of) == (1, 1)
    assert d.reverse_kl_parts(student, teacher, "none").cut.item() == 0


def test_official_needs_the_sum_of_weights():
    with pytest.raises(ValueError, match="total_weight"):
        d.reverse_kl(logits(0.5, 0.5), logits(0.9, 0.1), TOKEN, "official")


@pytest.mark.parametrize("function", ALL)
def test_gradient_by_finite_differences(function):
    torch.manual_seed(0)
    student = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    teacher, token = torch.randn(3, 5, dtype=torch.float64), torch.tensor([0, 3, 4])
    assert torch.autograd.gradcheck(lambda s: function(s, teacher, token), (student,))


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_gradient_of_every_clip_mode(clip, temperature):
    torch.manual_seed(1)
    student = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    teacher = student.detach() + torch.linspace(0.01, 3, 4, dtype=torch.float64)[:, None] * torch.randn(4, 6).double()

    def loss(s):
        return d.reverse_kl(s, teacher, TOKEN, clip, 0.05, temperature, total_weight=2.0)

    assert torch.autograd.gradcheck(loss, (student,))
    cut = d.reverse_kl_parts(student, teacher, clip, 0.05, temperature, 2.0).cut
    assert clip == "none" or (0 < int((cut > 0).sum()) < 4)  # both sides of the threshold were differentiated


@pytest.mark.parametrize("function", [d.forward_kl, d.reverse_kl, d.jensen_shannon])
def test_equal_and_nearly_equal_rows(function):
    torch.manual_seed(2)
    student = torch.randn(8, 1000) * 3
    assert function(student, student + 7, TOKEN).abs().max() < 1e-9
    near = function(student, student + 1e-3 * torch.randn(8, 1000), TOKEN)
    exact = function(student.double(), (student + 0.0).double(), TOKEN)
    assert (near > 0).all() and (near < 1e-5).all() and (exact.abs() < 1e-12).all()


def test_acceptance_of_equal_rows_is_one_and_no_more():
    torch.manual_seed(10)
    student = torch.randn(200, 500)
    value = d.negative_log_acceptance(student, student, TOKEN)
    assert (value >= 0).all() and value.max() < 1e-5


def test_small_reverse_kl_keeps_its_precision():
    """Where the naive p (log p - log q) loses everything: a divergence of 1e-7 nats out of entries of 0.1."""
    torch.manual_seed(3)
    student = torch.randn(4, 50, dtype=torch.float64)
    teacher = student + 5e-4 * torch.randn(4, 50, dtype=torch.float64)
    exact = d.reverse_kl(student, teacher, TOKEN, "none")
    single = d.reverse_kl(student.float(), teacher.float(), TOKEN, "none")
    assert (exact < 2e-7).all()
    assert ((single - exact).abs() / exact).max() < 0.02


EXTREMES = {
    "far apart": ([1e4, -1e4, 0.0], [-1e4, 1e4, 0.0]),
    "teacher certain": ([0.0, 0.0, 0.0], [1e4, -1e4, -1e4]),
    "student certain": ([1e4, -1e4, -1e4], [0.0, 0.0, 0.0]),
    "teacher -inf": ([1.0, 2.0, 3.0], [0.0, -math.inf, 1.0]),
    "student -inf": ([0.0, -math.inf, 1.0], [1.0, 2.0, 3.0]),
    "both -inf": ([0.0, -math.inf, 1.0], [1.0, -math.inf, 3.0]),
    "one token left": ([-math.inf, 0.0, -math.inf], [0.0, -math.inf, -math.inf]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", EXTREMES)
@pytest.mark.parametrize("function", ALL)
def test_finite_at_the_extremes(function, case, dtype):
    rows = [torch.tensor([values]).to(dtype) for values in EXTREMES[case]]
    student = rows[0].requires_grad_()
    value = function(student, rows[1], torch.tensor([2]))
    assert value.isfinite().all() and (value >= 0).all()
    (grad,) = torch.autograd.grad(value.sum(), student)
    assert grad.isfinite().all()


@pytest.mark.parametrize("clip", CLIPS)
def test_reverse_kl_is_never_negative_and_finite(clip):
    torch.manual_seed(4)
    scale = 10.0 ** torch.linspace(-4, 4, 64)[:, None]
    for dtype in (torch.float32, torch.bfloat16):
        student, teacher = (torch.randn(64, 300) * scale).to(dtype), (torch.randn(64, 300) * scale.flip(0)).to(dtype)
        student.requires_grad_()
        value = d.reverse_kl(student, teacher, TOKEN, clip, total_weight=5.0)
        assert value.isfinite().all() and (value >= 0).all()
        assert torch.autograd.grad(value.sum(), student)[0].isfinite().all()


@pytest.mark.parametrize("function", ALL)
def test_half_precision_is_only_the_rounding_of_the_input(function):
    torch.manual_seed(5)
    student, teacher, token = torch.randn(6, 40).bfloat16(), torch.randn(6, 40).bfloat16(), torch.randint(40, (6,))
    assert torch.equal(function(student, teacher, token), function(student.float(), teacher.float(), token))


@pytest.mark.parametrize("clip", ["entry", "token", "none"])
def test_clipping_does_not_depend_on_the_batch(clip):
    torch.manual_seed(6)
    student, teacher = torch.randn(9, 30), 2 * torch.randn(9, 30)
    together = d.reverse_kl(student, teacher, TOKEN, clip, 0.02, total_weight=9.0)
    alone = torch.cat(
        [d.reverse_kl(student[i : i + 1], teacher[i : i + 1], TOKEN, clip, 0.02, total_weight=1.0) for i in range(9)]
    )
    assert torch.allclose(together, alone, atol=1e-7)


@pytest.mark.parametrize("function", ALL)
def test_the_teacher_is_cut_from_the_graph(function):
    torch.manual_seed(7)
    student, teacher = torch.randn(3, 5, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    value = function(student, teacher, torch.tensor([0, 1, 2])).sum()
    grads = torch.autograd.grad(value, [student, teacher], allow_unused=True)
    assert grads[1] is None and grads[0].abs().sum() > 0


@pytest.mark.parametrize(
    ("bad", "problem"), [(math.nan, "has NaN"), (math.inf, r"has \+inf"), (-math.inf, "is all -inf")]
)
@pytest.mark.parametrize("function", ALL)
@pytest.mark.parametrize("who", ["student", "teacher"])
def test_a_row_that_is_no_distribution_is_named(function, bad, problem, who):
    if function is d.token_cross_entropy and who == "teacher":
        pytest.skip("does not look at the teacher")
    rows = {"student": torch.randn(4, 5), "teacher": torch.randn(4, 5)}
    rows[who][2] = bad if bad == -math.inf else torch.tensor([0.0, bad, 0.0, 0.0, 0.0])
    with pytest.raises(NumericalError, match=f"{who} logits: row 2 {problem}") as caught:
        function(rows["student"], rows["teacher"], torch.tensor([0, 1, 2, 3]))
    assert caught.value.row == 2


def test_top_k_by_hand():
    """Teacher (.6, .3, .08, .02), k = 2: outcomes (.6, .3, .1) against the student's (.2, .3, .5)."""
    student, teacher = logits(0.2, 0.3, 0.1, 0.4), logits(0.6, 0.3, 0.08, 0.02)
    forward = 0.6 * math.log(3) + 0.1 * math.log(0.2)
    assert d.forward_kl(student, teacher, TOKEN, top_k=2).item() == pytest.approx(forward, abs=1e-6)
    reverse = 0.2 * math.log(1 / 3) + 0.5 * math.log(5)
    assert d.reverse_kl(student, teacher, TOKEN, "none", top_k=2).item() == pytest.approx(reverse, abs=1e-6)


@pytest.mark.parametrize("function", [d.forward_kl, d.reverse_kl])
def test_top_k_of_everything_is_the_whole_divergence(function):
    torch.manual_seed(8)
    student, teacher = torch.randn(5, 12), torch.randn(5, 12)
    whole = function(student, teacher, TOKEN)
    for top_k in (0, 12, 99):
        assert torch.equal(function(student, teacher, TOKEN, top_k=top_k), whole)
    assert torch.allclose(function(student, teacher, TOKEN, top_k=11), whole, atol=1e-6)


def test_a_student_that_leaves_the_teachers_set_pays():
    """Restricted to the set the divergence could be lowered by giving the set no mass (FAULTS 61)."""
    inside, outside = torch.tensor([[5.0, 4.0, -5.0, -5.0]]), torch.tensor([[-5.0, -6.0, 5.0, 5.0]])
    teacher = torch.tensor([[5.0, 4.0, -5.0, -5.0]])
    for function in (d.forward_kl, lambda s, t, y, top_k: d.reverse_kl(s, t, y, "none", top_k=top_k)):
        assert function(inside, teacher, TOKEN, top_k=2) < 1e-3
        assert function(outside, teacher, TOKEN, top_k=2) > 5
    certain = torch.tensor([[-math.inf, -math.inf, 0.0, 0.0]])
    assert d.reverse_kl(certain, teacher, TOKEN, "none", top_k=2).isfinite()


def test_top_k_gradient_by_finite_differences():
    torch.manual_seed(9)
    student = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(3, 7, dtype=torch.float64)
    for function in (d.forward_kl, lambda s, t, y, top_k: d.reverse_kl(s, t, y, "entry", 0.05, top_k=top_k)):
        assert torch.autograd.gradcheck(lambda s, f=function: f(s, teacher, TOKEN, top_k=3), (student,))
