"""The theory of Leviathan et al. (arXiv 2211.17192, section 3), and their plots of it.

`alpha`, from 0 to 1, is the probability that a draft is accepted once those before it are, taken to
be the same for every draft and independent of the others; `num_draft_tokens` is the paper's gamma.
Costs are in plain decoding steps: `cost_ratio`, the paper's c, is what one draft costs, and
`verify_cost` what the verify call costs. The theorems have verify_cost = 1, however many drafts
there are; a measured cost, which grows with their number, takes its place here.

A table is {"columns", "units", "rows", "notes"} of plain values; of curves the first column is the
horizontal axis, and what is infinite is None.
"""

import math
from collections.abc import Sequence
from typing import Any

_MOST = 1000
_TABLE1 = ((0.6, 2), (0.7, 3), (0.8, 2), (0.8, 5), (0.9, 2), (0.9, 10))
_ALPHAS = tuple(index / 50 for index in range(51))
_NUMBERS = (1, 3, 5, 7, 10)
_NUMBER_NAMES = ("1 draft", "3 drafts", "5 drafts", "7 drafts", "10 drafts")
_COST_RATIOS = (0.01, 0.05, 0.1, 0.2, 0.4)
_RELATIVE = "times plain decoding's"

Table = dict[str, list[Any]]


def expected_tokens(alpha: float, num_draft_tokens: float) -> float:
    """Returns the tokens that a verify call emits on average; gamma may be infinite.

        E = (1 - alpha^(gamma + 1)) / (1 - alpha) = 1 + alpha + ... + alpha^gamma

    (Eq. 1: the i-th draft is accepted with probability alpha^i, and one more token always comes.)
    """
    if alpha == 1:
        return num_draft_tokens + 1.0
    if 0 in (alpha, num_draft_tokens):
        return 1.0
    return -math.expm1((num_draft_tokens + 1) * math.log(alpha)) / (1 - alpha)  # exact near 1


def walltime_improvement(
    alpha: float, num_draft_tokens: int, cost_ratio: float, verify_cost: float = 1.0
) -> float:
    """Returns how many times faster than plain decoding it is: E / (gamma · c + v) (Thm 3.8)."""
    cost = num_draft_tokens * cost_ratio + verify_cost
    return expected_tokens(alpha, num_draft_tokens) / cost


def operations_growth(alpha: float, num_draft_tokens: int) -> float:
    """Returns how many times the operations of plain decoding a token takes: (gamma + 1) / E.

    (Thm 3.11 with free drafts, ĉ = 0: a round computes gamma + 1 tokens of the target.)
    """
    return (num_draft_tokens + 1) / expected_tokens(alpha, num_draft_tokens)


def optimal_num_draft_tokens(alpha: float, cost_ratio: float) -> int:
    """Returns the gamma that maximises `walltime_improvement` (§3.5); 0 is to draft nothing.

    The smallest of equally good ones, at most 1000: where drafts are free, or all accepted and
    cheaper than a step, more are better.
    """
    best, fastest, tokens, power = 0, 0.0, 1.0, 1.0
    for number in range(_MOST + 1):
        speed = tokens / (number * cost_ratio + 1)
        if speed > fastest:
            best, fastest = number, speed
        power *= alpha
        tokens += power
    return best


def break_even_alpha(
    num_draft_tokens: int, cost_ratio: float, verify_cost: float = 1.0
) -> float | None:
    """Returns the smallest alpha at which drafting does not slow down: E = gamma · c + v.

    None if it never pays, not even where every draft is accepted.
    """

    def pays(alpha: float) -> bool:
        return walltime_improvement(alpha, num_draft_tokens, cost_ratio, verify_cost) >= 1

    low, high = 0.0, 1.0
    if pays(low) or not pays(high):
        return low if pays(low) else None
    for _ in range(60):  # E rises with alpha
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def table1() -> Table:
    """Returns Table 1: arithmetic operations and speed for free drafts (c = ĉ = 0)."""
    rows = []
    for alpha, number in _TABLE1:
        gains = operations_growth(alpha, number), walltime_improvement(alpha, number, 0.0)
        rows.append([alpha, number, *(round(value, 2) for value in gains)])
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
    """Returns the curves of Figure 2: tokens per call against alpha, by number of drafts."""
    numbers = (*_NUMBERS, math.inf)
    rows = [[alpha, *(expected_tokens(alpha, number) for number in numbers)] for alpha in _ALPHAS]
    note = "Figure 2 of arXiv 2211.17192: Eq. 1."
    return _curves([*_NUMBER_NAMES, "no limit"], "tokens per call", rows, note)


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
    formulas = (expected_tokens, operations_growth)  # with free drafts the speed is Eq. 1
    rows = [[alpha, *(of(alpha, n) for of in formulas for n in _NUMBERS)] for alpha in _ALPHAS]
    names = [f"{kind}, {name}" for kind in ("speed", "operations") for name in _NUMBER_NAMES]
    note = "Figure 4 of arXiv 2211.17192: Thms 3.8 and 3.11 with c = ĉ = 0."
    return _curves(names, _RELATIVE, rows, note)


def _curves(names: Sequence[str], unit: str, rows: Sequence[Sequence[float]], note: str) -> Table:
    """Returns a table whose first column is alpha; the others have one unit."""
    finite = [[value if math.isfinite(value) else None for value in row] for row in rows]
    units = ["", *[unit] * len(names)]
    return {"columns": ["alpha", *names], "units": units, "rows": finite, "notes": [note]}
