"""A draft model that reads a text's last tokens only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.drafters.memory import tokens_read
from jspec.drafters.options import DrafterOptions
from jspec.drafters.registry import make_drafter
from jspec.generation.batch import rolled_back
from jspec.models import init_cache
from tests import tiny_models
from tests.cases import slow_unless
from tests.drafters.test_draft_vocabulary import make_spec
from tests.drafters.test_model import observe, run_propose

CONTEXT = 5
TEXT = [1 + n * n % 97 for n in range(40)]


def build(context, name="model", **options):
    """Returns the drafter over the tiny draft model, and its parameters."""
    return make_drafter(name, make_spec(draft_context=context, **options))


def after(built, text, state=None, temperature=1.0):
    """Returns proposal and state after more of a text, whose last token is the newest."""
    state = built.drafter.init(1, 64) if state is None else state
    state = observe(built.drafter, state, [text[:-1]], [len(text) - 1])
    return run_propose(built.drafter, built.params, state, np.array(text[-1:]), temperature)


@pytest.mark.parametrize(
    ("tree", "temperature"),
    [({}, 1.0), slow_unless(False, {"tree_depth": 2, "tree_branches": 1}, 0.0)],
)
def test_it_drafts_as_if_the_text_began_there(tree, temperature):
    """Guards against a slot taken for its token's place in the text."""
    recent, whole = (build(context, **tree) for context in (CONTEXT, 0))
    proposal, state = after(recent, TEXT[:20], temperature=temperature)
    expected, _ = after(whole, TEXT[20 - CONTEXT - 2 : 20], temperature=temperature)
    other, _ = after(whole, TEXT[:20], temperature=temperature)
    np.testing.assert_array_equal(proposal.tokens, expected.tokens)
    if not tree:
        np.testing.assert_allclose(proposal.probs, expected.probs, atol=1e-6)
        assert np.abs(np.asarray(proposal.probs) - np.asarray(other.probs)).max() > 1e-3
    assert state.cache.first.tolist() == [18 - CONTEXT]
    assert state.cache.end.tolist() == [19]


def test_it_reads_on_where_it_began():
    """What was not read meanwhile is: an answer that was paused may have no part of it left."""
    built = build(CONTEXT)
    _, state = after(built, TEXT[:20])
    first = state.cache.first.tolist()
    _, state = after(built, TEXT[19:23], state)
    assert state.cache.first.tolist() == first
    state = observe(built.drafter, state, [TEXT[22:36]], [14])
    assert built.drafter.lag(state, jnp.zeros(1, jnp.int32)) == tokens_read(jnp.array([14]))
    _, state = run_propose(built.drafter, built.params, state, np.array(TEXT[36:37]), 1.0)
    assert state.cache.first.tolist() == first
    assert state.cache.end.tolist() == [36]


def test_a_short_text_is_read_from_its_beginning():
    _, state = after(build(CONTEXT), TEXT[:4])
    assert (state.cache.first.tolist(), state.cache.end.tolist()) == ([0], [3])


def test_a_text_that_is_cut_short_is_read_anew():
    """A conversation's next answer is that of a fresh start, wherever the last cache began."""
    _, state = after(build(CONTEXT), TEXT[:20])
    nothing = init_cache(tiny_models.CONFIG, batch_size=1, capacity=4, dtype=jnp.float32)
    _, cut = jax.jit(rolled_back)(nothing, state, 18)
    assert (cut.cache.begin.tolist(), cut.cache.length.tolist()) == ([-1], [0])


@pytest.mark.parametrize("name", ["model", "hierarchical"])
def test_pages_are_not_shared(name):
    """Guards against a page of one text's middle given to another text's beginning."""
    assert build(0, name).drafter.has_slot_per_token
    assert not build(CONTEXT, name).drafter.has_slot_per_token


def test_a_negative_number_is_refused():
    with pytest.raises(InputError, match="draft_context"):
        DrafterOptions(draft_context=-1)
