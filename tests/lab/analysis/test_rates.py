"""Rates of accepted drafts, and the tokens that they let expect."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jspec.generation.result import RoundCounts, acceptance_rate
from jspec.generation.result import acceptance_by_position as by_position
from jspec.lab.analysis.ratios import (
    acceptance,
    acceptance_by_position,
    alpha_of,
    observed_alpha,
    share,
    shares_by_accepted,
    tokens_by_position,
)
from jspec.lab.analysis.theory import expected_tokens

ROUNDS = [[RoundCounts(3, 1), RoundCounts(3, 3)], [RoundCounts(3, 0)]]
counts = st.integers(0, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))


def draw_rounds(rng, count, length, rates, silent):
    """Returns rounds of proposals of a length, or of none; each position has its own acceptance."""
    rounds = []
    for _ in range(count):
        proposed = 0 if rng.random() < silent else length
        kept = np.cumprod(rng.random(proposed) < rates[:proposed]).sum()
        rounds.append(RoundCounts(proposed, int(kept)))
    return rounds


def test_rates_have_intervals_over_prompts_and_agree_with_the_counts():
    """The same figures as `jspec.generation.result` gives, and what prompts differ in."""
    rng = np.random.default_rng(1)
    prompts = [
        [RoundCounts(int(n), int(rng.integers(n + 1))) for n in rng.integers(0, 5, size=30)]
        for _ in range(6)
    ]
    together = [a_round for own in prompts for a_round in own]
    for is_conditional in (False, True):
        rates = acceptance_by_position(prompts, is_conditional=is_conditional)
        assert [rate.median for rate in rates] == pytest.approx(
            by_position(together, is_conditional=is_conditional)
        )
        assert all(rate.low < rate.median < rate.high for rate in rates)
    alpha = observed_alpha(prompts)
    assert alpha.median == pytest.approx(alpha_of(together))
    assert alpha.low < alpha.median < alpha.high
    assert acceptance(prompts).median == pytest.approx(acceptance_rate(together))


def test_rates_by_hand():
    """2 of 3, 1 of 3, 1 of 3 are kept; of those examined 2 of 3, 1 of 2, 1 of 1."""
    of_all = acceptance_by_position(ROUNDS, is_conditional=False)
    assert [rate.median for rate in of_all] == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    # one prompt keeps the first draft always, the other never
    assert (of_all[0].low, of_all[0].high) == (0, 1)
    examined = acceptance_by_position(ROUNDS, is_conditional=True)
    assert [rate.median for rate in examined] == pytest.approx([2 / 3, 1 / 2, 1])
    shares = shares_by_accepted(ROUNDS, 3)
    assert [share.median for share in shares] == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])


def test_where_nothing_was_proposed_there_are_no_rates():
    """Guards against a 0 in the place of nothing, and a division by it."""
    silent = [[RoundCounts(0, 0)]]
    assert observed_alpha(silent) is None
    assert acceptance(silent) is None
    assert acceptance_by_position(silent, is_conditional=True) == []
    assert acceptance_by_position([[]], is_conditional=False) == []
    assert alpha_of(silent[0]) == 0
    assert tokens_by_position(silent[0]) == 1
    assert share([1, 2], [0, 0]) is None
    assert share([1, 2], [0, 4]).median == 0.5


@pytest.mark.parametrize("number", [1, 4])
def test_alpha_does_not_depend_on_the_number_of_drafts(number):
    """20,000 rounds, within 5 standard deviations; kept of all proposed falls with the number."""
    rounds = draw_rounds(np.random.default_rng(0), 20_000, number, (0.7,) * 4, 0.3)
    examined = sum(min(kept + 1, proposed) for proposed, kept, _ in rounds)
    assert abs(alpha_of(rounds) - 0.7) < 5 * np.sqrt(0.21 / examined)
    if number > 1:
        assert acceptance([rounds]).median < 0.55


def test_alpha_by_hand():
    """A rejected draft was examined; those after it were not; a full round has no rejection."""
    rounds = [RoundCounts(*pair) for pair in ((4, 2), (4, 4), (0, 0), (4, 0))]
    assert alpha_of(rounds) == 6 / (3 + 4 + 1)


@hypothesis.given(st.integers(1, 7), st.lists(st.integers(0, 7), min_size=1, max_size=30))
@hypothesis.settings(deadline=None, max_examples=100, derandomize=True)
def test_tokens_are_exact_for_proposals_of_one_length(length, kept):
    """Where a proposal is full or empty its length says nothing of its quality."""
    rounds = [RoundCounts(length, min(k, length)) if k < 7 else RoundCounts(0, 0) for k in kept]
    assert tokens_by_position(rounds) == pytest.approx(
        np.mean([1 + r.num_accepted for r in rounds])
    )


@hypothesis.given(st.lists(counts, min_size=1, max_size=30))
@hypothesis.settings(deadline=None, max_examples=100, derandomize=True)
def test_tokens_lie_between_one_and_all(pairs):
    """Whatever lengths there are; and positions that no draft reached add nothing."""
    rounds = [RoundCounts(*pair) for pair in pairs]
    assert 1 <= tokens_by_position(rounds) <= 1 + np.mean([n for n, _ in pairs]) + 1e-9
    if not any(kept for _, kept in pairs):
        assert tokens_by_position(rounds) == 1


def test_other_rounds_of_the_same_distribution_are_predicted():
    """20,000 rounds predict 20,000 others within 2 %; one alpha for all misses by over 3 %."""
    rng, rates = np.random.default_rng(1), (0.3, 0.6, 0.8, 0.9, 0.9)  # the first is the hardest
    seen, others = (draw_rounds(rng, 20_000, 5, rates, 0.4) for _ in range(2))
    truth = np.mean([1 + r.num_accepted for r in others])
    assert tokens_by_position(seen) == pytest.approx(truth, rel=0.02)
    assert abs(expected_tokens(alpha_of(seen), 5) / truth - 1) > 0.03
