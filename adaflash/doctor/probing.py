"""Running a drafter's probe: first the target's context features, then the drafter's candidates from the stored ones."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from adaflash.doctor.patient import Patient
from adaflash.doctor.report import Check, ok
from adaflash.export.probe import Probe, candidates_after, read_prompt

# Relative error of a layer's features that rounding explains, and the part of the largest margin that a margin may move by.
# Neighbouring layers of SmolLM2 differ by 0.23 at least, bfloat16 from float32 by 0.015 at most.
EXACT, ROUGH = (2e-3, 1e-2), (6e-2, 0.2)


def check_probe(patient: Patient) -> Iterator[Check]:
    """Two lines: is this the context the drafter was exported with, and does it draft what it drafted then."""
    if not patient.probes or patient.drafter is None:
        if patient.folder is not None:
            yield Check("probe", "note", "there is none beside the drafter", "`adaflash import` writes one")
        return
    if patient.probes[0].context.shape[1] != len(patient.drafter.context_layers) * patient.target.hidden_size:
        yield Check(
            "probe: context", "fail", "written for another number of context layers", "export the drafter again"
        )
        return
    yield _features(patient)
    yield _candidates(patient)


def _features(patient: Patient) -> Check:
    assert patient.drafter is not None
    worst, problem = 0.0, ""
    for probe in patient.probes:
        _, context = read_prompt(patient.drafter.context_layers, patient.target, tuple(probe.tokens[:-1].tolist()))
        errors = _errors(context.float().cpu(), probe.context, patient.target.hidden_size)
        worst, wrong = max(worst, float(errors.max())), errors > _tolerance(patient, probe)[0]
        if not problem and bool(wrong.any()):
            problem = _explain(patient, probe, int(wrong.nonzero()[0]))
    if problem:
        remedy = "correct the layer ids in config.json, or use the target (and revision) the drafter was exported for"
        return Check("probe: context", "fail", f"features differ by {worst:.0%}: {problem}", remedy)
    return ok("probe: context", f"the target's features are those of the export (worst layer {worst:.1e} off)")


def _candidates(patient: Patient) -> Check:
    assert patient.drafter is not None
    changed, moved, total = 0, False, 0
    for probe in patient.probes:
        found, margins = candidates_after(
            patient.drafter, patient.target, int(probe.tokens[-1]), probe.context.to(patient.target.device)
        )
        if len(found) != len(probe.candidates):
            text = f"{len(found)} candidates, {len(probe.candidates)} when it was exported"
            return Check("probe: drafts", "fail", text, "put the trained block_size back into config.json")
        slack = _tolerance(patient, probe)[1] * float(probe.margins.max().clamp(min=1e-6))
        same = found == probe.candidates
        changed += int((~same & (probe.margins > slack)).sum())
        moved |= bool(((margins - probe.margins).abs()[same] > slack).any())
        total += len(found)
    if changed or moved:
        remedy = "look at mask token, rotary base, norms and embedding scale; the context is not to blame"
        how = f"{changed} of {total} candidates differ" if changed else "the candidates' margins differ"
        return Check("probe: drafts", "fail", f"{how} from the export's", remedy)
    return ok("probe: drafts", f"{total} candidates as exported")


def _tolerance(patient: Patient, probe: Probe) -> tuple[float, float]:
    """For features and margins: exact only if the target was and is in full precision."""
    full = ("float32", "float64")
    return EXACT if probe.dtype in full and str(patient.target.dtype).removeprefix("torch.") in full else ROUGH


def _errors(found: Tensor, stored: Tensor, hidden: int) -> Tensor:
    """Relative error of every context layer, [n]: the median over positions.

    Not the norm of the whole: the first token of many models carries states a thousand times as large as all others,
    which hardly move between layers and would hide a wrong layer.
    """
    off, size = (found - stored).unflatten(1, (-1, hidden)), stored.unflatten(1, (-1, hidden))
    return (off.norm(dim=-1) / size.norm(dim=-1).clamp(min=1e-12)).median(dim=0).values


def _explain(patient: Patient, probe: Probe, slot: int) -> str:
    """Which layer's output the stored features really are: the one that agrees, if any does."""
    assert patient.drafter is not None
    hidden, layers = patient.target.hidden_size, tuple(range(patient.target.num_layers - 1))
    _, context = read_prompt(layers, patient.target, tuple(probe.tokens[:-1].tolist()))
    stored = probe.context[:, slot * hidden : (slot + 1) * hidden].repeat(1, len(layers))
    errors = _errors(context.float().cpu(), stored, hidden)
    here = patient.drafter.context_layers[slot]
    if float(errors.min()) < _tolerance(patient, probe)[0]:
        return f"the drafter reads layer {int(errors.argmin())} where its config says {here}"
    return f"no layer of this target gives what layer {here} gave: another target, revision or number format"
