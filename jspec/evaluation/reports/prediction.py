"""From rounds that were seen, and costs that were measured apart, to a speed-up that is expected.

A speed-up is tokens of a round over seconds of a round, in steps of plain decoding. Two forms:

* `iid`: Theorem 3.8 of Leviathan et al. (arXiv 2211.17192). One probability for every draft, every
  proposal full, each draft adding c plain steps. The paper itself is off by up to 45 %.
* `by_position`: a probability for each place in the proposal, given that all drafts before it were
  kept; proposals of the lengths that there were, 0 included; the seconds of a round of that length,
  drafting and all, and those of a draft model's reading of the prompt.

The costs are those of a calibration (see `RoundCosts`): no answer that was timed has a part in
them, so a wrong cost shows as an error, on the very prompts whose acceptance was seen too.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jspec.common.errors import InputError
from jspec.evaluation.analysis.improvement import expected_tokens
from jspec.generation.capacity import capacity_for
from jspec.generation.costs import RoundCosts
from jspec.generation.stats import RoundCounts, acceptance_by_position, conditional_acceptance

CostFn = Callable[[int, RoundCounts | None], float]
ReadingFn = Callable[[int, str], float]


class PromptRun(NamedTuple):
    """What one prompt took, with drafts and without.

    Attributes:
      rounds: of the speculative answer.
      num_tokens: emitted by them.
      seconds: of decoding it, prefill excluded.
      num_plain_tokens: of the plain answer, likewise without the prefill's.
      plain_seconds: of decoding it.
      max_length: tokens that prompt and answer may come to.
      num_prompt_tokens: of all speculative answers whose rounds these are.
    """

    rounds: Sequence[RoundCounts]
    num_tokens: int
    seconds: float
    num_plain_tokens: int
    plain_seconds: float
    max_length: int
    num_prompt_tokens: int = 0


class RoundSpeed(NamedTuple):
    """A speed-up and what it is made of.

    Attributes:
      tokens: a round gives.
      cost: of a round, in steps of plain decoding.
    """

    tokens: float
    cost: float

    @property
    def speedup(self) -> float:
        """To plain decoding."""
        return self.tokens / self.cost

    def error(self, measured: "RoundSpeed") -> float:
        """Returns how far it is off, relative to the truth; above 0 where it is too much."""
        return self.speedup / measured.speedup - 1


class HalfPrediction(NamedTuple):
    """The speed-up of some prompts, as it was and as other prompts had it expected.

    Attributes:
      seen: which prompts were looked at, "even" or "odd" ones; the others are predicted.
      alpha: of the seen rounds: the share of drafts kept among those whose turn came.
      measured: the speed of the others.
      iid: what was expected of them so.
      by_position: and so.
    """

    seen: str
    alpha: float
    measured: RoundSpeed
    iid: RoundSpeed
    by_position: RoundSpeed


def cost_of(costs: RoundCosts) -> CostFn:
    """Returns the seconds of rounds that were measured, for `expect_by_position`.

    A round costs what the smallest number of drafts costs that was measured and holds its own; one
    in which nobody had anything to say costs a plain step.

    Args:
      costs: of the way's rounds, at batch size 1.
    """

    @functools.cache
    def seconds(max_length: int) -> np.ndarray:
        return costs.at(capacity_for(max_length, costs.numbers[-1] + 1))

    def cost(max_length: int, a_round: RoundCounts | None) -> float:
        plain = seconds(max_length)[:, 0].min()
        if a_round is None or not a_round.num_proposed:
            return float(plain)
        if a_round.drafter not in costs.drafters or a_round.num_proposed > costs.numbers[-1]:
            raise InputError(
                f"expected costs of rounds with {a_round.num_proposed} drafts by "
                f"{a_round.drafter!r}, got {list(costs.numbers)} by {list(costs.drafters)}"
            )
        own = seconds(max_length)[costs.drafters.index(a_round.drafter)]
        return float(own[np.searchsorted(costs.numbers, a_round.num_proposed)])

    return cost


def reading_of(costs: RoundCosts) -> ReadingFn:
    """Returns the seconds of a drafter for each token of a prompt, for `expect_by_position`."""

    def reading(max_length: int, drafter: str) -> float:
        if drafter not in costs.drafters:
            return 0.0
        context = capacity_for(max_length, costs.numbers[-1] + 1)
        return float(costs.reading_at(context)[costs.drafters.index(drafter)])

    return reading


def reads_nothing(max_length: int, drafter: str) -> float:
    """The reading of drafters without a cache of their own."""
    del max_length, drafter
    return 0.0


def observed_alpha(rounds: Sequence[RoundCounts]) -> float:
    """Returns the paper's alpha as rounds show it: drafts kept of those whose turn came.

    A draft behind a refused one never had its turn: `acceptance_rate`, drafts kept of all proposed,
    falls with the number of drafts, and this does not. 0 where nothing was proposed.
    """
    kept = sum(one.num_accepted for one in rounds)
    tried = sum(min(one.num_accepted + 1, one.num_proposed) for one in rounds)
    return kept / tried if tried else 0.0


def expect_by_position(
    prompts: Sequence[PromptRun],
    cost: CostFn,
    *,
    reading: ReadingFn = reads_nothing,
    is_conditional: bool = True,
) -> RoundSpeed:
    """Returns the speed of rounds like these: the prediction `by_position`.

        sum over k of P(k) · (1 + sum over i <= k of a_1 · ... · a_i)  tokens a round

    with P(k) the share of rounds with k drafts proposed, and the mean of the rounds' costs.

    Args:
      prompts: seen; their seconds are not looked at.
      cost: (max_length, round) -> its seconds, drafting included; of a plain step for None.
      reading: (max_length, drafter) -> its seconds for each token of the prompt, which it reads
        when it first drafts.
      is_conditional: whether a_1 · ... · a_i is a product of conditional acceptances, as if how
        long a proposal is said nothing about how good it is; else it is how often the i-th draft of
        those proposals that have one is kept.

    Raises:
      InputError: no rounds.
    """
    rounds = _rounds_of(prompts)
    tokens_of = np.cumsum([1.0, *_kept_by_place(rounds, is_conditional=is_conditional)])
    # A place that no draft ever reached adds nothing.
    found = [tokens_of[min(one.num_proposed, len(tokens_of) - 1)] for one in rounds]
    return RoundSpeed(float(np.mean(found)), _cost_in_steps(prompts, cost, reading))


def _rounds_of(prompts: Sequence[PromptRun]) -> list[RoundCounts]:
    rounds = [one for prompt in prompts for one in prompt.rounds]
    if not rounds:
        raise InputError("expected some rounds, got none")
    return rounds


def _kept_by_place(rounds: Sequence[RoundCounts], *, is_conditional: bool) -> list[float]:
    """Returns how likely the draft at each place is kept; a place never reached is left out."""
    if not is_conditional:
        return acceptance_by_position(rounds)
    return np.cumprod(conditional_acceptance(rounds)).tolist()


def _cost_in_steps(
    prompts: Sequence[PromptRun], cost: CostFn, reading: ReadingFn = reads_nothing
) -> float:
    """Returns the mean cost of the prompts' rounds in plain steps."""
    seconds = sum(cost(prompt.max_length, one) for prompt in prompts for one in prompt.rounds)
    for prompt in prompts:
        drafters = {one.drafter for one in prompt.rounds if one.num_proposed}
        seconds += prompt.num_prompt_tokens * sum(
            reading(prompt.max_length, drafter) for drafter in sorted(drafters)
        )
    plain = sum(cost(prompt.max_length, None) * len(prompt.rounds) for prompt in prompts)
    return seconds / plain


