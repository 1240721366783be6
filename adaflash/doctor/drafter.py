"""Checks of a drafter with its target: layers, block, rotary base, number format, origin, head, probe, acceptance."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from adaflash.doctor.patient import Patient
from adaflash.doctor.report import Check, ok
from adaflash.drafters.dflash import drafter_config
from adaflash.export.weights import read_tensors

NEW_TOKENS, FEW = 48, 1.1  # tokens decoded a prompt; a tau below this says that drafting does not work at all
CHECKLIST = "context layers, mask token, template and thinking switch, rotary base, target revision"


def check_layers(patient: Patient) -> Iterator[Check]:
    """Context layers as trained. Loading has refused missing, repeated, unsorted and last layers."""
    assert patient.drafter is not None
    ids = list(patient.drafter.context_layers)
    then = (patient.manifest.get("context_layers") or {}).get("ids", ids)
    if then != ids:
        remedy = "config.json was changed after the export; put the trained ids back (id l is the output of layer l)"
        yield Check("context layers", "fail", f"{ids} in config.json, {then} in adaflash.json", remedy)
    elif patient.folder is not None and not patient.probes:
        remedy = "compare with where it was trained; off by one costs acceptance without an error"
        yield Check("context layers", "note", f"{ids} by its config; there is no probe to prove them", remedy)
    else:
        yield ok("context layers", f"{ids} of {patient.target.num_layers}")


def check_block(patient: Patient) -> Iterator[Check]:
    """Block size, and what servers must be told. Loading has refused contradicting counts in config.json."""
    assert patient.drafter is not None
    size = patient.drafter.block_size
    then = (patient.manifest.get("block") or {}).get("size", size)
    told = f"{size} = anchor + {size - 1} candidates: SGLang is told {size}, vLLM {size - 1}"
    if then != size:
        yield Check(
            "block", "fail", f"{told}; adaflash.json says {then}", "put the trained block_size back into config.json"
        )
    else:
        yield ok("block", told)


def check_rope(patient: Patient) -> Iterator[Check]:
    """The drafter's rotary settings should be the target's: its keys come from the target's positions."""
    assert patient.drafter is not None
    ours = _plain(patient.drafter.config.rope_parameters)
    theirs = _plain(drafter_config(patient.target, 1, 0).rope_parameters)
    if ours.get("rope_theta") != theirs.get("rope_theta"):
        found = f"base {ours.get('rope_theta')}, the target's is {theirs.get('rope_theta')}"
        yield Check(
            "rope", "warn", found, "if it was not trained so, correct rope_theta and rope_parameters in config.json"
        )
    elif ours != theirs:
        yield Check("rope", "note", f"{ours}, the target has {theirs}", "right only if the drafter was trained so")
    else:
        yield ok("rope", f"base {ours.get('rope_theta')}, {ours.get('rope_type', 'default')}, as the target")


def _plain(parameters: Any) -> dict[str, Any]:
    """Rotary settings that move an angle."""
    settings = dict(parameters or {})
    settings = dict(settings.get("full_attention", settings))
    return {name: value for name, value in settings.items() if not name.startswith("mrope") and value is not None}


def check_dtype(patient: Patient) -> Iterator[Check]:
    """The config's dtype and the tensors' must agree: servers allocate by the one and load the other."""
    if patient.folder is None or patient.spec is None:
        return
    stored = sorted({str(value.dtype).removeprefix("torch.") for value in read_tensors(patient.folder).values()})
    said = patient.spec.dtype or "nothing"
    if stored != [said]:
        remedy = "write the drafter again: adaflash import --drafter ... --dtype bfloat16"
        yield Check("dtype", "warn", f"config.json says {said}, the tensors are {' and '.join(stored)}", remedy)
    else:
        yield ok("dtype", said)


