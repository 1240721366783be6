"""The prompts of a benchmark: what is reported, and apart from it what rates are tuned on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from adaflash.data.prompts import PromptDataModule
from adaflash.errors import UserError
from adaflash.records import read_requests
from adaflash.types import Prompt, Request

VALIDATION = "validation"
TUNE = 5  # one prompt in so many is for tuning


@dataclass(frozen=True)
class PromptSet:
    """Prompts with domains in turn; no prompt is in both halves, and none is there twice."""

    name: str
    report: tuple[Prompt, ...]
    tune: tuple[Prompt, ...]

    @property
    def digest(self) -> str:
        """Changes with any token of any prompt."""
        text = repr([[each.tokens for each in half] for half in (self.report, self.tune)])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def split(name: str, prompts: Iterable[Prompt]) -> PromptSet:
    """The last fifth of each domain, at least one prompt, is for tuning.

    Raises:
        UserError: fewer than two different prompts.
    """
    unique = {prompt.tokens: prompt for prompt in prompts}
    domains: dict[str, list[Prompt]] = {}
    for prompt in unique.values():
        domains.setdefault(prompt.domain, []).append(prompt)
    tune, report = [], []
    for some in domains.values():
        kept = len(some) - (max(1, len(some) // TUNE) if len(some) > 1 else 0)
        report.append(some[:kept])
        tune.append(some[kept:])
    if not any(tune):
        raise UserError(
            f"prompts {name}: {len(unique)} different prompts, {len(domains)} domains; at least 2 of one domain are needed: "
            "the best fixed length is found on prompts that are not reported"
        )
    return PromptSet(name, _in_turn(report), _in_turn(tune))


def from_files(paths: Sequence[str], renderer: Any) -> list[PromptSet]:
    """One set a file, named by the file; raises UserError by file and line."""
    names = [Path(path).stem for path in paths]
    sets = []
    for path, name in zip(paths, names, strict=True):
        requests = read_requests(Path(path), renderer, Request((), 1))
        prompts = [Prompt(each.id, each.domain, each.prompt) for each in requests]
        sets.append(split(name if names.count(name) == 1 else path, prompts))
    return sets


def of_run(config: dict[str, Any], target: str) -> PromptSet:
    """The validation prompts of a run, from its recorded config."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(PromptDataModule, "data")
    settings = {**config.get("data", {}), "target": target, "val_prompts": None}
    try:
        data = parser.instantiate(parser.parse_object({"data": settings})).data
    except UserError:
        raise
    except Exception as error:  # whatever a missing plugin file or a renamed key raises
        raise UserError(f"the run's data config cannot be built here ({error}); give --prompts FILE") from error
    data.setup("validate")
    return split(VALIDATION, [prompt for batch in data.val_dataloader() for prompt in batch])


def _in_turn(groups: Sequence[Sequence[Prompt]]) -> tuple[Prompt, ...]:
    return tuple(each for turn in zip_longest(*groups) for each in turn if each is not None)
