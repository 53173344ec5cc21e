"""The coupled rule: speculative text is plain decoding's text, whatever drafts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.model import ModelDrafter
from jspec.drafters.prompt_lookup import PromptLookupDrafter
from jspec.sampling.distribution import sample
from jspec.sampling.noise import AcceptanceNoise, plain_noise, shared_noise
from jspec.speculation.acceptance import get_rule
from jspec.speculation.types import Proposal
from tests.cases import slow_unless
from tests.speculation.drive import Engine
from tests.speculation.toys import VOCAB, make_tables, toy_apply, toy_cache

TABLES = make_tables(seed=3)
NUM_ROWS = 100
PROMPT = [2, 0, 1, 2, 0, 3]
NUM_NEW = 24
TRUE = jnp.array(True)


@functools.cache
def run(drafter, rule="coupled"):
    """Returns the first NUM_NEW tokens of every row, and the run."""
    engine = Engine(toy_apply, toy_cache, TABLES, drafter, rule, capacity=64, max_rounds=NUM_NEW)
    max_length = len(PROMPT) + NUM_NEW
    result = engine.generate([PROMPT] * NUM_ROWS, max_length=max_length, temperature=1.2)
    return result.tokens, result


def model(width):
    return ModelDrafter(width, VOCAB, VOCAB, apply=toy_apply, init_cache=toy_cache)


@pytest.mark.parametrize(
    "drafter",
    [
        slow_unless(False, model(1)),
        model(3),
        slow_unless(False, model(7)),
        slow_unless(False, PromptLookupDrafter(3)),
    ],
    ids=["model 1", "model 3", "model 7", "prompt lookup"],
)
def test_text_does_not_depend_on_the_drafter(drafter):
    """Pathwise: for every seed the tokens are those of plain decoding."""
    plain, _ = run(None)
    drafted, result = run(drafter)
    assert drafted == plain
    assert result.num_accepted.sum() > NUM_ROWS  # and drafts were kept


def test_a_draft_of_noise_of_its_own_agrees_less():
    """Guards against drafts drawn from other noise than the target's: right, but slow."""
    coupled = get_rule("coupled")
    own_keys = get_rule("rejection").noise.draft_keys
    apart = coupled._replace(noise=coupled.noise._replace(draft_keys=own_keys))
    plain, _ = run(None)
    tokens, result = run(model(3), apart)
    assert tokens == plain
    assert result.num_accepted.mean() < 0.8 * run(model(3))[1].num_accepted.mean()


def test_shared_noise_is_that_of_plain_decoding():
    """Each position of a round, counted from the round's first."""
    seed, position = jnp.array([3, 4], jnp.uint32), jnp.array([7, 9], jnp.int32)
    block = jax.jit(shared_noise, static_argnums=(2, 3))(seed, position, 2, 11, TRUE).gumbel
    plain = jax.jit(plain_noise, static_argnums=2)
    for offset in range(3):
        expected = plain(seed, position + offset, 11, TRUE)
        np.testing.assert_array_equal(block[:, offset], expected)


def test_agreement_reaches_its_bound():
    """Draft and target agree with probability at least (1 - TV) / (1 + TV) (arXiv 2408.07978).

    Through the rule, 5,000 draws for each of 20 pairs of distributions; six standard deviations of
    margin.
    """
    rng = np.random.default_rng(0)
    rule, rows = get_rule("coupled"), 5_000
    gumbel = jax.random.gumbel(jax.random.key(0), (rows, 2, 8))

    @jax.jit
    def agreement(target, draft):
        drafts = sample(jnp.broadcast_to(draft, (rows, 8)), gumbel[:, 0])
        proposal = Proposal(drafts[:, None], jnp.ones([rows], jnp.int32))
        target_probs = jnp.broadcast_to(target, (rows, 2, 8))
        return rule.accept(target_probs, proposal, AcceptanceNoise(None, gumbel)).num_accepted

    for target, draft in rng.dirichlet([0.5] * 8, (20, 2)).astype(np.float32):
        distance = 0.5 * np.abs(target - draft).sum()
        bound = (1 - distance) / (1 + distance)
        assert agreement(target, draft).mean() > bound - 6 * 0.5 / np.sqrt(rows)
