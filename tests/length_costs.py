"""Made-up cost tables, in the fashion of real ones."""

from __future__ import annotations

from collections.abc import Callable

from adaflash.length.cost_table import CostTable


def table(
    block_size: int, verify: Callable[[int], float], draft: Callable[[int], float] = lambda load: 0.3, mark: str = ""
) -> CostTable:
    """Seconds verify(n) of a pass over n tokens, draft(R) of a draft, whatever the context."""
    loads, widths = (1, 2, 3, 4, 8), tuple(range(1, block_size + 1))
    grid = [[float(verify(load * width)) for width in widths] for load in loads]
    drafts = [float(draft(load)) for load in loads]
    return CostTable((16, 256), loads, widths, [grid, grid], [drafts, drafts], {"machine": mark or "made up"})
