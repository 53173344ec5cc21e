"""What a round of drafts brings on average (Leviathan et al., arXiv 2211.17192, section 3).

`alpha` is the probability that a draft is kept once those before it are, taken to be the same for
every draft and independent of the others; `num_draft_tokens` is the paper's gamma. Times are in
plain decoding steps, so that `cost_ratio`, the paper's c, is what one draft costs. K. Stratos's
notes on speculative sampling derive the results step by step; the reasons in brackets suffice to
check them.
"""

import math
from collections.abc import Callable

from jspec.common.errors import InputError, check_range, whole_number

_INFINITY = float("inf")
_MOST = 1000


def expected_tokens(alpha: float, num_draft_tokens: float) -> float:
    """Returns the tokens that a verify call emits on average.

        E = (1 - alpha^(gamma + 1)) / (1 - alpha) = 1 + alpha + ... + alpha^gamma

    (Eq. 1: the i-th draft is kept with probability alpha^i, and one more token always comes.)

    Args:
      alpha: from 0 to 1; at 1 all gamma + 1 come.
      num_draft_tokens: gamma, a whole number, or infinity.

    Raises:
      InputError: a value out of range.
    """
    _check_alpha(alpha)
    if num_draft_tokens != _INFINITY:
        num_draft_tokens = _check_number(num_draft_tokens)
    if alpha == 1:
        return num_draft_tokens + 1.0
    if 0 in (alpha, num_draft_tokens):
        return 1.0
    return -math.expm1((num_draft_tokens + 1) * math.log(alpha)) / (1 - alpha)  # exact near 1


def walltime_improvement(
    alpha: float, num_draft_tokens: int, cost_ratio: float, verify_cost: float = 1.0
) -> float:
    """Returns how many times faster than plain decoding it is.

        E / (gamma · c + v)

    (Thm 3.8 has v = 1: verifying costs as much as a plain step, however many drafts there are. A
    measured v, which grows with their number, takes its place here.)

    Args:
      alpha: from 0 to 1.
      num_draft_tokens: gamma.
      cost_ratio: c, what a draft costs, in plain steps.
      verify_cost: v, what the verify call of that many drafts costs, in plain steps.

    Raises:
      InputError: a value out of range.
    """
    _check_cost("cost_ratio", cost_ratio)
    if not 0 < verify_cost < _INFINITY:
        raise InputError(f"expected a verify_cost above 0, got {verify_cost}")
    number = _check_number(num_draft_tokens)
    return expected_tokens(alpha, number) / (number * cost_ratio + verify_cost)


def least_improvement(alpha: float, cost_ratio: float) -> float:
    """Returns what the best number of drafts brings at least, if verifying costs a plain step.

        (1 + alpha) / (1 + c)  where alpha > c

    (Cor. 3.9: one draft a round brings as much.) Elsewhere 1: no number pays, since
    1 + alpha + ... + alpha^gamma <= 1 + gamma · c, and none are drafted.

    Args:
      alpha: from 0 to 1.
      cost_ratio: c.

    Raises:
      InputError: a value out of range.
    """
    _check_alpha(alpha)
    _check_cost("cost_ratio", cost_ratio)
    return (1 + alpha) / (1 + cost_ratio) if alpha > cost_ratio else 1.0


def operations_growth(alpha: float, num_draft_tokens: int, operations_ratio: float = 0.0) -> float:
    """Returns how many times as many arithmetic operations a token takes as in plain decoding.

        (gamma · ĉ + gamma + 1) / E

    (Thm 3.11: a round computes gamma + 1 tokens of the target and gamma of the draft.)

    Args:
      alpha: from 0 to 1.
      num_draft_tokens: gamma.
      operations_ratio: ĉ, the draft's operations for a token over the target's.

    Raises:
      InputError: a value out of range.
    """
    _check_cost("operations_ratio", operations_ratio)
    number = _check_number(num_draft_tokens)
    return (number * operations_ratio + number + 1) / expected_tokens(alpha, number)


