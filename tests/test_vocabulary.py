"""A drafter that can say some of the target's tokens: counted, trained, saved, served, and still lossless."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fitting
import pytest
import tiny
import torch
from exporting import make_source, save_run, save_target
from lightning.pytorch.callbacks import Callback
from proof import BLOCK, POLICIES, Pair, Scripted, assert_same
from safetensors.torch import load_file, save_file

from adaflash.cli import main
from adaflash.data.vocabulary import most_frequent, vocabulary
from adaflash.decoding.engine import Engine
from adaflash.drafters.dflash import DFlash
from adaflash.errors import UserError
from adaflash.export.command import export_drafter
from adaflash.export.own import load_drafter, save_drafter
from adaflash.export.probe import candidates_after, read_probe
from adaflash.export.source import Source
from adaflash.length.confidence import Confidence
from adaflash.losses import ForwardKL, TokenCrossEntropy
from adaflash.rollouts.recorded import RecordedRollout
from adaflash.run import load_run
from adaflash.targets.hf import HFTarget
from adaflash.types import Prompt, Request
from adaflash.vocabulary import DraftVocabulary, read_vocabulary, write_vocabulary

SAID = [0, 1, 2, 5, 7, *range(10, 60), 90, 95]


def words(file: Path, tokens: list[int] = SAID, size: int = tiny.VOCAB) -> str:
    """A vocabulary file."""
    write_vocabulary(file, DraftVocabulary.of(torch.tensor(tokens), size), {})
    return str(file)


def limited(target: HFTarget, folder: Path, tokens: list[int] = SAID, **settings: Any) -> DFlash:
    """A noisy drafter with such a vocabulary."""
    return tiny.drafter(target, noise=0.05, vocabulary=words(folder / "words.json", tokens), **settings)


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny.target()


# ---- the file ----


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "not a vocabulary file .FileNotFoundError"),
        ("[1, 2", "not a vocabulary file .JSONDecodeError"),
        ("[1, 2]", "not a vocabulary file .TypeError"),
        ('{"vocabulary": 97}', "not a vocabulary file .KeyError: 'tokens'"),
        ('{"vocabulary": 49152, "tokens": [1, 2]}', "counted for a target with 49152 tokens, this one has 97"),
        ('{"vocabulary": 97, "tokens": [1, 2, 97]}', "ids 0 .. 96"),
        ('{"vocabulary": 97, "tokens": [1, 2, "x"]}', "ids 0 .. 96"),
        ('{"vocabulary": 97, "tokens": 5}', "list of ids"),
        ('{"vocabulary": 97, "tokens": [1]}', "lacks at least two tokens"),
        ('{"vocabulary": 97, "tokens": [1, 2, 3]}', r"lacks the stop tokens \[4, 9\]"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(content: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "words.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=rf"model\.drafter\.init_args\.vocabulary: .*words\.json.*{message}"):
        read_vocabulary(str(file), 97, (4, 9))


# ---- counting ----


def rows(folder: Path, responses: list[list[int]]) -> str:
    prompts = [Prompt(f"p{i}", "ab"[i % 2], (3, 4), tuple(r), "stop") for i, r in enumerate(responses)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in fitting.rows(prompts)))
    return str(folder / "rows.jsonl")


def test_counting_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """20 responses; the tenth and the twentieth, both of domain b, are not counted for the table but for the file."""
    name = save_target(tmp_path / "target", stop_ids=(8, 9))
    data = rows(tmp_path, [[20, 20, 21, 21, 21, 30, 8] if i % 10 else [20, 21, 21, 40, 40, 40] for i in range(1, 21)])
    out = tmp_path / "deep" / "words.json"
    assert main(["vocabulary", "--target", name, "--rows", data, "--size", "6", "--output", str(out)]) == 0
    # 21: 54 + 4, 20: 36 + 2, 30: 18, 8: 18 and 9: 0 are stops, 40: 6; prompts do not count
    assert json.loads(out.read_text())["tokens"] == [8, 9, 20, 21, 30, 40]
    said = capsys.readouterr().out
    assert "b can be said                  33.33%   50.00%   50.00%" in said  # at 3, 6 and 12; the others hold no 40
    assert "all can be said" in said and "138 tokens of 20 responses" in said
    assert read_vocabulary(str(out), tiny.VOCAB, (8, 9)).tokens.tolist() == [8, 9, 20, 21, 30, 40]
    assert main(["vocabulary", "--target", name, "--rows", data, "--size", "6", "--output", str(out)]) == 2
    assert "--force" in capsys.readouterr().err


def test_most_frequent_ties_and_leftovers_go_to_lower_ids() -> None:
    from collections import Counter

    assert most_frequent(Counter({9: 3, 4: 1, 2: 1}), 5, [7], 12) == [0, 2, 4, 7, 9]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 1}, "allowed are 2 .. 96"),
        ({"size": 97}, "allowed are 2 .. 96"),
        ({"size": 4, "keep": [97]}, "ids below 97"),
        ({"rows": "nowhere*.jsonl"}, "nowhere"),
        ({}, "3 responses can be counted, 10 are needed"),
    ],
)
def test_counting_refuses(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    name, data = save_target(tmp_path / "target"), rows(tmp_path, [[20, 21]] * 3)
    with pytest.raises(UserError, match=message):
        vocabulary(**{"target": name, "rows": data, "size": 6, "output": str(tmp_path / "words.json"), **changes})
    assert not (tmp_path / "words.json").exists()


# ---- decoding ----


class Limited(Scripted):
    """Proposes the known responses; its head lacks the rows of some of their tokens."""

    said: Any = None

    def __init__(self, its: Pair) -> None:
        super().__init__(its.oracle, its.wanted, 1.0)
        used = sorted({token for response in its.wanted.values() for token in response})
        self.said = DraftVocabulary.of(torch.tensor([token for i, token in enumerate(used) if i % 4]), tiny.VOCAB)


@pytest.mark.parametrize("policy", ["full", "random", "adaptive", "confident", "survival"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_greedy_text_is_the_targets_own(family: str, policy: str) -> None:
    its = Pair(family, count=5, length=20)
    drafter = Limited(its)
    engine = Engine(its.target, drafter, POLICIES[policy](), lanes=3, all_candidates=policy == "adaptive")
    results = assert_same(engine, its.oracle, its.wanted, Request((), 20))
    sayable = set(drafter.said.tokens.tolist())
    seen = rejected = 0
    for each in results:
        drafted = each.blocks.candidates[each.blocks.candidates >= 0]
        assert set(drafted.tolist()) <= sayable
        if policy == "full":  # the perfect drafter: accepted up to the first token it cannot say
            for anchor, accepted in zip(each.blocks.anchors.tolist(), each.blocks.accepted.tolist(), strict=True):
                text = each.tokens[anchor + 1 : anchor + BLOCK].tolist()
                can = next((i for i, token in enumerate(text) if token not in sayable), len(text))
                assert accepted in (can, can - 1)  # one less where the response ends
                seen, rejected = seen + accepted, rejected + (can < len(text))
    assert policy != "full" or (seen > 10 and rejected > 5)


@pytest.mark.parametrize("verification", ["exact", "rejection"])
def test_sampled_text_and_laws(verification: Any, tmp_path: Path) -> None:
    """Exact: the text does not depend on the drafter. Rejection: the law of a draft lies on what can be said alone."""
    target = tiny.target()
    drafter = limited(target, tmp_path)
    requests = [Request(p.tokens, 16, temperature=0.8, top_k=20, seed=i) for i, p in enumerate(tiny.prompts(4))]
    plain = Engine(target).generate(requests)
    drafted = Engine(target, drafter, verification=verification, lanes=2).generate(requests)
    assert all(not each.error for each in drafted)
    for each in drafted:
        known = each.blocks.candidates[each.blocks.candidates >= 0]
        assert set(known.tolist()) <= set(SAID) and len(known)
    if verification == "exact":
        assert [each.tokens.tolist() for each in drafted] == [each.tokens.tolist() for each in plain]


def test_drafting_computes_only_those_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's head sees the prompt's end and what is verified, never a state of the drafter."""
    target = tiny.target()
    drafter, asked = limited(target, tmp_path), []
    head = target.head
    monkeypatch.setattr(
        target, "head", lambda hidden: (asked.append(hidden.numel() // hidden.shape[-1]), head(hidden))[1]
    )
    engine = Engine(target, drafter)
    engine.generate([Request(p.tokens, 12) for p in tiny.prompts(3)])
    assert sum(asked) == engine.passes["verify_rows"] + 3
    assert drafter.head(target)(torch.randn(2, 64)).shape == (2, len(SAID))
    assert drafter.head(target) is drafter.head(target)  # rows are copied once


# ---- training ----


class Logged(Callback):
    def __init__(self) -> None:
        self.last: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.last = {name: float(value) for name, value in trainer.callback_metrics.items()}


def module(target: HFTarget, folder: Path, tokens: list[int] = SAID, **settings: Any) -> Any:
    drafter = DFlash(
        1,
        8,
        context_layers=[0, 2],
        mask_id=tiny.VOCAB - 1,
        vocabulary=words(folder / "words.json", tokens),
        init="random",
    )
    return fitting.module(target, **{"drafter": drafter, **settings})


def test_fit_learns_logs_the_bounds_and_resumes(target: HFTarget, tmp_path: Path) -> None:
    prompts = [Prompt(f"p{i}", "a", (3, 4, i), tuple([20, 21, 61, 22, 23, 24, 62, 25] * 2)) for i in range(4)]
    logged, data = Logged(), fitting.data(tmp_path, prompts, reuse=1)
    made = module(target, tmp_path, rollout=RecordedRollout(), num_anchors=100, length=Confidence())
    trainer = fitting.trainer(tmp_path, 3, [logged])
    trainer.fit(made, datamodule=data)
    labels = torch.tensor([20, 21, 61, 22, 23, 24, 62, 25] * 2)
    runs, inside, seen = [], 0, 0
    for anchor in range(15):
        block = [int(token) in SAID for token in labels[anchor + 1 : anchor + 8]]
        inside, seen = inside + sum(block), seen + len(block)
        if len(block) == 7:
            runs.append(1 + [*block, False].index(False))
    assert logged.last["vocabulary/coverage"] == pytest.approx(inside / seen)
    assert logged.last["vocabulary/tau_bound"] == pytest.approx(sum(runs) / len(runs))
    assert 0 < logged.last["loss/ce"] < 20 and logged.last["grad_norm/drafter"] > 0
    trainer.save_checkpoint(tmp_path / "made.ckpt")
    saved = torch.load(tmp_path / "made.ckpt", weights_only=True)["state_dict"]
    assert (saved["drafter.d2t"] + torch.arange(len(SAID))).tolist() == SAID
    assert saved["drafter.t2d"].nonzero().flatten().tolist() == SAID
    other = module(target, tmp_path, [*SAID[:-1], 96], rollout=RecordedRollout(), length=Confidence())
    with pytest.raises(UserError, match=r"vocabulary is '57 of 97 tokens .* this run's is '57 of 97 tokens"):
        fitting.trainer(tmp_path, 4).fit(
            other, datamodule=fitting.data(tmp_path, prompts), ckpt_path=tmp_path / "made.ckpt"
        )
    whole = fitting.module(target, rollout=RecordedRollout(), length=Confidence())
    with pytest.raises(UserError, match=r"vocabulary is '57 of 97 tokens .* this run's is None"):
        fitting.trainer(tmp_path, 4).fit(
            whole, datamodule=fitting.data(tmp_path, prompts), ckpt_path=tmp_path / "made.ckpt"
        )


def test_losses_that_would_be_infinite_are_refused_by_name(target: HFTarget, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"fkl \(ForwardKL\) would be infinite"):
        module(target, tmp_path, losses=[TokenCrossEntropy(), ForwardKL(name="fkl")])
    module(target, tmp_path, losses=[TokenCrossEntropy()])


def test_a_run_is_loaded_without_the_file(tmp_path: Path) -> None:
    name = save_target(tmp_path / "target")
    made = save_run(tmp_path / "run", name)
    content = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)
    said = DraftVocabulary.of(torch.tensor(SAID), tiny.VOCAB)
    content["state_dict"] |= {f"drafter.{key}": value for key, value in said.maps().items()}
    config = json.loads(content["adaflash"]["provenance"]["config"])
    config["model"]["drafter"]["init_args"]["vocabulary"] = "gone.json"
    config["model"]["losses"] = [{"class_path": "adaflash.losses.ReverseKL"}]
    content["adaflash"]["provenance"]["config"] = json.dumps(config)
    torch.save(content, tmp_path / "run" / "last.ckpt")
    again = load_run(tmp_path / "run")
    assert again.drafter.said is not None and again.drafter.said.tokens.tolist() == SAID
    assert torch.equal(again.drafter.fc.weight, made.drafter.fc.weight)


# ---- formats ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_own_format_keeps_the_maps(target: HFTarget, tmp_path: Path, dtype: Any) -> None:
    drafter = limited(target, tmp_path)
    folder = save_drafter(drafter, None, target, tmp_path / "own", dtype)
    tensors = load_file(folder / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert json.loads((folder / "config.json").read_text())["draft_vocab_size"] == len(SAID)
    again, _ = load_drafter(folder, target)
    assert again.said is not None and again.said.tokens.tolist() == SAID
    features = torch.randn(5, 128)
    assert torch.equal(
        candidates_after(again, target, 3, features)[0], candidates_after(drafter, target, 3, features)[0]
    )
    # and training goes on from it, with its vocabulary
    on = DFlash(block_size=8, checkpoint=str(folder))
    on.build(target)
    assert on.said is not None and torch.equal(on.t2d, drafter.t2d)


@pytest.mark.parametrize("to", ["sglang", "hf"])
def test_servers_that_would_use_the_whole_head_are_refused(target: HFTarget, tmp_path: Path, to: Any) -> None:
    source = Source(limited(target, tmp_path), None, target, make_source(target).origin)
    with pytest.raises(UserError, match=r"57 of 97 tokens .* knows no d2t and t2d.*--to vllm"):
        export_drafter(source, to, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["qwen3", "llama"])  # tied and untied
def test_vllm_brings_maps_and_its_rows_of_the_head(family: str, tmp_path: Path) -> None:
    target = tiny.target(family)
    source = Source(limited(target, tmp_path), None, target, make_source(target).origin)
    export_drafter(source, "vllm", tmp_path / "out", "float32")
    tensors, config = (
        load_file(tmp_path / "out" / "model.safetensors"),
        json.loads((tmp_path / "out" / "config.json").read_text()),
    )
    assert config["draft_vocab_size"] == len(SAID) and config["transformer_layer_config"]["vocab_size"] == tiny.VOCAB
    assert set(tensors) - set(source.drafter.state_dict()) == {"lm_head.weight"}
    assert torch.equal(tensors["lm_head.weight"], target.model.get_output_embeddings().weight[SAID])
    assert (tensors["d2t"] + torch.arange(len(SAID))).tolist() == SAID
    again, _ = load_drafter(tmp_path / "out", target)
    (probe, *_) = read_probe(tmp_path / "out")
    assert set(probe.candidates.tolist()) <= set(SAID) and again.said is not None
    # what a reader of the format computes: its own rows, then the map
    wide = target.head(torch.randn(6, 64, generator=torch.Generator().manual_seed(1)))
    places = wide[:, SAID].argmax(-1)
    assert (places + tensors["d2t"][places]).tolist() == [SAID[place] for place in places]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ({"lm_head.weight": lambda w: w + 1}, "lm_head.weight is weights of its own"),
        ({"d2t": lambda d: d.flip(0)}, "d2t and t2d name different tokens"),
        ({"t2d": lambda t: torch.cat([t, t[:1]])}, "number of tokens in t2d is 98, the target has 97"),
        ({"t2d": None}, "d2t or t2d is missing"),
    ],
)
def test_maps_that_do_not_fit_are_refused(
    spoil: dict[str, Any], message: str, target: HFTarget, tmp_path: Path
) -> None:
    export_drafter(
        Source(limited(target, tmp_path), None, target, make_source(target).origin), "vllm", tmp_path / "out", "float32"
    )
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    ((name, change),) = spoil.items()
    tensors = {**tensors, name: change(tensors[name])} if change else {k: v for k, v in tensors.items() if k != name}
    save_file(tensors, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=message):
        load_drafter(tmp_path / "out", target)
