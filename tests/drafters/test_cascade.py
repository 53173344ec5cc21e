"""Several drafters in order: whose turn it is, and whose distribution it is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.cascade import CascadeDrafter
from jspec.drafters.model import ModelDrafter
from jspec.drafters.prompt_lookup import PromptLookupDrafter
from jspec.speculation.types import Proposal, TargetView
from tests import tiny, tiny_lookahead
from tests.drafters.rows import WIDTH, show
from tests.speculation.drive import assert_committed_equal, inputs_of, propose
from tests.speculation.toys import toy_apply, toy_cache

SIZE = tiny.CONFIG.vocab_size
LOOKUP = PromptLookupDrafter(WIDTH, min_match=2, max_match=4)
TEXTS, LAST = [[4, 9, 23, 4, 9, 23, 4, 9], [1, 2, 3, 5, 8, 13]], [23, 21]


MODEL = ModelDrafter(WIDTH, SIZE, SIZE, apply=toy_apply, init_cache=toy_cache)
DRAFTER = CascadeDrafter((LOOKUP, MODEL))
PARAMS = None, np.random.default_rng(0).normal(size=(SIZE,) * 3).astype(np.float32)


@pytest.fixture(scope="module")
def state():
    return show(DRAFTER, DRAFTER.init(2, 96), TEXTS, params=(None, None))


def test_each_row_is_answered_by_the_first_that_has_something_to_say(state):
    """A repetitive row gets the lookup's drafts, with a one-hot distribution; another gets the
    model's.
    """
    proposal, new = propose(None, DRAFTER, PARAMS, state, LAST, WIDTH, 1.0)
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


def test_nothing_wanted_nothing_done(state):
    """No member's cache moves and nobody proposes."""
    proposal, new = propose(None, DRAFTER, PARAMS, state, LAST, 0)
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
    state = show(drafter, drafter.init(2, 96), TEXTS, params=params)
    tokens = np.array([[*text, *[0] * (80 - len(text))] for text in TEXTS], np.int32)
    cache = tiny_pair.apply(tiny_pair.target, tokens, tiny.empty_cache(2, 80))[2]
    cache = cache.commit(jnp.array([8, 6], jnp.int32))

    @jax.jit
    def run(target, params, state, cache):
        view = TargetView(target, tiny_pair.apply, cache)
        proposal, _ = drafter.propose(params, state, inputs_of(LAST, WIDTH, WIDTH, view=view))
        (seen,) = witness.seen
        assert seen is proposal.prefix.cache
        return proposal

    proposal = run(tiny_pair.target, params, state, cache)
    assert [drafter.kinds[kind].drafter for kind in proposal.kind] == ["prompt_lookup", "lookahead"]
    prefix = proposal.prefix
    assert prefix.num_layers == 0
    block = np.concatenate([np.array(LAST)[:, None], proposal.tokens], axis=1)
    np.testing.assert_array_equal(prefix.hidden, np.asarray(tiny_pair.target["embedding"])[block])
    np.testing.assert_array_equal(prefix.cache.length, cache.length)
    assert_committed_equal(prefix.cache, cache, atol=0)
    assert (np.asarray(prefix.cache.keys[0]) != np.asarray(cache.keys[0])).any()


def test_distributions_of_all_members_are_added_up():
    """Each row has one member's; certain drafts have all probability, what is no token none."""
    distribution = np.random.default_rng(0).dirichlet(np.ones(SIZE), (3, WIDTH)).astype(np.float32)
    counts = [[2, 0, 0], [0, 3, 0], [0, 0, 2]]  # of three members, by row
    tokens = jnp.asarray([[5, 6, 7], [1, 2, 3], [8, -1, 9]], jnp.int32)

    def proposal(count, has_distribution):
        is_meant = np.arange(WIDTH) < np.array(count)[:, None]
        probs = jnp.asarray(distribution * is_meant[..., None]) if has_distribution else None
        return Proposal(tokens, jnp.asarray(count, jnp.int32), probs, jnp.zeros([3], jnp.int32))

    proposals = [proposal(count, index < 2) for index, count in enumerate(counts)]
    turns = [jnp.asarray(count) > 0 for count in counts]
    merged = jax.jit(CascadeDrafter((LOOKUP,) * 3).merge)(proposals, turns, True)
    assert merged.num_tokens.tolist() == [2, 3, 2]
    expected = np.zeros([3, WIDTH, SIZE], np.float32)
    expected[0, :2], expected[1], expected[2, 0, 8] = distribution[0, :2], distribution[1], 1
    np.testing.assert_array_equal(merged.probs, expected)