def memory_traffic(alpha: float, num_draft_tokens: int, draft_ratio: float = 0.0) -> float:
    """Returns how many times as many bytes are read for a token as in plain decoding.

        (1 + gamma · m) / E

    (§3.4: the target's weights and cache are read once a round, so that reads of them shrink by E;
    the paper counts these alone, m = 0.)

    Args:
      alpha: from 0 to 1.
      num_draft_tokens: gamma.
      draft_ratio: m, the bytes read for a draft over those of a plain step.

    Raises:
      InputError: a value out of range.
    """
    _check_cost("draft_ratio", draft_ratio)
    number = _check_number(num_draft_tokens)
    return (1 + number * draft_ratio) / expected_tokens(alpha, number)


def optimal_num_draft_tokens(
    alpha: float,
    cost_ratio: float,
    *,
    most: int = _MOST,
    verify_cost: Callable[[int], float] = lambda number: 1.0,
) -> int:
    """Returns the gamma that maximises `walltime_improvement` (§3.5); 0 is to draft nothing.

    Args:
      alpha: from 0 to 1.
      cost_ratio: c.
      most: drafts; where drafts are free, or all kept and cheaper than a step, more are better.
      verify_cost: from a number of drafts to what verifying them costs, in plain steps.

    Returns:
      The smallest of equally good ones.

    Raises:
      InputError: a value out of range.
    """
    _check_alpha(alpha)
    _check_cost("cost_ratio", cost_ratio)
    best, fastest, tokens, power = 0, 0.0, 1.0, 1.0
    for number in range(_check_number(most) + 1):
        speed = tokens / (number * cost_ratio + verify_cost(number))
        if speed > fastest:
            best, fastest = number, speed
        power *= alpha
        tokens += power
    return best


def oracle_improvement(alpha: float, cost_ratio: float) -> float:
    """Returns the improvement if an oracle tells, round by round, how many drafts will be kept.

        (1 / (1 - alpha)) / (1 + c · alpha / (1 - alpha)) = 1 / (1 - alpha + c · alpha)

    (§3.5. As many are drafted as will be kept, alpha / (1 - alpha) on average; one more token
    comes.) Where verifying costs a plain step whatever its width, no way to choose the number of
    drafts is faster.

    Args:
      alpha: from 0 to 1.
      cost_ratio: c, from 0 to 1.

    Raises:
      InputError: a value out of range.
    """
    _check_alpha(alpha)
    check_range("cost_ratio", cost_ratio, 0, 1)  # a draft that costs more never pays
    seconds_a_token = 1 - alpha + cost_ratio * alpha
    return 1 / seconds_a_token if seconds_a_token > 0 else _INFINITY


def break_even_alpha(
    num_draft_tokens: int, cost_ratio: float, verify_cost: float = 1.0
) -> float | None:
    """Returns the smallest alpha at which drafting does not slow down: E = gamma · c + v.

    Args:
      num_draft_tokens: gamma.
      cost_ratio: c.
      verify_cost: v; see `walltime_improvement`.

    Returns:
      From 0 to 1; None if it never pays, not even where every draft is kept.

    Raises:
      InputError: a value out of range.
    """
    low, high = 0.0, 1.0
    if walltime_improvement(high, num_draft_tokens, cost_ratio, verify_cost) < 1:
        return None
    if walltime_improvement(low, num_draft_tokens, cost_ratio, verify_cost) >= 1:
        return low
    for _ in range(60):  # E rises with alpha
        middle = (low + high) / 2
        pays = walltime_improvement(middle, num_draft_tokens, cost_ratio, verify_cost) >= 1
        low, high = (low, middle) if pays else (middle, high)
    return high


def _check_alpha(alpha: float) -> None:
    check_range("alpha", alpha, 0, 1)


def _check_cost(name: str, cost: float) -> None:
    if not 0 <= cost < _INFINITY:
        raise InputError(f"expected {name} of at least 0, got {cost}")


def _check_number(number: object) -> int:
    number = whole_number("num_draft_tokens", number)
    if number < 0:
        raise InputError(f"expected num_draft_tokens of at least 0, got {number}")
    return number
