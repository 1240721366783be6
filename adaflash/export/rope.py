"""Rotary settings: plain text ones only, written in both spellings, read from either."""

from __future__ import annotations

from typing import Any

from adaflash.errors import UserError

# Whatever else a target's config holds (mrope sections of multimodal models) is no business of a text drafter.
_PLAIN = (
    "rope_type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "short_factor", "long_factor", "truncate",
)  # fmt: skip


def both_spellings(parameters: dict[str, Any]) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` for readers of the old spelling, `rope_parameters` for those of the new one.

    transformers 5 drops the first two on save, and older readers then rotate by a class default in silence.
    """
    plain = {name: parameters[name] for name in _PLAIN if parameters.get(name) is not None}
    kind = plain.setdefault("rope_type", "default")
    scaling = None if kind == "default" else {name: value for name, value in plain.items() if name != "rope_theta"}
    return {"rope_theta": plain["rope_theta"], "rope_scaling": scaling, "rope_parameters": plain}


def read_rope(config: dict[str, Any], place: str) -> dict[str, Any]:
    """The rotary settings of a config in either spelling.

    Raises:
        UserError: none is written (a class default would be used), the spellings disagree, or only a part of a head
            is rotated.
    """
    new = config.get("rope_parameters")
    new = dict(new.get("full_attention", new)) if new else None
    old = _old_spelling(config)
    if new is None and old is None:
        raise UserError(
            f"{place}: no rope_theta and no rope_parameters; a reader would guess the rotary base. Write it"
        )
    if new is not None and old is not None:
        _compare(new, old, place)
    found = {
        name: value for name, value in {**(old or {}), **(new or {})}.items() if name in _PLAIN and value is not None
    }
    partial = (new or {}).get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise UserError(f"{place}: partial_rotary_factor is {partial}; adaflash's drafter rotates whole heads (1.0)")
    if "rope_theta" not in found:
        raise UserError(f"{place}: rope_parameters has no rope_theta; a reader would guess the rotary base. Write it")
    return {"rope_type": "default", **found}


def _old_spelling(config: dict[str, Any]) -> dict[str, Any] | None:
    theta, scaling = config.get("rope_theta"), config.get("rope_scaling")
    if theta is None:
        return None
    kind = {"rope_type": scaling.get("rope_type", scaling.get("type", "default"))} if scaling else {}
    return {"rope_type": "default", "rope_theta": theta, **(scaling or {}), **kind}


def _compare(new: dict[str, Any], old: dict[str, Any], place: str) -> None:
    kinds = new.get("rope_type", "default"), old["rope_type"]
    for name, one, other in (
        ("rope_theta", new.get("rope_theta", old["rope_theta"]), old["rope_theta"]),
        ("rope_type", *kinds),
        ("factor", new.get("factor"), old.get("factor")),
    ):
        if one != other:
            raise UserError(
                f"{place}: the two spellings of the rotary settings disagree: rope_parameters gives {name} {one}, "
                f"rope_theta / rope_scaling give {other}. Servers read one or the other; make them equal"
            )
