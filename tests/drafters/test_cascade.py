"""Several drafters in order: whose turn it is, and whose law it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters import CascadeDrafter, ModelDrafter, PromptLookupDrafter
from jspec.speculation.control import Control
from jspec.speculation.types import TargetView
from tests import tiny
from tests.speculation.drive import Engine

WIDTH = 3
NO_TARGET = TargetView(None, lambda: None, None)
SIZE = tiny.CONFIG.vocab_size
LOOKUP = PromptLookupDrafter(WIDTH, min_match=2, max_match=4)


@pytest.fixture(scope="module")
def drafter(tiny_pair):
    model = ModelDrafter(tiny_pair.apply, tiny.empty_cache, WIDTH, SIZE, SIZE)
    return CascadeDrafter((LOOKUP, model))


@pytest.fixture(scope="module")
def engine(tiny_pair, drafter):
    params = tiny_pair.target, (None, tiny_pair.draft)
    return Engine(tiny_pair.apply, tiny.empty_cache, params, drafter, max_rounds=8)


def with_limits(drafter, state, limits):
    """Returns the state in which each row wants so many drafts of each kind, [b k]."""
    control = Control.init(limits.shape[0], kinds=drafter.kinds, numbers=(0, WIDTH))
    return state.replace(control=control.replace(forced=jnp.asarray(limits, jnp.int32)))


def test_each_row_is_answered_by_the_first_that_has_something_to_say(engine, drafter):
    """A repetitive row gets the lookup's drafts, with a one-hot law; another gets the model's."""
    state = engine.start([[4, 9, 23, 4, 9, 23, 4, 9], [1, 2, 3, 5, 8, 13]], temperature=1.0)
    state = state.replace(last_token=jnp.array([23, 21], jnp.int32))
    keys = jax.random.split(jax.random.key(0), (2, WIDTH))
    proposal, new = jax.jit(
        lambda state: drafter.propose(
            engine.params.draft, state.draft, state.last_token,
            limit=lambda kind: jnp.full_like(kind, WIDTH), rng_keys=keys,
            settings=state.settings, view=NO_TARGET,
        )
    )(state)  # fmt: skip
    assert proposal.tokens[0].tolist() == [4, 9, 23]
    assert proposal.num_tokens.tolist() == [WIDTH, WIDTH]
    one_hot = np.eye(SIZE, dtype=np.float32)[np.array([4, 9, 23])]
    np.testing.assert_array_equal(proposal.probs[0], one_hot)
    assert 0 < float(proposal.probs[1].max()) < 1
    first_of_model = len(LOOKUP.kinds)
    assert proposal.kind[0] < first_of_model
    assert proposal.kind[1] == first_of_model
    lengths = new[1].cache.length.tolist()
    assert lengths == [0, 6], "the first row's model lags; the second's has caught up"


def test_nothing_wanted_nothing_done(engine, drafter):
    """A plain step: no member's cache moves and nobody proposes."""
    state = engine.start([[4, 9, 23, 4, 9, 23, 4, 9]])
    state = with_limits(drafter, state, np.zeros([1, len(drafter.kinds)]))
    state, infos = engine.advance(state, 4)
    assert infos.num_proposed.max() == 0
    assert infos.num_tokens.tolist() == [[1]] * 4
    assert state.draft[1].cache.length.tolist() == [0]
