"""How often drafts are kept is what the theory says."""

import numpy as np
import pytest

from jspec.drafters.model import ModelDrafter
from tests.speculation.drive import Engine
from tests.speculation.toys import VOCAB, make_tables, softmax, toy_apply, toy_cache

TABLES = make_tables(seed=3)
PROMPT = [2, 0, 1, 2, 0, 3]
NUM_ROWS, NUM_ROUNDS = 2000, 8
WORST = 5  # standard deviations: a right rule is further off once in two million


def deviation(rule):
    """Returns how many standard deviations acceptances are above E[sum min(target, draft)].

    One draft a round; given the two tokens before it, it is kept with that probability.
    """
    drafter = ModelDrafter(1, VOCAB, VOCAB, apply=toy_apply, init_cache=toy_cache)
    engine = Engine(toy_apply, toy_cache, TABLES, drafter, rule, capacity=64, max_rounds=NUM_ROUNDS)
    state = engine.start([PROMPT] * NUM_ROWS, temperature=1.0)
    context = np.array([[PROMPT[-1], token] for token in state.last_token.tolist()])
    _, infos = engine.advance(state, NUM_ROUNDS)
    target, draft = (softmax(table) for table in TABLES)
    overlap = np.minimum(target, draft).sum(axis=-1)
    excess, variance = 0.0, 0.0
    for tokens, count, kept in zip(infos.tokens, infos.num_tokens, infos.num_accepted, strict=True):
        expected = overlap[context[:, 0], context[:, 1]]
        excess += np.sum(kept - expected)
        variance += np.sum(expected * (1 - expected))
        context = np.where(
            (count == 2)[:, None], tokens, np.stack([context[:, 1], tokens[:, 0]], axis=1)
        )
    return excess / np.sqrt(variance)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_acceptance_rate_is_the_overlap_of_the_distributions(rule):
    """E[acceptance] = sum min(target, draft) (arXiv 2211.17192, Cor. 3.6), over 16,000 rounds.

    With one draft block verification is the same.
    """
    assert abs(deviation(rule)) < WORST


@pytest.mark.parametrize(("rule", "sign"), [("coupled", -1), ("lenient", 1)])
def test_other_rules_are_off(rule, sign):
    """Negative controls: coupled agrees less than the best coupling, lenience keeps more."""
    assert sign * deviation(rule) > WORST
