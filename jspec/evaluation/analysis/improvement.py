"""What a round of drafts brings on average (Leviathan et al., arXiv 2211.17192, section 3).

`alpha`, from 0 to 1, is the probability that a draft is accepted once those before it are, taken to
be the same for every draft and independent of the others; `num_draft_tokens` is the paper's gamma.
Costs are in plain decoding steps: `cost_ratio`, the paper's c, is what one draft costs, and
`verify_cost` what the verify call costs. The theorems have verify_cost = 1, however many drafts
there are; a measured one, which grows with their number, takes its place here.
"""

import math

from jspec.common.errors import InputError, check_range, whole_number

_MOST = 1000


def expected_tokens(alpha: float, num_draft_tokens: float) -> float:
    """Returns the tokens that a verify call emits on average; gamma may be infinite.

        E = (1 - alpha^(gamma + 1)) / (1 - alpha) = 1 + alpha + ... + alpha^gamma

    (Eq. 1: the i-th draft is accepted with probability alpha^i, and one more token always comes.)

    Raises:
      InputError: a value out of range.
    """
    check_range("alpha", alpha, 0, 1)
    if num_draft_tokens != math.inf:
        num_draft_tokens = _whole_number(num_draft_tokens)
    if alpha == 1:
        return num_draft_tokens + 1.0
    if 0 in (alpha, num_draft_tokens):
        return 1.0
    return -math.expm1((num_draft_tokens + 1) * math.log(alpha)) / (1 - alpha)  # exact near 1


def walltime_improvement(
    alpha: float, num_draft_tokens: int, cost_ratio: float, verify_cost: float = 1.0
) -> float:
    """Returns how many times faster than plain decoding it is: E / (gamma · c + v) (Thm 3.8).

    Raises:
      InputError: a value out of range.
    """
    _check_cost("cost_ratio", cost_ratio)
    if not 0 < verify_cost < math.inf:
        raise InputError(f"expected a verify_cost above 0, got {verify_cost}")
    number = _whole_number(num_draft_tokens)
    return expected_tokens(alpha, number) / (number * cost_ratio + verify_cost)


def operations_growth(alpha: float, num_draft_tokens: int, operations_ratio: float = 0.0) -> float:
    """Returns how many times as many arithmetic operations a token takes as in plain decoding.

        (gamma · ĉ + gamma + 1) / E

    (Thm 3.11: a round computes gamma + 1 tokens of the target and gamma of the draft.)

    Args:
      alpha: see above.
      num_draft_tokens: likewise.
      operations_ratio: ĉ, the draft's operations for a token over the target's.

    Raises:
      InputError: a value out of range.
    """
    _check_cost("operations_ratio", operations_ratio)
    number = _whole_number(num_draft_tokens)
    return (number * operations_ratio + number + 1) / expected_tokens(alpha, number)


def optimal_num_draft_tokens(alpha: float, cost_ratio: float) -> int:
    """Returns the gamma that maximises `walltime_improvement` (§3.5); 0 is to draft nothing.

    The smallest of equally good ones, at most 1000: where drafts are free, or all accepted and
    cheaper than a step, more are better.

    Raises:
      InputError: a value out of range.
    """
    check_range("alpha", alpha, 0, 1)
    _check_cost("cost_ratio", cost_ratio)
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


def _check_cost(name: str, cost: float) -> None:
    if not 0 <= cost < math.inf:
        raise InputError(f"expected {name} of at least 0, got {cost}")


def _whole_number(number: object) -> int:
    number = whole_number("num_draft_tokens", number)
    if number < 0:
        raise InputError(f"expected num_draft_tokens of at least 0, got {number}")
    return number