def check_origin(patient: Patient) -> Iterator[Check]:
    """Was it trained for this target and revision?"""
    told = patient.manifest.get("target") or {}
    if not told:
        if patient.folder is not None:
            yield Check("origin", "note", "no adaflash.json: not written by adaflash", "keep one by `adaflash import`")
        return
    from adaflash.export.manifest import revision

    now = revision(patient.target)
    if told.get("revision") and now and told["revision"] != now:
        remedy = "serve the revision it was trained for, or train on with this one"
        yield Check("origin", "warn", f"trained for revision {told['revision'][:12]}, this is {now[:12]}", remedy)
    elif told.get("stop_ids") is not None and told["stop_ids"] != list(patient.target.stop_ids):
        found = f"stop ids were {told['stop_ids']} in training, now {list(patient.target.stop_ids)}"
        yield Check("origin", "warn", found, "make generation_config.json the same")
    else:
        training = patient.manifest.get("training") or {}
        tau = f", best tau {training['best_val_tau']:.2f}" if training.get("best_val_tau") else ""
        yield ok("origin", f"trained for {told.get('name')}, {training.get('steps') or '?'} steps{tau}")


def check_head(patient: Patient) -> Iterator[Check]:
    """A length head, if the checkpoint claims one."""
    claimed = bool(patient.spec and patient.spec.nested.get("use_thresh_head_two_model"))
    if claimed and patient.length is None:
        remedy = "a server asked for adaptive lengths would draft full blocks; export again from the run"
        yield Check("length head", "fail", "config.json claims thresh_head_two_model, the weights have none", remedy)
    elif patient.length is None or not patient.length.state_dict():
        yield Check(
            "length head", "note", "none: every server drafts full blocks", "train one: model.length AdaptiveLength"
        )
    elif patient.folder is not None and patient.spec and not claimed and "SGLang" in patient.spec.source:
        remedy = "set dflash_config.use_thresh_head_two_model true, or a server leaves it off in silence"
        yield Check("length head", "warn", "the weights have one, config.json does not say so", remedy)
    else:
        yield ok("length head", patient.length.describe())


def check_shipped_tokenizer(patient: Patient) -> Iterator[Check]:
    """A tokenizer beside the drafter must be the target's."""
    tokenizer = patient.target.tokenizer
    file = patient.folder / "tokenizer.json" if patient.folder is not None else None
    if file is None or not file.is_file() or tokenizer is None:
        return
    model = json.loads(file.read_text(encoding="utf-8")).get("model") or {}
    words = model.get("vocab") or {}
    if isinstance(words, list):  # Unigram: pairs of token and score, in the order of their ids
        words = {word: number for number, (word, _) in enumerate(words)}
    known = tokenizer.get_vocab()
    differs = [word for word, number in words.items() if known.get(word) != number]
    if differs:
        found = f"the drafter's tokenizer.json differs from the target's in {len(differs)} tokens"
        yield Check("tokenizer file", "fail", found, "the drafter belongs to another model; token ids must be the same")
    else:
        yield ok("tokenizer file", "the drafter's is the target's")


def check_acceptance(patient: Patient) -> Iterator[Check]:
    """Decode a little: a drafter that works at all commits more than one token a round."""
    from adaflash.decoding.engine import Engine
    from adaflash.export.probe import probe_prompts
    from adaflash.types import Request

    engine = Engine(patient.target, patient.drafter, lanes=2)
    results = engine.generate(
        [Request(prompt, NEW_TOKENS) for prompt in _questions(patient) or probe_prompts(patient.target)]
    )
    broken = [each.error for each in results if each.error]
    if broken:
        yield Check("acceptance", "fail", broken[0])
        return
    rounds = sum(len(each.blocks.committed) for each in results)
    tau = sum(int(each.blocks.committed.sum()) for each in results) / max(rounds, 1)
    found = f"tau {tau:.2f} over {rounds} rounds on two short prompts"
    trained = (patient.manifest.get("training") or {}).get("best_val_tau") or 0.0
    if rounds >= 20 and tau < FEW:
        yield Check("acceptance", "warn", found, f"train it, or look through: {CHECKLIST}")
    elif rounds >= 20 and tau < 0.5 * trained:
        yield Check("acceptance", "warn", f"{found}; {trained:.2f} in training", f"look through: {CHECKLIST}")
    else:
        yield ok("acceptance", found)


def _questions(patient: Patient) -> list[tuple[int, ...]]:
    """The probe's texts as chat prompts, if the target chats."""
    from adaflash.data.chat import ChatRenderer
    from adaflash.export.probe import PROMPTS

    tokenizer = patient.target.tokenizer
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        return []
    render = ChatRenderer(tokenizer, patient.template_kwargs).render
    return [tuple(render([{"role": "user", "content": text}])) for text in PROMPTS]
