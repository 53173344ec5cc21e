"""Invariants 3 and 4: caches hold the emitted prefix after any number of rounds; no draft hole."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.chain import draw_from_distribution
from jspec.drafters.hierarchical import HierarchicalParams
from jspec.drafters.model import ModelDrafter
from jspec.speculation.types import Proposal
from tests import tiny
from tests.cases import slow_unless
from tests.speculation.drive import Engine, assert_committed_equal, emitted_in_row

CAPACITY = 96
WIDTH = 4


def check_caches(engine, state, texts, fresh_cache):
    """Asserts that both caches equal a fresh prefill; `texts` end with the newest token."""
    lengths = [len(text) - 1 for text in texts]
    assert state.target_cache.length.tolist() == lengths
    draft, params = state.draft, engine.params.draft
    if isinstance(params, HierarchicalParams):
        draft, params = draft.model, params.draft
    assert draft.history.length.tolist() == lengths
    for row, text in enumerate(texts):
        assert draft.history.tokens[row, : lengths[row]].tolist() == text[:-1]
    assert_committed_equal(state.target_cache, fresh_cache(engine.params.target, texts))
    assert (np.asarray(draft.cache.end) <= lengths).all()
    firsts = draft.cache.first.tolist()
    tails = [text[first:] for text, first in zip(texts, firsts, strict=True)]
    assert_committed_equal(draft.cache, fresh_cache(params, tails))


def run_checked(engine, prompts, num_rounds, fresh_cache, **options):
    """Runs round by round, checking after each; returns accepted and proposed, [rounds b]."""
    state = engine.start(prompts, **options)
    texts = [[*p, t] for p, t in zip(prompts, state.last_token.tolist(), strict=True)]
    accepted, proposed = [], []
    for _ in range(num_rounds):
        state, infos = engine.advance(state, 1)
        texts = [text + emitted_in_row(infos, row) for row, text in enumerate(texts)]
        check_caches(engine, state, texts, fresh_cache)
        accepted.append(infos.num_accepted[0])
        proposed.append(infos.num_proposed[0])
    return np.array(accepted), np.array(proposed)


@pytest.mark.parametrize(
    ("temperature", "name"),
    [
        (0.0, "model"),
        (1.0, "model"),
        slow_unless(False, 1.0, "hierarchical"),
        slow_unless(False, 0.0, "hierarchical"),
    ],
)
def test_caches_equal_a_fresh_prefill_after_every_round(
    make_engine, tiny_pair, prompts, fresh_cache, temperature, name
):
    """Rounds with all, some and none of the drafts kept: refused ones leave nothing behind."""
    nearer = jax.tree.map(lambda a, b: 0.7 * a + 0.3 * b, tiny_pair.target, tiny_pair.draft)
    nearer = HierarchicalParams(nearer) if name == "hierarchical" else nearer
    engine = make_engine(name, WIDTH).with_params(tiny_pair.target, nearer)
    accepted, _ = run_checked(engine, prompts, 10, fresh_cache, temperature=temperature)
    assert set(accepted.flat) >= {0, 1, 2, WIDTH}


def test_caches_of_a_part_equal_a_fresh_prefill_of_that_part(
    make_engine, tiny_pair, prompts, fresh_cache
):
    """With `draft_context` below the prompts' lengths, and above one of them."""
    engine = make_engine("model", WIDTH)
    drafter = dataclasses.replace(engine.drafter, context=4)
    engine = Engine(tiny_pair.apply, tiny.empty_cache, engine.params, drafter)
    assert min(map(len, prompts)) <= 4 < max(map(len, prompts)) - 1
    accepted, _ = run_checked(engine, prompts, 8, fresh_cache, temperature=1.0)
    assert len(set(accepted.flat)) > 2


@pytest.mark.parametrize("name", ["self", slow_unless(False, "hierarchical")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_self_draft_accepts_everything_and_leaves_no_hole(
    make_engine, tiny_pair, prompts, fresh_cache, temperature, name
):
    """When all drafts are kept the last was never fed to the draft model: the draft hole.

    Sampled acceptance may fail where rounding differs, with odds of about 1e-6 a draft.
    """
    engine = make_engine(name, WIDTH)
    if name == "hierarchical":
        engine = engine.with_params(tiny_pair.target, HierarchicalParams(tiny_pair.target))
    accepted, _ = run_checked(engine, prompts, 10, fresh_cache, temperature=temperature)
    assert (accepted == WIDTH).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_self_draft_accepts_everything_for_many_rounds(make_engine, prompts, temperature):
    """Up to the limit, near which fewer drafts are proposed."""
    result = make_engine("self", WIDTH).generate(
        prompts, temperature=temperature, max_length=[80, 85, 90, 96]
    )
    np.testing.assert_array_equal(result.num_accepted, result.infos.num_proposed)
    assert len(result.num_accepted) >= 15


@dataclasses.dataclass(frozen=True)
class HoleyDrafter(ModelDrafter):
    """The natural but wrong drafter: it feeds `last` alone and counts all committed as cached."""

    def propose(self, params, state, inputs):
        last_token, _, rng_keys, settings, *_ = inputs
        cache = self._catch_up(params, state, last_token >= 0).rollback(state.history.length)
        tokens, probs, token, start = [], [], last_token, cache.length
        for i in range(self.num_draft_tokens):
            logits, _, cache = self.apply(params, token[:, None], cache)
            cache = cache.commit(jnp.ones_like(token))
            token, distribution = draw_from_distribution(logits[:, 0], settings, rng_keys[:, i])
            tokens.append(token)
            probs.append(distribution)
        tokens = jnp.stack(tokens, axis=1)
        fed = jnp.concatenate([last_token[:, None], tokens[:, :-1]], axis=1)
        num_tokens = jnp.full_like(last_token, self.num_draft_tokens)
        state = state.replace(cache=cache.rollback(start), fed=fed)
        return Proposal(tokens, num_tokens, jnp.stack(probs, axis=1)), state


def test_the_draft_hole_is_detected(tiny_pair, prompts, fresh_cache):
    """Negative control: the tests above see the hole."""
    drafter = HoleyDrafter(2, 61, 61, apply=tiny_pair.apply, init_cache=tiny.empty_cache)
    params = tiny_pair.target, tiny_pair.target
    engine = Engine(tiny_pair.apply, tiny.empty_cache, params, drafter)
    with pytest.raises(AssertionError):
        run_checked(engine, prompts, 4, fresh_cache)
    result = engine.generate(prompts, max_length=[80, 85, 90, 96])
    assert (result.num_accepted < result.infos.num_proposed).any()
