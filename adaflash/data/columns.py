"""Foreign column names -> ours, and a user turn made from a text template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adaflash.data.report import RowError


def remap(record: Any, columns: Mapping[str, str], template: str) -> Any:
    """Record with columns renamed (our name -> theirs) and `prompt` made from the template. Raises RowError."""
    if not (columns or template) or not isinstance(record, dict):
        return record
    renamed = dict(record)
    for ours, theirs in columns.items():
        if theirs not in record:
            raise RowError("missing column", f"{theirs!r}, found {', '.join(map(str, list(record)[:8]))}")
        renamed[ours] = record[theirs]
    if template:
        try:
            renamed["prompt"] = template.format(**record)
        except (KeyError, IndexError) as error:
            raise RowError("missing column", f"template names {error}") from error
    return renamed
