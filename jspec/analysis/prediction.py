"""From rounds that were seen to a speed-up that is expected.

Two predictions, both of the form tokens of a round / seconds of a round · seconds of a plain step:

* `iid`: Theorem 3.8 of Leviathan et al. (arXiv 2211.17192). One probability for every draft, every
  proposal full, a verify call as cheap as a plain step. The paper itself is off by up to 45 %.
* `by_position`: a probability for each place in the proposal, given that all drafts before it were
  kept; proposals of the lengths that there were, 0 included; the seconds of a round by the number
  of its drafts, drafting and all.

A round is (drafts proposed, drafts kept); what follows, such as the drafter's name, is not read.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jspec.analysis.improvement import walltime_improvement
from jspec.errors import InputError
from jspec.stats import RoundCounts, acceptance_by_position, conditional_acceptance

Round = Sequence[Any]
CostFn = Callable[[int], float]


class PromptRun(NamedTuple):
    """What one prompt took, with drafts and without.

    Attributes:
      rounds: of the speculative answer.
      num_tokens: emitted by them.
      seconds: of decoding it, prefill excluded.
      num_plain_tokens: of the plain answer, likewise without the prefill's.
      plain_seconds: of decoding it.
    """

    rounds: Sequence[Round]
    num_tokens: int
    seconds: float
    num_plain_tokens: int
    plain_seconds: float


class HalfPrediction(NamedTuple):
    """The speed-up of some prompts, as it was and as other prompts had it expected.

    Attributes:
      seen: which prompts were looked at, "even" or "odd" ones; the others are predicted.
      alpha: of the seen rounds: the share of drafts kept among those whose turn came.
      measured: the speed-up of the others.
      iid: what was expected of them so.
      by_position: and so.
      iid_error: relative to what was measured; above 0 where too much was expected.
      by_position_error: likewise.
    """

    seen: str
    alpha: float
    measured: float
    iid: float
    by_position: float
    iid_error: float
    by_position_error: float


def observed_alpha(rounds: Sequence[Round]) -> float:
    """Returns the paper's alpha as rounds show it: drafts kept of those whose turn came.

    A draft behind a refused one never had its turn: `acceptance_rate`, drafts kept of all proposed,
    falls with the number of drafts, and this does not. 0 where nothing was proposed.
    """
    kept = sum(accepted for _, accepted, *_ in rounds)
    tried = sum(min(accepted + 1, proposed) for proposed, accepted, *_ in rounds)
    return kept / tried if tried else 0.0


def expected_speedup(
    rounds: Sequence[Round], cost: CostFn, plain_seconds: float, *, is_conditional: bool = True
) -> float:
    """Returns the speed-up of rounds like these: the prediction `by_position`.

        sum over k of P(k) · (1 + sum over i <= k of a_1 · ... · a_i)  tokens a round, in
        sum over k of P(k) · cost(k)  seconds

    with P(k) the share of rounds with k drafts proposed.

    Args:
      rounds: seen.
      cost: from the number of drafts proposed to the seconds of a round, drafting included; see
        `at_fitting_width`.
      plain_seconds: of a plain step.
      is_conditional: whether a_1 · ... · a_i is a product of conditional acceptances, as if how
        long a proposal is said nothing about how good it is; else it is how often the i-th draft of
        those proposals that have one is kept.

    Raises:
      InputError: no rounds.
    """
    if not rounds:
        raise InputError("expected some rounds, got none")
    rates = _kept_by_place(rounds, is_conditional=is_conditional)
    lengths = collections.Counter(int(proposed) for proposed, *_ in rounds)
    tokens = sum(count * (1 + sum(rates[:length])) for length, count in lengths.items())
    seconds = sum(count * cost(length) for length, count in lengths.items())
    return tokens / seconds * plain_seconds


def _kept_by_place(rounds: Sequence[Round], *, is_conditional: bool) -> list[float]:
    """Returns how likely the draft at each place is kept; a place never reached is left out."""
    counts = [RoundCounts(int(proposed), int(accepted)) for proposed, accepted, *_ in rounds]
    if not is_conditional:
        return acceptance_by_position(counts)
    return np.cumprod(conditional_acceptance(counts)).tolist()


def at_fitting_width(seconds: Mapping[int, float]) -> CostFn:
    """Returns the cost of a round by the number of drafts proposed.

    Args:
      seconds: of rounds at the compiled widths. A round runs at the smallest one that holds its
        drafts (see `speculation.step`).
    """
    widths = sorted(seconds)

    def cost(num_proposed: int) -> float:
        fitting = [width for width in widths if width >= num_proposed]
        if not fitting:
            raise InputError(f"expected a cost of rounds of {num_proposed} drafts, got {widths}")
        return seconds[fitting[0]]

    return cost


def fit_round_costs(prompts: Sequence[PromptRun], widths: Sequence[int]) -> CostFn:
    """Returns the seconds of rounds at each width that answers' seconds speak for.

    Least squares over prompts, seconds = sum over rounds of the cost at their width; a wider round
    never costs less (what is fitted are the rises), and the total is met exactly. A width that no
    round had is interpolated; outside of those that had any it costs what the nearest does.

    Args:
      prompts: seen.
      widths: the compiled ones, among them one that holds every proposal.

    Raises:
      InputError: no rounds, or a proposal that no width holds.
    """
    import scipy.optimize

    widths = sorted(set(widths))
    index_of = at_fitting_width({width: float(i) for i, width in enumerate(widths)})
    counts = np.zeros([len(prompts), len(widths)])
    for row, prompt in enumerate(prompts):
        for proposed, *_ in prompt.rounds:
            counts[row, int(index_of(proposed))] += 1
    if not counts.any():
        raise InputError("expected some rounds, got none")
    seconds = np.array([prompt.seconds for prompt in prompts])
    used = np.flatnonzero(counts.any(axis=0))
    at_least = counts[:, used[::-1]].cumsum(axis=1)[:, ::-1]  # rounds of a width or a wider one
    rises, _ = scipy.optimize.nnls(at_least, seconds)
    known = np.cumsum(rises) * (seconds.sum() / (at_least @ rises).sum())
    costs = np.interp(widths, np.array(widths)[used], known)
    return at_fitting_width(dict(zip(widths, costs.tolist(), strict=True)))


def measured_speedup(prompts: Sequence[PromptRun]) -> float:
    """Returns tokens a second with drafts over those without, over all prompts together."""
    speed = sum(p.num_tokens for p in prompts) / sum(p.seconds for p in prompts)
    return speed * plain_step_seconds(prompts)


def plain_step_seconds(prompts: Sequence[PromptRun]) -> float:
    """Returns the seconds of a plain step, over all prompts together."""
    return sum(p.plain_seconds for p in prompts) / sum(p.num_plain_tokens for p in prompts)


def predict_halves(
    prompts: Sequence[PromptRun],
    *,
    num_draft_tokens: int,
    cost_ratio: float,
    costs: Callable[[Sequence[PromptRun]], CostFn],
    is_conditional: bool = True,
) -> list[HalfPrediction]:
    """Predicts each half of the prompts from the other one.

    Prompts at even indices are one half, those at odd ones the other: prompts sorted by category
    fall evenly into both.

    Args:
      prompts: at least 2.
      num_draft_tokens: gamma, of the i.i.d. form.
      cost_ratio: c, what a draft costs in plain steps, of the i.i.d. form.
      costs: from the prompts that may be looked at to the seconds of their rounds, such as a
        partial `fit_round_costs`, or whatever was measured apart.
      is_conditional: see `expected_speedup`.

    Returns:
      Two predictions.

    Raises:
      InputError: fewer than 2 prompts, or a half without rounds.
    """
    if len(prompts) < 2:
        raise InputError(f"expected at least 2 prompts to split in halves, got {len(prompts)}")
    halves = {"even": prompts[::2], "odd": prompts[1::2]}
    predictions = []
    for seen, other in (("even", "odd"), ("odd", "even")):
        rounds = [a_round for prompt in halves[seen] for a_round in prompt.rounds]
        alpha = observed_alpha(rounds)
        iid = walltime_improvement(alpha, num_draft_tokens, cost_ratio)
        by_position = expected_speedup(
            rounds,
            costs(halves[seen]),
            plain_step_seconds(halves[seen]),
            is_conditional=is_conditional,
        )
        measured = measured_speedup(halves[other])
        errors = iid / measured - 1, by_position / measured - 1
        predictions.append(HalfPrediction(seen, alpha, measured, iid, by_position, *errors))
    return predictions
