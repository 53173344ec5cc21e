"""Several drafters in order: whose turn it is, whose law it is, and that nobody gets a hole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters import CascadeDrafter, ModelDrafter, PromptLookupDrafter
from jspec.speculation.control import Control
from jspec.speculation.step import speculative_step
from jspec.speculation.types import TargetView
from tests import tiny
from tests.speculation.drive import Engine, assert_committed_equal, emitted_in_row

WIDTH, CAPACITY, NUM_ROUNDS = 3, 640, 200
NO_TARGET = TargetView(None, lambda: None, None)
PROMPTS = [[7], [3, 1, 4, 1, 5], [4, 9, 23, 4] * 3]
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_hole_after_many_rounds_of_random_switching(tiny_pair, temperature):
    """200 rounds, each row asked now of the lookup, now of the model, now of nobody.

    The draft here is near the target, so that rounds keep none, some and all.
    """
    nearer = jax.tree.map(lambda a, b: 0.7 * a + 0.3 * b, tiny_pair.target, tiny_pair.draft)
    model = ModelDrafter(tiny_pair.apply, tiny.empty_cache, WIDTH, SIZE, SIZE)
    drafter = CascadeDrafter((LOOKUP, model))
    step = functools.partial(speculative_step, widths=(0, 1))
    engine = Engine(
        tiny_pair.apply, tiny.empty_cache, (tiny_pair.target, (None, nearer)), drafter,
        capacity=CAPACITY, max_rounds=1, step=step,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    state = engine.start(PROMPTS, temperature=temperature)
    texts = [[*p, t] for p, t in zip(PROMPTS, state.last_token.tolist(), strict=True)]
    asked = set()
    lookup_kinds = len(LOOKUP.kinds)
    for _ in range(NUM_ROUNDS):
        limits = rng.integers(0, WIDTH + 1, (len(PROMPTS), len(drafter.kinds)))
        limits[:, :lookup_kinds] *= rng.integers(0, 2, (len(PROMPTS), 1))
        limits[:, lookup_kinds:] *= rng.integers(0, 2, (len(PROMPTS), 1))
        state, infos = engine.advance(with_limits(drafter, state, limits), 1)
        asked |= {(int(k) >= lookup_kinds, int(n)) for k, n in
                  zip(infos.kind[0], infos.num_accepted[0], strict=True)}  # fmt: skip
        texts = [text + emitted_in_row(infos, row) for row, text in enumerate(texts)]
    assert {(True, 0), (True, WIDTH), (False, 0), (False, 1)} <= asked
    forced = np.zeros_like(limits)
    forced[:, lookup_kinds:] = WIDTH
    before = state.draft[1].cache.length
    state, _ = engine.advance(with_limits(drafter, state, forced), 1)
    lengths = [len(text) - 1 for text in texts]
    assert (np.asarray(before) <= lengths).all()
    assert (np.asarray(state.draft[1].cache.length) >= lengths).all(), "caught up"
    tokens = np.zeros([len(texts), CAPACITY], np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    call = jax.jit(tiny_pair.apply)
    fresh = [
        call(params, jnp.asarray(tokens), tiny.empty_cache(len(texts), CAPACITY))[2]
        for params in (nearer, tiny_pair.target)
    ]
    emitted = jnp.asarray(lengths, jnp.int32)
    assert_committed_equal(state.draft[1].cache.rollback(emitted), fresh[0], atol=1e-4)
    assert_committed_equal(state.target_cache.rollback(emitted), fresh[1], atol=1e-4)
    assert state.draft[0].tokens[0, : lengths[0]].tolist() == texts[0][:-1]
