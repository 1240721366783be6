"""Checks of a target alone: sizes, tokenizer, stop ids, template, embedding, mask token."""

from __future__ import annotations

from collections.abc import Iterator

from adaflash.doctor.patient import Patient
from adaflash.doctor.report import Check, ok
from adaflash.export.formats import scales_embedding
from adaflash.export.pairing import target_name
from adaflash.targets.mask import choose_mask_id

SWITCHES = ("enable_thinking", "thinking", "reasoning_effort")
NAME = "model.target_options"


def check_target(patient: Patient) -> Iterator[Check]:
    """Family and sizes."""
    target = patient.target
    yield ok(
        "target",
        f"{target_name(target)}: {target.config.model_type}, {target.num_layers} layers, hidden {target.hidden_size}, "
        f"{target.embedding_rows} embedding rows, context {target.max_positions}, "
        f"{str(target.dtype).removeprefix('torch.')}",
    )


def check_tokenizer(patient: Patient) -> Iterator[Check]:
    """The tokenizer's ids must all have rows; a drafter's probe must be tokenised as when it was written."""
    from adaflash.export.probe import probe_prompts

    tokenizer, rows = patient.target.tokenizer, patient.target.embedding_rows
    if tokenizer is None:
        yield Check(
            "tokenizer", "fail", "the target has none", "put tokenizer.json and tokenizer_config.json beside it"
        )
        return
    if len(tokenizer) > rows:
        remedy = "use the tokenizer the target was trained with; its embedding cannot read these ids"
        yield Check("tokenizer", "fail", f"{len(tokenizer)} tokens for {rows} embedding rows", remedy)
        return
    stored = [tuple(probe.tokens[:-1].tolist()) for probe in patient.probes]
    if stored and stored != probe_prompts(patient.target):
        remedy = "use the tokenizer of the target that the drafter was trained for"
        yield Check("tokenizer", "fail", "it splits the drafter's probe otherwise than when it was exported", remedy)
        return
    yield ok("tokenizer", f"{len(tokenizer)} tokens, {rows - len(tokenizer)} spare rows")


def check_stops(patient: Patient) -> Iterator[Check]:
    """All end markers must be known, or responses run on behind them."""
    target = patient.target
    tokenizer, ids = target.tokenizer, set(target.stop_ids)
    if not ids:
        yield Check(
            "stop ids", "fail", "generation_config.json lists none", f"add {NAME}.stop_ids or mend the target's file"
        )
        return
    if tokenizer is not None and tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ids:
        found = f"{sorted(ids)}, but the tokenizer ends a text with {tokenizer.eos_token_id} ({tokenizer.eos_token})"
        yield Check("stop ids", "warn", found, f"add it with {NAME}.stop_ids [{tokenizer.eos_token_id}]")
        return
    yield ok("stop ids", str(sorted(ids)))


def check_template(patient: Patient) -> Iterator[Check]:
    """Chat template, its thinking switch, and whether both are as in training."""
    from adaflash.export.manifest import template_of

    now = template_of(patient.target, patient.template_kwargs)
    if now is None:
        yield Check(
            "template", "warn", "the tokenizer has no chat template", "use rows with `prompt`, or a chat target"
        )
        return
    then = patient.manifest.get("template") or {}
    if then.get("sha256") and then["sha256"] != now["sha256"]:
        remedy = "serve with the template the drafter was trained on, or train on with this one"
        yield Check("template", "warn", "not the chat template the drafter was trained with", remedy)
    elif then.get("rendered_sha256") and then["rendered_sha256"] != now["rendered_sha256"]:
        found = f"switches {now['kwargs']} render otherwise than {then.get('kwargs')} in training (thinking?)"
        yield Check("template", "warn", found, f"set data.template_kwargs {then.get('kwargs')}, also where you serve")
    elif "kwargs" in then and patient.data is not None and then["kwargs"] != now["kwargs"]:
        found = f"switches are {now['kwargs']}, in training they were {then['kwargs']}"
        yield Check("template", "warn", found, f"set data.template_kwargs {then['kwargs']}, also where you serve")
    else:
        yield ok("template", f"sha256 {now['sha256'][:12]}, switches {now['kwargs'] or 'none set'}")
    yield from _switch(patient)


def _switch(patient: Patient) -> Iterator[Check]:
    text = str(patient.target.tokenizer.chat_template)
    found = [name for name in SWITCHES if name in text]
    unset = [name for name in found if name not in patient.template_kwargs]
    if unset:
        said = f"the template knows {', '.join(unset)}, which is not set: its default decides"
        yield Check(
            "thinking switch", "note", said, "set it in data.template_kwargs as you serve, e.g. enable_thinking: false"
        )
    elif found:
        yield ok("thinking switch", ", ".join(f"{name}: {patient.template_kwargs[name]}" for name in found))


def check_embedding(patient: Patient) -> Iterator[Check]:
    """Tied, scaled, capped: what a server must do alike when it lends the drafter embedding and head."""
    target = patient.target
    tied = target.model.get_input_embeddings().weight is target.model.get_output_embeddings().weight
    cap = getattr(target.config, "final_logit_softcapping", None)
    found = ("tied to the head" if tied else "apart from the head") + (f", logits capped at {cap}" if cap else "")
    if scales_embedding(target):
        remedy = "export --to vllm writes a scaled copy; other servers must scale what they lend the drafter"
        yield Check("embedding", "note", f"{found}; the family scales its rows", remedy)
    else:
        yield ok("embedding", found)


def check_mask(patient: Patient) -> Iterator[Check]:
    """The mask token of the drafter, or the one that training would choose."""
    target, drafter = patient.target, patient.drafter
    given = drafter.mask_id if drafter is not None else -1
    try:
        chosen, source = choose_mask_id(
            target.embedding_rows, target.tokenizer, target.stop_ids, given, patient.mask_token
        )
    except ValueError as error:
        remedy = "the drafter was trained with it; train a new one with another token" if drafter is not None else ""
        yield Check("mask token", "warn" if drafter is not None else "fail", str(error), remedy)
        return
    then = (patient.manifest.get("mask_token") or {}).get("id", chosen)
    if then != chosen:
        remedy = "config.json was changed after the export; put the trained id back"
        yield Check("mask token", "fail", f"{chosen} in config.json, {then} in adaflash.json", remedy)
        return
    yield ok("mask token", f"{chosen} ({source if drafter is None else drafter.mask_source})")
