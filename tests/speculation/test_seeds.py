"""Invariant 5: a request's tokens depend on its seed and prompt, not on company or chunking."""

import numpy as np
import pytest

from tests.cases import slow_unless
from tests.tiny_heads import head_cases

ENGINES = [
    "plain", "model", "prompt_lookup", *head_cases("eagle"),
    *(slow_unless(False, name) for name in ("suffix", "recycle", "hierarchical")),
]  # fmt: skip
SEEDS = np.array([11, 22, 33, 44])
MAX_LENGTH = 40


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, make_engine):
    return make_engine(request.param, 0 if request.param == "plain" else 4)


@pytest.fixture(scope="module")
def sampled(engine, prompts):
    result = engine.generate(prompts, seeds=SEEDS, temperature=1.0, max_length=MAX_LENGTH)
    proposed, kept = result.infos.num_proposed.sum(), result.num_accepted.sum()
    assert engine.drafter is None or 0 < kept < proposed, "they prove something of drafts"
    return result


def test_tokens_do_not_depend_on_the_row(engine, prompts, sampled):
    """Rows in another order, with the same seeds."""
    order = [2, 0, 3, 1]
    moved = engine.generate(
        [prompts[i] for i in order], seeds=SEEDS[order], temperature=1.0, max_length=MAX_LENGTH
    )
    assert moved.tokens == [sampled.tokens[i] for i in order]


def test_tokens_do_not_depend_on_the_company(engine, prompts, sampled):
    """Strangers in the other rows, with other temperatures and limits."""
    others = [prompts[2], [5, 6], [9] * 9]
    mixed = engine.generate(
        [others[0], prompts[1], others[1], others[2]],
        seeds=[1, SEEDS[1], 2, 3], temperature=[0.0, 1.0, 2.0, 0.5],
        max_length=[25, MAX_LENGTH, 9, 60],
    )  # fmt: skip
    assert mixed.tokens[1] == sampled.tokens[1]


def test_a_row_alone_says_the_same(make_engine, prompts):
    """A batch of one row, whose program is another one, whatever drafts."""
    engine, options = make_engine("model", 4), {"temperature": 1.0, "max_length": MAX_LENGTH}
    together = engine.generate(prompts, seeds=SEEDS, **options)
    alone = engine.generate(prompts[3:], seeds=SEEDS[3:], **options)
    assert alone.tokens[0] == together.tokens[3]


@pytest.mark.parametrize("heats", [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0)])
def test_cold_rows_say_the_same_beside_hot_ones(engine, prompts, heats):
    """A batch without randomness goes a shorter way; drafts and what is kept are the same."""
    temperature, draft_temperature = heats
    alone = engine.generate(
        [prompts[1]] * 4, seeds=SEEDS[1].repeat(4), temperature=temperature,
        draft_temperature=draft_temperature, max_length=MAX_LENGTH,
    )  # fmt: skip
    beside = engine.generate(
        [prompts[0], prompts[1], prompts[2], prompts[3]], seeds=SEEDS,
        temperature=[1.0, temperature, 0.5, 2.0],
        draft_temperature=[1.0, draft_temperature, 0.5, 0.0], max_length=MAX_LENGTH,
    )  # fmt: skip
    assert beside.tokens[1] == alone.tokens[1]
    kept = [
        result.num_accepted[:, 1][result.infos.num_tokens[:, 1] > 0] for result in (alone, beside)
    ]
    np.testing.assert_array_equal(*kept)


@pytest.mark.parametrize("rounds_per_call", [1, 7])
def test_tokens_do_not_depend_on_the_chunking(engine, prompts, sampled, rounds_per_call):
    """How often the host looks is no part of a request."""
    chunked = engine.generate(
        prompts, seeds=SEEDS, temperature=1.0, max_length=MAX_LENGTH,
        rounds_per_call=rounds_per_call,
    )  # fmt: skip
    assert chunked.tokens == sampled.tokens


def test_other_seeds_say_something_else(engine, prompts, sampled):
    """Otherwise the tests above would hold of a constant."""
    different = engine.generate(prompts, seeds=SEEDS + 1, temperature=1.0, max_length=MAX_LENGTH)
    assert all(a != b for a, b in zip(different.tokens, sampled.tokens, strict=True))


def test_equal_requests_in_one_batch_say_the_same(engine, prompts):
    """Twins: a row's index must not leak into its noise."""
    twins = engine.generate(
        [prompts[2]] * 4, seeds=[5, 5, 6, 5], temperature=1.0, max_length=MAX_LENGTH
    )
    assert twins.tokens[0] == twins.tokens[1] == twins.tokens[3] != twins.tokens[2]


def test_a_silent_neighbour_does_not_shorten_a_rows_drafts(make_engine, prompts):
    """The narrow verify call is for rounds in which no row has more than one draft."""
    result = make_engine("prompt_lookup", 4).generate(prompts, max_length=MAX_LENGTH)
    proposed = result.infos.num_proposed
    assert ((proposed == 4).any(axis=1) & (proposed == 0).any(axis=1)).any()
    assert (proposed <= 1).all(axis=1).any(), "narrow rounds must occur as well"
