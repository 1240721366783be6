"""Terms are thin: they carry weight, name and settings to the pure functions, and YAML can make each of them."""

import inspect

import pytest
import torch
from jsonargparse import ArgumentParser

import adaflash.losses as losses
from adaflash.losses import FunctionTerm, LossTerm, check_names
from adaflash.losses import divergences as d

TERMS = [value for value in vars(losses).values() if inspect.isclass(value) and issubclass(value, LossTerm)]
SHIPPED = [term for term in TERMS if term not in (LossTerm, FunctionTerm)]
FUNCTIONS = {
    "TeacherCrossEntropy": d.teacher_cross_entropy,
    "TokenCrossEntropy": d.token_cross_entropy,
    "ForwardKL": d.forward_kl,
    "ReverseKL": d.reverse_kl,
    "JensenShannon": d.jensen_shannon,
    "TotalVariation": d.total_variation,
    "NegativeLogAcceptance": d.negative_log_acceptance,
}


def test_every_shipped_term_is_tested():
    assert {term.__name__ for term in SHIPPED} == set(FUNCTIONS)


@pytest.mark.parametrize("kind", SHIPPED)
def test_a_term_is_its_function(kind):
    torch.manual_seed(0)
    rows = torch.randn(4, 9), torch.randn(4, 9), torch.tensor([0, 1, 2, 3])
    term = kind(weight=0.3, name="x")
    assert torch.equal(term(*rows), FUNCTIONS[kind.__name__](*rows))
    assert torch.equal(term.evaluate(*rows).values, term(*rows))
    assert (term.weight, term.name, kind().name) == (0.3, "x", kind.__name__)


def test_settings_reach_the_function():
    torch.manual_seed(1)
    rows = torch.randn(4, 9), 3 * torch.randn(4, 9), torch.tensor([0, 1, 2, 3])
    assert torch.equal(losses.ForwardKL(temperature=2.0)(*rows), d.forward_kl(*rows, temperature=2.0))
    term = losses.ReverseKL(clip="token", threshold=0.3, temperature=2.0)
    assert torch.equal(term(*rows), d.reverse_kl(*rows, clip="token", threshold=0.3, temperature=2.0))
    assert not torch.equal(term(*rows), d.reverse_kl(*rows))
    assert torch.equal(losses.ForwardKL(top_k=3)(*rows), d.forward_kl(*rows, top_k=3))
    assert torch.equal(losses.ReverseKL(top_k=3)(*rows), d.reverse_kl(*rows, top_k=3))
    official = losses.ReverseKL(clip="official")
    official.begin(7.0)
    assert torch.equal(official(*rows), d.reverse_kl(*rows, clip="official", total_weight=7.0))


def test_shares_of_what_was_clipped():
    torch.manual_seed(2)
    student, teacher = torch.randn(4, 9), 3 * torch.randn(4, 9)
    result = losses.ReverseKL(clip="entry", threshold=0.1).evaluate(student, teacher, torch.zeros(4, dtype=torch.int64))
    removed, whole = result.shares["removed"]
    assert torch.allclose(whole, d.reverse_kl(student, teacher, torch.zeros(4), clip="none"))
    assert torch.allclose(removed, whole - result.values) and (removed > 0).all()
    cut, entries = result.shares["cut"]
    assert (entries == 9).all() and (cut > 0).all() and (cut < 9).all()


def test_only_the_data_token_needs_no_teacher():
    assert [term.__name__ for term in SHIPPED if not term.needs_teacher] == ["TokenCrossEntropy"]
    losses.TokenCrossEntropy()(torch.randn(2, 3), None, torch.tensor([0, 1]))


@pytest.mark.parametrize("kind", [*SHIPPED, losses.ExponentialDecay, losses.Uniform, losses.FirstMismatch])
def test_every_argument_is_annotated(kind):
    """Lightning lets an untyped argument become None without a word."""
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    if kind.__init__ is object.__init__:
        return
    assert all(parameter.annotation is not inspect.Parameter.empty for parameter in parameters)
    assert all(parameter.default is not inspect.Parameter.empty for parameter in parameters)


@pytest.mark.parametrize("kind", SHIPPED)
def test_yaml_makes_it(kind):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--terms", type=list[LossTerm], default=[])
    path = f"adaflash.losses.{kind.__name__}"
    config = parser.parse_args([f'--terms=[{{"class_path": "{path}", "init_args": {{"weight": 0.5, "name": "a"}}}}]'])
    (term,) = parser.instantiate(config).terms
    assert type(term) is kind and term.weight == 0.5 and term.name == "a"


def test_two_terms_of_one_name_are_refused():
    check_names([losses.TotalVariation(name="a"), losses.TotalVariation(name="b")])
    with pytest.raises(ValueError, match=r"'a' .*TotalVariation and JensenShannon"):
        check_names([losses.TotalVariation(name="a"), losses.ForwardKL(), losses.JensenShannon(name="a")])
    with pytest.raises(ValueError, match="dot"):
        check_names([losses.TotalVariation(name="a.b")])


@pytest.mark.parametrize("wrong", [lambda: losses.ReverseKL(temperature=0.0), lambda: losses.ReverseKL(threshold=-1.0)])
def test_settings_without_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="must be positive"):
        wrong()
