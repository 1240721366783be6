"""K9: a run that is killed and goes on equals one that never stopped: weights, optimizer, data order, losses."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import yaml

STEPS = 7
UNEQUAL = {"callbacks", "adaflash"}  # paths, and the command that was typed; the rollout is compared on its own


@pytest.fixture(scope="module")
def bench(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a plugin that kills, and a small config; `straight` in it holds a run that never stopped."""
    folder = tmp_path_factory.mktemp("killed")
    shutil.copy(Path(processes.__file__).with_name("diary.py"), folder / "diary.py")
    for name, count in (("train", 11), ("val", 3)):
        rows = [{"id": f"{name}{i}", "prompt": f"{name} question {i}: " + "x" * i} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "target": str(target),
        "model": {
            "drafter": {"class_path": "adaflash.drafters.dflash.DFlash",
                        "init_args": {"num_layers": 1, "block_size": 4, "context_layers": [0, 2]}},
            "rollout": {"class_path": "adaflash.rollouts.live.LiveRollout",
                        "init_args": {"max_new_tokens": 10, "lanes": 4, "temperature": 0.8, "warm_updates": 2}},
            "optimizer": {"class_path": "adaflash.optim.AdamWConfig",
                          "init_args": {"lr": 0.01, "warmup": 3, "schedule": "cosine"}},
            "num_anchors": 4, "max_new_tokens": 6,
        },
        "data": {"train": [source(folder, "train")], "val": [source(folder, "val")], "val_batch_size": 1,
                 "batch_size": 2, "rollout_size": 4, "reuse": 2},
        "trainer": {"max_steps": STEPS, "val_check_interval": 4, "enable_progress_bar": False, "accelerator": "cpu",
                    "limit_train_batches": 4,  # update 4: a validation is due, and an epoch ends
                    "log_every_n_steps": 1,
                    "callbacks": [{"class_path": "diary.Diary"},
                                  {"class_path": "adaflash.callbacks.validate_first.ValidateFirst"}]},
        "gain": {"max_new_tokens": 4, "prompts_per_domain": 1},
        "last": {"every_n_train_steps": 2},
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder


def source(folder: Path, name: str) -> dict[str, Any]:
    return {"class_path": "adaflash.data.sources.JsonlSource", "init_args": {"path": str(folder / f"{name}.jsonl")}}


def fit(bench: Path, place: Path, *flags: str, kill: str = "") -> tuple[int, str]:
    """`adaflash fit` in a folder of its own; returns its status and what it said."""
    place.mkdir(exist_ok=True)
    shutil.copy(bench / "diary.py", place)
    killer = ["-c", str(bench / "kill.yaml")] if kill else []
    if kill:
        (bench / "kill.yaml").write_text(
            f"trainer: {{callbacks: [{{class_path: diary.Diary, init_args: {{{kill}}}}}, "
            "{class_path: adaflash.callbacks.validate_first.ValidateFirst}]}\n"
        )
    return processes.adaflash(["fit", "-c", str(bench / "run.yaml"), "--run", "run", *killer, *flags], place)


@pytest.fixture(scope="module")
def straight(bench: Path) -> Path:
    """A run that never stopped."""
    status, shown = fit(bench, bench / "straight")
    assert status == 0, shown
    return bench / "straight"


def checkpoint(place: Path) -> dict[str, Any]:
    return torch.load(place / "run" / "checkpoints" / "last.ckpt", weights_only=True)


def diary(place: Path) -> list[list[Any]]:
    """Batches and validations in the order of the updates; what was done twice counts as it was done last."""
    lines = [json.loads(line) for line in (place / "diary.jsonl").read_text().splitlines()]
    return [json.loads(line) for line in {json.dumps(line[:3]): json.dumps(line) for line in lines}.values()]


LOGGED = ("loss/", "share/", "grad_norm/", "train/agreement", "val/", "lr-")  # `train/tau` stays until the next rollout


def losses(place: Path) -> dict[str, dict[str, str]]:
    """What was logged by step, over the files of all the parts of a run."""
    rows: dict[str, dict[str, str]] = {}
    for path in [*sorted((place / "run").glob("metrics.*.csv")), place / "run" / "metrics.csv"]:
        with path.open() as file:
            for row in csv.DictReader(file):
                kept = {key: value for key, value in row.items() if value and key.startswith(LOGGED)}
                rows.setdefault(row["step"], {}).update(kept)
    return rows


def same(one: Any, other: Any, where: str = "") -> None:
    """Bitwise equality of nested states."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, pair in enumerate(zip(one, other, strict=True)):
            same(*pair, f"{where}[{index}]")
    else:
        assert one == other, where


CASES = {
    # what happens, other flags, exit status, last update that is saved
    "terminated": ("send: SIGTERM, at: 3, group: true", ["--data.num_workers", "2"], 143, 3),
    "ctrl-c-at-an-epochs-end": ("send: SIGINT, at: 4", [], 130, 4),
    "ctrl-c-in-validation": ("send: SIGINT, at: 4, where: validation, group: true", [], 130, 4),
    "killed-in-an-update": ("send: SIGKILL, at: 5, where: next, group: true", ["--data.num_workers", "2"], -9, 4),
    "killed-in-validation": ("send: SIGKILL, at: 4, where: validation", [], -9, 4),
    "killed-while-writing": ("send: SIGKILL, at: 4, where: writing", [], -9, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_killed_and_resumed_equals_never_stopped(bench: Path, straight: Path, case: str) -> None:
    kill, flags, status, saved = CASES[case]
    place = bench / case
    left, shown = fit(bench, place, *flags, kill=kill)
    assert left == status, shown
    assert "Traceback" not in shown
    assert checkpoint(place)["global_step"] == saved
    if status > 0:
        assert f"after update {saved}: " in shown and "--ckpt_path last" in shown
        assert "Drafter against plain decoding" not in shown  # left at once
    status, shown = fit(bench, place, "--ckpt_path", "last")
    assert status == 0, shown
    equal(place, straight)


def equal(place: Path, straight: Path) -> None:
    """The two runs did the same, and have the same to show for it."""
    assert diary(place) == diary(straight)
    assert losses(place) == losses(straight)
    one, other = checkpoint(place), checkpoint(straight)
    assert one.keys() == other.keys()
    for state in (
        one,
        other,
    ):  # two of Lightning's counters that nothing of ours reads, and that it resumes differently
        state["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"].pop("total")  # for progress bars
        for counts in state["loops"]["fit_loop"]["epoch_progress"].values():
            counts["ready"] = counts["started"] = 0  # at the end of an epoch
    for key in one.keys() - UNEQUAL:
        same(one[key], other[key], key)
    same(one["adaflash"]["rollout"], other["adaflash"]["rollout"], "rollout")


def test_at_a_rollouts_boundary_only(bench: Path, straight: Path) -> None:
    """`boundary`: told to stop at update 5, the run goes on to the end of the rollout, and no tensor of it is saved."""
    place, flags = bench / "boundary", ["--model.reuse.checkpoint", "boundary"]
    left, shown = fit(bench, place, *flags, kill="send: SIGTERM, at: 1")
    assert left == 143 and "after update 4: " in shown, shown
    assert checkpoint(place)["adaflash"]["rollout"]["trajectories"] == []
    assert sorted(path.name for path in (place / "run" / "checkpoints").glob("*.ckpt")) == ["last.ckpt", "step4.ckpt"]
    status, shown = fit(bench, place, *flags, "--ckpt_path", "last")
    assert status == 0, shown
    assert diary(place) == diary(straight)
    same(checkpoint(place)["state_dict"], checkpoint(straight)["state_dict"])


def test_a_resume_with_other_rollouts_is_told_and_repeats_nothing(bench: Path, straight: Path) -> None:
    place = bench / "changed"
    shutil.copytree(straight, place)
    (place / "diary.jsonl").unlink()
    more = ["--data.rollout_size", "2", "--trainer.max_steps", "9"]
    status, shown = fit(bench, place, *more, "--ckpt_path", "last")
    assert status == 0, shown
    assert "rollout_size 4 x 4 visits" in shown and "No prompt is repeated" in shown
    used = {name for line in diary(straight) if line[0] != "validated" for name in line[3]}
    now = {name for line in diary(place) if line[0] != "validated" for name in line[3]}
    assert len(used) == 8 and now and not used & now  # of the 11 of the first epoch


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model.drafter.block_size", "8"], "the checkpoint's block_size is 4, this run's is 8"),
        (["--model.drafter.num_layers", "2"], "does not fit this config"),
    ],
)
def test_another_architecture_is_refused(bench: Path, straight: Path, flags: list[str], says: str) -> None:
    status, shown = fit(bench, straight, *flags, "--ckpt_path", "last")
    assert status == 2 and says in shown and "Traceback" not in shown, shown
