"""Several drafters in order: whose turn it is, and whose distribution it is."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.cascade import CascadeDrafter
from jspec.drafters.model import ModelDrafter
from jspec.drafters.prompt_lookup import PromptLookupDrafter
from jspec.speculation.types import Proposal, TargetView
from tests import tiny, tiny_lookahead
from tests.speculation.drive import Engine, assert_committed_equal, inputs_of, propose

WIDTH = 3
SIZE = tiny.CONFIG.vocab_size
LOOKUP = PromptLookupDrafter(WIDTH, min_match=2, max_match=4)


@pytest.fixture(scope="module")
def drafter(tiny_pair):
    model = ModelDrafter(WIDTH, SIZE, SIZE, apply=tiny_pair.apply, init_cache=tiny.empty_cache)
    return CascadeDrafter((LOOKUP, model))


@pytest.fixture(scope="module")
def engine(tiny_pair, drafter):
    params = tiny_pair.target, (None, tiny_pair.draft)
    return Engine(tiny_pair.apply, tiny.empty_cache, params, drafter, max_rounds=8)


def test_each_row_is_answered_by_the_first_that_has_something_to_say(engine, drafter):
    """A repetitive row gets the lookup's drafts, with a one-hot distribution; another gets the
    model's.
    """
    state = engine.start([[4, 9, 23, 4, 9, 23, 4, 9], [1, 2, 3, 5, 8, 13]], temperature=1.0)
    state = state.replace(last_token=jnp.array([23, 21], jnp.int32))
    proposal, new = propose(
        None, drafter, engine.params.draft, state.draft, state.last_token, settings=state.settings
    )
    assert proposal.prefix is None, "nobody has called the target"
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
    """No member's cache moves and nobody proposes."""
    state = engine.start([[4, 9, 23, 4, 9, 23, 4, 9], [1, 2, 3, 5, 8, 13]])
    params = engine.params.draft
    proposal, new = propose(None, drafter, params, state.draft, state.last_token, 0)
    assert proposal.num_tokens.tolist() == [0, 0]
    assert new[1].cache.length.tolist() == [0, 0]


@dataclasses.dataclass(frozen=True)
class Witness(PromptLookupDrafter):
    """Looks at the target, and has nothing to say."""

    seen: list = dataclasses.field(default_factory=list, hash=False)

    def propose(self, params, state, inputs):
        self.seen.append(inputs.view.cache)
        return super().propose(params, state, inputs._replace(limit=jnp.zeros_like))


def test_the_targets_cache_is_handed_on(tiny_pair):
    """After a look ahead: to the next member, and to a verify call on whatever was proposed.

    Guards against embeddings of the look ahead's own drafts in a row that another member answers,
    and against a cache used twice, which XLA would copy in every round.
    """
    witness = Witness(WIDTH)
    drafter = CascadeDrafter((LOOKUP, tiny_lookahead.drafter(WIDTH), witness))
    params = None, tiny_lookahead.params(), None
    engine = Engine(tiny_pair.apply, tiny.empty_cache, (tiny_pair.target, params), drafter)
    state = engine.start([[4, 9, 23, 4, 9, 23, 4, 9], [1, 2, 3, 5, 8, 13]])
    last = jnp.array([23, 21], jnp.int32)
    view = TargetView(tiny_pair.target, tiny_pair.apply, state.target_cache)
    inputs = inputs_of(last, WIDTH, WIDTH, view=view)
    proposal, _ = drafter.propose(params, state.draft, inputs)
    assert [drafter.kinds[kind].drafter for kind in proposal.kind] == ["prompt_lookup", "lookahead"]
    prefix = proposal.prefix
    assert prefix.num_layers == 0
    block = jnp.concatenate([last[:, None], proposal.tokens], axis=1)
    np.testing.assert_array_equal(prefix.hidden, tiny_pair.target["embedding"][block])
    np.testing.assert_array_equal(prefix.cache.length, state.target_cache.length)
    assert_committed_equal(prefix.cache, state.target_cache, atol=0)
    (seen,) = witness.seen
    assert seen is prefix.cache
    assert (np.asarray(seen.keys[0]) != np.asarray(state.target_cache.keys[0])).any()


def test_distributions_of_all_members_are_added_up():
    """Each row has one member's; certain drafts have all probability, what is no token none."""
    distribution = jnp.asarray(
        np.random.default_rng(0).dirichlet(np.ones(SIZE), (3, WIDTH)), jnp.float32
    )
    counts = [[2, 0, 0], [0, 3, 0], [0, 0, 2]]  # of three members, by row
    tokens = jnp.asarray([[5, 6, 7], [1, 2, 3], [8, -1, 9]], jnp.int32)

    def proposal(count, has_distribution):
        is_meant = jnp.arange(WIDTH) < jnp.asarray(count)[:, None]
        probs = jnp.where(is_meant[..., None], distribution, 0.0) if has_distribution else None
        return Proposal(tokens, jnp.asarray(count, jnp.int32), probs, jnp.zeros([3], jnp.int32))

    proposals = [proposal(count, index < 2) for index, count in enumerate(counts)]
    turns = [jnp.asarray(count) > 0 for count in counts]
    merged = CascadeDrafter((LOOKUP,) * 3).merge(proposals, turns, True)
    assert merged.num_tokens.tolist() == [2, 3, 2]
    expected = np.zeros([3, WIDTH, SIZE], np.float32)
    expected[0, :2], expected[1], expected[2, 0, 8] = distribution[0, :2], distribution[1], 1
    np.testing.assert_array_equal(merged.probs, expected)
