"""What Leviathan et al. (arXiv 2211.17192) plot of their theory: Table 1 and Figures 2 to 4.

A table is {"columns", "units", "rows", "notes"} of plain values; of curves the first column is the
horizontal axis, and what is infinite is None.
"""

import math
from collections.abc import Sequence
from typing import Any

from jspec.evaluation.analysis.improvement import (
    expected_tokens,
    operations_growth,
    optimal_num_draft_tokens,
    walltime_improvement,
)

_TABLE1 = ((0.6, 2), (0.7, 3), (0.8, 2), (0.8, 5), (0.9, 2), (0.9, 10))
_ALPHAS = tuple(index / 50 for index in range(51))
_NUMBERS = (1, 3, 5, 7, 10)
_NUMBER_NAMES = ("1 draft", "3 drafts", "5 drafts", "7 drafts", "10 drafts")
_COST_RATIOS = (0.01, 0.05, 0.1, 0.2, 0.4)
_RELATIVE = "times plain decoding's"

Table = dict[str, list[Any]]


def table1() -> Table:
    """Returns Table 1: arithmetic operations and speed for free drafts (c = ĉ = 0)."""
    rows = [
        [
            alpha,
            number,
            round(operations_growth(alpha, number), 2),
            round(walltime_improvement(alpha, number, 0.0), 2),
        ]
        for alpha, number in _TABLE1
    ]
    note = (
        "Table 1 of arXiv 2211.17192 (Thms 3.11 and 3.8 with c = ĉ = 0). These are its digits: "
        "it rounds to the nearest second decimal everywhere and truncates nowhere (operations "
        "of 1.5792, 1.2295, 1.6263, 1.1070 are printed 1.58, 1.23, 1.63, 1.11, and a speed of "
        "3.6893 is printed 3.69)."
    )
    return {
        "columns": ["alpha", "drafts a round", "operations", "speed"],
        "units": ["", "tokens", _RELATIVE, _RELATIVE],
        "rows": rows,
        "notes": [note],
    }


def figure2() -> Table:
    """Returns the curves of Figure 2: tokens a call against alpha, by number of drafts."""
    numbers = (*_NUMBERS, math.inf)
    rows = [[alpha, *(expected_tokens(alpha, number) for number in numbers)] for alpha in _ALPHAS]
    note = "Figure 2 of arXiv 2211.17192: Eq. 1."
    return _curves([*_NUMBER_NAMES, "no limit"], "tokens a call", rows, note)


def figure3() -> Table:
    """Returns the curves of Figure 3: the best number of drafts against alpha, by cost ratio."""
    rows = [
        [alpha, *(optimal_num_draft_tokens(alpha, ratio) for ratio in _COST_RATIOS)]
        for alpha in _ALPHAS[:-1]  # at 1, more is always better
    ]
    names = [f"c = {ratio:g}" for ratio in _COST_RATIOS]
    note = "Figure 3 of arXiv 2211.17192: what maximises Thm 3.8; 0 where no number pays."
    return _curves(names, "tokens", rows, note)


def figure4() -> Table:
    """Returns the curves of Figure 4: speed and operations against alpha, by number of drafts."""
    rows = [
        [
            alpha,
            *(walltime_improvement(alpha, number, 0.0) for number in _NUMBERS),
            *(operations_growth(alpha, number) for number in _NUMBERS),
        ]
        for alpha in _ALPHAS
    ]
    names = [f"{kind}, {name}" for kind in ("speed", "operations") for name in _NUMBER_NAMES]
    note = "Figure 4 of arXiv 2211.17192: Thms 3.8 and 3.11 with c = ĉ = 0."
    return _curves(names, _RELATIVE, rows, note)


def _curves(names: Sequence[str], unit: str, rows: Sequence[Sequence[float]], note: str) -> Table:
    """Returns a table whose first column is alpha; the others have one unit."""
    finite = [[value if math.isfinite(value) else None for value in row] for row in rows]
    units = ["", *[unit] * len(names)]
    return {"columns": ["alpha", *names], "units": units, "rows": finite, "notes": [note]}