def expect_iid(
    prompts: Sequence[PromptRun], cost: CostFn, *, num_draft_tokens: int
) -> tuple[RoundSpeed, float]:
    """Returns the speed by Theorem 3.8, and its c: what a draft adds to a round, in plain steps.

    Where several drafters took turns, c is the mean over their rounds.

    Args:
      prompts: seen; their seconds are not looked at.
      cost: see `expect_by_position`; c is that of a full round, less a plain step, by drafts.
      num_draft_tokens: gamma.

    Raises:
      InputError: no rounds.
    """
    rounds = _rounds_of(prompts)
    # A silent round is taken for a full one of whoever drafts most often.
    drafters = [one.drafter for one in rounds if one.drafter]
    usual = max(sorted(set(drafters)), key=drafters.count, default="")
    whole = [_with_full_rounds(prompt, num_draft_tokens, usual) for prompt in prompts]
    steps = _cost_in_steps(whole, cost)
    tokens = expected_tokens(observed_alpha(rounds), num_draft_tokens)
    return RoundSpeed(tokens, steps), (steps - 1) / num_draft_tokens


def _with_full_rounds(prompt: PromptRun, num_draft_tokens: int, usual: str) -> PromptRun:
    full = [RoundCounts(num_draft_tokens, 0, one.drafter or usual) for one in prompt.rounds]
    return prompt._replace(rounds=full)


def measured_speed(prompts: Sequence[PromptRun]) -> RoundSpeed:
    """Returns the speed that all prompts together had."""
    num_rounds = sum(len(prompt.rounds) for prompt in prompts)
    plain = sum(p.plain_seconds for p in prompts) / sum(p.num_plain_tokens for p in prompts)
    return RoundSpeed(
        sum(p.num_tokens for p in prompts) / num_rounds,
        sum(p.seconds for p in prompts) / num_rounds / plain,
    )


def predict_halves(
    prompts: Sequence[PromptRun],
    cost: CostFn,
    *,
    num_draft_tokens: int,
    reading: ReadingFn = reads_nothing,
    is_conditional: bool = True,
) -> list[HalfPrediction]:
    """Predicts each half of the prompts from the other one.

    Prompts at even indices are one half, those at odd ones the other: prompts sorted by category
    fall evenly into both.

    Args:
      prompts: at least 2.
      cost: see `expect_by_position`; measured apart from the prompts.
      num_draft_tokens: gamma, of the i.i.d. form.
      reading: see `expect_by_position`.
      is_conditional: see `expect_by_position`.

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
        own = halves[seen]
        predictions.append(
            HalfPrediction(
                seen,
                observed_alpha(_rounds_of(own)),
                measured_speed(halves[other]),
                expect_iid(own, cost, num_draft_tokens=num_draft_tokens)[0],
                expect_by_position(own, cost, reading=reading, is_conditional=is_conditional),
            )
        )
    return predictions
