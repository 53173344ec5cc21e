"""Rounds in which the target's own layers draft: their text, their caches, their memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.model import ModelState
from jspec.models import make_apply
from jspec.speculation.control import Control, Kind
from jspec.speculation.round import speculative_step
from tests import layered
from tests.cases import slow_unless
from tests.layered import ALL, FIRST, SUBSET, build
from tests.speculation.drive import Engine, assert_committed_equal, emitted_in_row

WIDTH, CAPACITY = 4, 96
SEEDS = np.array([11, 22, 33, 44])
MAX_LENGTHS = [30, 41, 44, 38]
# first layers, the same when unsure of themselves, other layers, and the first behind a lookup
ENGINES = ["first", "unsure", "subset", "cascade"]
QUICK = ("first", "subset")
ROUNDING = 1e-3  # what differs in plain decoding is a tenth of it; a wrong slot is off by about 5


class Rounds(Engine):
    """An engine whose rows want as many drafts as they are told, at first all of them."""

    def start(self, prompts, **options):
        state = super().start(prompts, **options)
        return self.want(state, np.full(len(prompts), WIDTH))

    def want(self, state, numbers):
        """Returns the state of rows that want so many drafts, [b]."""
        kinds = getattr(self.drafter, "kinds", (Kind("none", 0.5, 0.5),))
        control = Control.init(len(numbers), kinds=kinds, numbers=range(WIDTH + 1))
        forced = np.repeat(np.asarray(numbers)[:, None], len(kinds), axis=1)
        return state.replace(control=control.replace(forced=jnp.asarray(forced, jnp.int32)))


@functools.cache
def make_engine(name, rule="coupled"):
    """Returns the compiled rounds with a drafter."""
    drafter, widths = {
        "plain": (None, ()),
        "first": (build(FIRST, WIDTH), ()),
        "unsure": (build(FIRST, WIDTH, draft_confidence=0.5), (1,)),
        "subset": (build(SUBSET, WIDTH), ()),
        "cascade": (build(FIRST, WIDTH, name="prompt_lookup+layer_skip"), ()),
        "all": (build(ALL, WIDTH), ()),
        "all, own cache": (build(ALL, WIDTH, is_member=True), ()),
    }[name]
    num_members = len(getattr(drafter, "members", ()))
    params = layered.params(), (None,) * num_members if num_members else None
    step = functools.partial(speculative_step, widths=widths)
    return Rounds(layered.apply, layered.empty_cache, params, drafter, rule, step=step)


@functools.cache
def plain_tokens(prompts, temperature):
    engine = make_engine("plain")
    lists = [list(prompt) for prompt in prompts]
    return engine.generate(
        lists, seeds=SEEDS, temperature=temperature, max_length=MAX_LENGTHS
    ).tokens


@pytest.mark.parametrize("temperature", [slow_unless(False, 0.0), 1.0])
@pytest.mark.parametrize("name", [slow_unless(one in QUICK, one) for one in ENGINES])
def test_text_is_plain_decodings_own(prompts, name, temperature):
    """Under the coupled rule token for token, also where it is drawn; at 0 it is greedy parity."""
    result = make_engine(name).generate(
        prompts, seeds=SEEDS, temperature=temperature, max_length=MAX_LENGTHS
    )
    assert result.tokens == plain_tokens(tuple(map(tuple, prompts)), temperature)
    proposed, accepted = result.infos.num_proposed.sum(), result.num_accepted.sum()
    assert 0 < accepted < proposed, "drafts must be both kept and refused to prove anything"


@functools.cache
def jit_fresh(layers):
    """Returns a function from texts to the cache of one pass of those layers over them."""
    call = jax.jit(make_apply(layered.CONFIG, layers))

    def prefill(texts):
        tokens = np.zeros([len(texts), CAPACITY], np.int32)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        empty = layered.empty_cache(len(texts), CAPACITY, layers)
        return call(layered.params(), jnp.asarray(tokens), empty)[2]

    return prefill


def check_caches(state, texts, layers=FIRST):
    """Asserts that the caches hold what a fresh prefill of the texts would."""
    lengths = [len(text) - 1 for text in texts]
    assert state.target_cache.length.tolist() == lengths
    assert_committed_equal(state.target_cache, jit_fresh(ALL)(texts), atol=ROUNDING)
    drafts = state.draft if isinstance(state.draft, tuple) else (state.draft,)
    states = [draft for draft in drafts if isinstance(draft, ModelState)]
    for draft in states:
        assert (np.asarray(draft.cache.length) <= lengths).all()
        assert_committed_equal(draft.cache, jit_fresh(layers)(texts), atol=ROUNDING)
    return states


@pytest.mark.parametrize("name", [slow_unless(one in QUICK, one) for one in ENGINES])
def test_caches_are_right_whatever_is_wanted(prompts, name):
    """Each round another number of each row, 0 among them; some rounds none of any row."""
    layers = SUBSET if name == "subset" else FIRST
    engine, rng = make_engine(name), np.random.default_rng(5)
    wanted = rng.integers(0, WIDTH + 1, (12, 4)) * (rng.random((12, 4)) < 0.7)
    wanted[[2, 5, 6]], wanted[-1] = 0, WIDTH
    state = engine.start(prompts, seeds=SEEDS, temperature=1.0)
    texts = [[*p, t] for p, t in zip(prompts, state.last_token.tolist(), strict=True)]
    proposed, accepted = [], []
    for numbers in wanted:
        state, infos = engine.advance(engine.want(state, numbers), 1)
        texts = [text + emitted_in_row(infos, row) for row, text in enumerate(texts)]
        states = check_caches(state, texts, layers)
        proposed.append(infos.num_proposed[0])
        accepted.append(infos.num_accepted[0])
    assert len(states) == (name in ("subset", "cascade"))
    assert (np.array(proposed) <= wanted).all()
    assert 0 < np.sum(accepted) < np.sum(proposed)
    if name in ("first", "subset"):
        np.testing.assert_array_equal(proposed, wanted)
    if name == "subset":  # asked of every row, it has caught up to all but the last draft
        missing = np.array([len(text) - 1 for text in texts]) - np.asarray(states[0].cache.length)
        assert (missing <= 1).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["all", "all, own cache"])
def test_all_layers_accept_everything(prompts, name, temperature):
    """Invariant 4. Sampled acceptance may fail where rounding differs, with odds of about 1e-6 a
    draft.

    With the shared cache nothing is computed twice, and nothing can differ at all.
    """
    result = make_engine(name, "rejection").generate(
        prompts, temperature=temperature, max_length=[80, 85, 90, 96]
    )
    np.testing.assert_array_equal(result.num_accepted, result.infos.num_proposed)
    assert len(result.num_accepted) >= 15


def num_bytes(state):
    """Returns the memory of a state."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def test_the_first_layers_need_no_memory(prompts):
    """No second cache, no copy of the text: the state is plain decoding's, byte for byte."""
    plain = num_bytes(make_engine("plain").start(prompts))
    assert num_bytes(make_engine("first").start(prompts)) == plain
    state = make_engine("subset").start(prompts)
    assert num_bytes(state) - plain == num_bytes(state.draft) > num_bytes(state.target_cache) // 2


def test_rows_end_at_the_end_of_the_cache(prompts):
    """Lockstep goes on behind a row's end, where the cache has no room: no other slot is hurt."""
    lengths = [CAPACITY, CAPACITY - 1, 60, CAPACITY]
    options = {"seeds": SEEDS, "temperature": 1.0, "max_length": lengths}
    plain = make_engine("plain").generate(prompts, **options)
    result = make_engine("first").generate(prompts, **options)
    assert result.tokens == plain.tokens
    texts = [prompt + tokens for prompt, tokens in zip(prompts, result.tokens, strict=True)]
    assert list(map(len, texts)) == lengths
    check_caches(result.state, texts)
