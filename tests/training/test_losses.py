"""What drafts are trained for: values by hand, and how far chains get."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models import init_cache, make_apply
from jspec.training.model_loss import (
    LOSSES,
    LazyLogits,
    PositionMetrics,
    chain_metrics,
    compare,
    lazy_logits,
    overlap,
    position_losses,
)
from jspec.training.packing import pack
from jspec.training.target_states import target_states
from jspec.training.texts import Text
from tests import tiny

TARGET = [0.5, 0.25, 0.25]
DRAFT = [0.25, 0.5, 0.25]
# By hand: -log q(1); 0.5 log 2 + 0.25 log 0.5; 1 - (0.25 + 0.25 + 0.25).
BY_HAND = {"cross_entropy": np.log(2), "kl": 0.25 * np.log(2), "total_variation": 0.25}


def logits_of(*distributions):
    """Returns logits [1 t v] of distributions, shifted, as logits may be."""
    return jnp.log(jnp.asarray(distributions, jnp.float32))[None] + 3.0


def test_losses_are_those_computed_by_hand():
    """KL is the forward one: 0.9 log(0.9 / 0.5) + 0.1 log(0.1 / 0.5); reversed it is 0.51."""
    by_name = jax.jit(position_losses)
    losses = by_name(logits_of(DRAFT), logits_of(TARGET), jnp.ones([1, 1], jnp.int32))
    for name in LOSSES:
        np.testing.assert_allclose(losses[name], [[BY_HAND[name]]], rtol=1e-5, err_msg=name)
    draft, target = logits_of([0.5, 0.5]), logits_of([0.9, 0.1])
    kl = by_name(draft, target, jnp.zeros([1, 1], jnp.int32))["kl"]
    np.testing.assert_allclose(kl, [[0.9 * np.log(1.8) + 0.1 * np.log(0.2)]], rtol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_fall_along_their_gradients(name):
    """And a draft that says what the target says loses nothing but the text's own surprise."""
    target, tokens = logits_of(TARGET), jnp.zeros([1, 1], jnp.int32)

    def loss(logits):
        return jnp.sum(position_losses(logits, target, tokens)[name])

    logits, grad = logits_of(DRAFT), jax.jit(jax.grad(loss))
    for _ in range(200):
        logits -= 0.5 * grad(logits)
    assert loss(logits) < 0.05
    assert overlap(logits_of(TARGET), target) == pytest.approx(1, abs=1e-6)


def test_chains_end_where_a_draft_is_lost_and_where_their_text_ends():
    """Two texts in a row, the first of five places, its last one unscored; by hand."""
    is_scored = jnp.asarray([[False, True, True, True, False, True, True, False]])
    agreement = jnp.asarray([[1, 1, 1, 0, 1, 0, 1, 1]], jnp.float32)
    acceptance = jnp.asarray([[1, 0.5, 0.4, 1, 1, 0.2, 1, 1]], jnp.float32)
    metrics = chain_metrics(PositionMetrics(agreement, acceptance, agreement), is_scored, 2)
    # Begun at 1, 2, 3, 5, 6: kept 2, 1, 0, 0, 1.
    np.testing.assert_allclose(metrics["tokens_per_call"], 1 + 4 / 5, rtol=1e-6)
    sampled = (0.5 + 0.5 * 0.4) + (0.4 + 0.4) + 1 + (0.2 + 0.2) + 1
    np.testing.assert_allclose(metrics["sampled_tokens_per_call"], 1 + sampled / 5, rtol=1e-6)
    # Second steps are those at 2, 3 and 6.
    np.testing.assert_allclose(metrics["acceptance"], [3.1 / 5, 2.4 / 3], rtol=1e-6)
    np.testing.assert_allclose(metrics["agreement"], [3 / 5, 2 / 3], rtol=1e-6)


def test_places_are_compared_a_few_at_a_time():
    """As all at once would be, with padding of the vocabulary left out, gradients too."""
    rng = np.random.default_rng(0)
    shapes = [(2, 70, 4), (9, 4), (2, 70, 3), (9, 3)]
    drafts, draft_head, targets, head = (
        jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes
    )
    tokens = jnp.asarray(rng.integers(0, 7, (2, 70)), jnp.int32)

    def in_parts(draft_head):
        comparison = compare(
            LazyLogits(drafts, draft_head, tiny.CONFIG),
            LazyLogits(targets, head, tiny.CONFIG),
            tokens,
            {"kl": 2.0},
            7,
        )
        return jnp.sum(comparison.loss), comparison

    def at_once(draft_head):
        distributions = [
            jnp.einsum("btd,vd->btv", x, y)[..., :7]
            for x, y in ((drafts, draft_head), (targets, head))
        ]
        losses = position_losses(*distributions, tokens)
        return jnp.sum(2 * losses["kl"]), overlap(*distributions)

    (value, comparison), grads = jax.jit(jax.value_and_grad(in_parts, has_aux=True))(draft_head)
    by_one = jax.jit(jax.value_and_grad(at_once, has_aux=True))
    (wanted, acceptance), wanted_grads = by_one(draft_head)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(comparison.acceptance, acceptance, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grads, wanted_grads, rtol=1e-4, atol=1e-4)
    assert not np.asarray(grads)[7:].any()


def test_what_teaches_is_what_the_target_says():
    """With its scale and cap, at every token of a text."""
    config = dataclasses.replace(tiny.CONFIG, num_layers=1, logits_scale=0.4, logits_softcap=5.0)
    params = tiny.random_params(config, seed=0, std=0.4)
    text, ids = (3, 1, 4, 1, 5, 9, 2, 6), np.arange(config.vocab_size)
    rows = pack([Text((), text)], len(text))
    cache = init_cache(config, batch_size=1, capacity=len(text), dtype=jnp.float32)

    @jax.jit
    def logits(params):
        lazy = lazy_logits(config, params, rows, jnp.float32)
        states = target_states(config, params, rows, ids, (config.num_layers,))
        wanted = make_apply(config)(params, jnp.asarray([text]), cache)[0]
        return wanted, states.logits, lazy.of(lazy.hidden)

    wanted, *others = logits(params)
    for actual in others:
        np.testing.assert_allclose(actual, wanted, atol=1e-4)
