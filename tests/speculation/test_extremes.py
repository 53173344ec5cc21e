"""The rules on distributions that no model should give: extreme numbers, ties, one token, NaN.

Shapes are fixed, so that each rule compiles once.
"""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from jspec.sampling.distribution import NO_TOKEN, sample
from jspec.sampling.noise import AcceptanceNoise
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.acceptance import RULES, get_rule
from jspec.speculation.round import judge
from jspec.speculation.types import Proposal
from tests.speculation.drive import QUICK

ROWS, WIDTH = 3, 3
SETTINGS = hypothesis.settings(deadline=None, max_examples=8, derandomize=True)
# Denormals and the smallest normal number, ties, certainty, and what hypothesis thinks of.
WEIGHTS = st.sampled_from([0.0, 0.0, 1e-45, 1e-40, 1.2e-38, 1e-20, 1e-8, 0.25, 0.25, 1.0, 1.0])
WEIGHTS = WEIGHTS | st.floats(0, 1, width=32)
UNIFORMS = st.sampled_from([0.0, 2**-24, 0.5, 1 - 2**-24]).map(np.float32)


def distributions(length, vocab):
    """Returns a strategy for distributions [ROWS, length, vocab]; a distribution of zeros becomes a
    sure token 0.
    """

    def normalise(weights):
        weights = weights.astype(np.float64)
        weights[..., 0] += weights.sum(axis=-1) == 0
        return (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)

    shape = (ROWS, length, vocab)
    return arrays.arrays(np.float32, shape, elements=WEIGHTS, fill=st.nothing()).map(normalise)


@st.composite
def rounds(draw, vocab):
    """Draws target distributions, a proposal and its noise."""
    width = st.integers(0, WIDTH)
    tokens = draw(arrays.arrays(np.int32, (ROWS, WIDTH), elements=st.integers(0, vocab - 1)))
    proposal = Proposal(
        jnp.asarray(tokens),
        jnp.asarray(draw(arrays.arrays(np.int32, (ROWS,), elements=width))),
        jnp.asarray(draw(distributions(WIDTH, vocab))) if draw(st.booleans()) else None,
    )
    uniforms = jnp.asarray(draw(arrays.arrays(np.float32, (ROWS, WIDTH), elements=UNIFORMS)))
    gumbel = np.random.default_rng(draw(st.integers(0, 99))).gumbel(size=(ROWS, WIDTH + 1, vocab))
    return (
        draw(distributions(WIDTH + 1, vocab)),
        proposal,
        uniforms,
        jnp.asarray(gumbel, jnp.float32),
    )


VOCAB = 5
NUMBERS = st.sampled_from([-np.inf, -np.inf, 0.0, 0.0, 1.0, 1.0, 2.0, np.nan]).map(np.float32)
LOGITS = arrays.arrays(np.float32, (ROWS, WIDTH + 1, VOCAB), elements=NUMBERS, fill=st.nothing())
TOKENS = arrays.arrays(np.int32, (ROWS, WIDTH), elements=st.integers(-1, VOCAB - 1))
COUNTS = arrays.arrays(np.int32, (ROWS,), elements=st.integers(0, WIDTH))


@functools.cache
def both_methods(name):
    """Returns (logits, proposal, seed) -> the verdict of `judge`, and the rule's own by
    distributions.
    """
    rule, zeros = get_rule(name), jnp.zeros([ROWS])
    settings = SamplingSettings(zeros, zeros.astype(jnp.int32), zeros + 1, zeros)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def call(logits, proposal, seed):
        place = jnp.broadcast_to(seed, [ROWS]), jnp.full([ROWS], 7)
        matched, probs = judge(rule, logits, settings, proposal, *place)
        assert probs is None
        noise = rule.noise.acceptance(*place, WIDTH, VOCAB, jnp.array(True))
        return matched, rule.accept(rule.distribution(logits, settings), proposal, noise)

    return call


@functools.cache
def compiled(name):
    """Returns (target_probs, proposal, uniforms, gumbel) -> verdict and all probabilities."""
    rule = get_rule(name)

    def run(target_probs, proposal, uniforms, gumbel):
        noise = AcceptanceNoise(uniforms, gumbel[:, 0])
        if rule.noise.is_shared:
            noise = AcceptanceNoise(None, gumbel)
        verdict = rule.accept(target_probs, proposal, noise)
        counts = jnp.minimum(verdict.num_accepted, proposal.num_tokens)
        distribution = rule.next_token_probs(target_probs, proposal, counts)
        return verdict, rule.acceptance_probs(target_probs, proposal), distribution

    return jax.jit(run, compiler_options=QUICK)


@pytest.mark.parametrize("name", RULES)
@SETTINGS
@hypothesis.given(data=st.data())
def test_extreme_distributions_give_a_sound_verdict(name, data):
    """Guards against NaN, a count or token out of range, and drafts the target never says."""
    vocab = data.draw(st.sampled_from([1, 5]))
    target, proposal, uniforms, gumbel = data.draw(rounds(vocab))
    verdict, accept, distribution = compiled(name)(jnp.asarray(target), proposal, uniforms, gumbel)
    kept, tokens = np.asarray(verdict.num_accepted), np.asarray(proposal.tokens)
    assert ((kept >= 0) & (kept <= np.asarray(proposal.num_tokens))).all()
    assert ((np.asarray(verdict.next_token) >= 0) & (verdict.next_token < vocab)).all()
    accept, distribution = np.asarray(accept), np.asarray(distribution)
    assert ((accept >= 0) & (accept <= 1)).all()
    assert (distribution >= 0).all()
    np.testing.assert_allclose(distribution.sum(axis=1), 1, atol=1e-5)
    for row in range(ROWS):
        for i in range(kept[row]):
            assert target[row, i, tokens[row, i]] > 0
        assert target[row, kept[row], verdict.next_token[row]] > 0
    if vocab == 1:
        np.testing.assert_array_equal(kept, proposal.num_tokens)


@pytest.mark.parametrize("name", RULES)
@SETTINGS
@hypothesis.given(data=st.data())
def test_nan_in_a_row_stays_there(name, data):
    """Guards against an error, against a reduction that carries it to other rows, and its hiding.

    Where the distribution of the next token is NaN, there is no next token: the row is to end,
    saying so.
    """
    target, proposal, uniforms, gumbel = data.draw(rounds(5))
    spoilt = target.copy()
    spoilt[0, data.draw(st.integers(0, WIDTH))] = np.nan
    broken = proposal
    if proposal.probs is not None and data.draw(st.booleans()):
        broken = proposal.replace(probs=proposal.probs.at[0].set(np.nan))
    good, bad = (
        jax.tree.map(np.asarray, compiled(name)(jnp.asarray(t), p, uniforms, gumbel))
        for t, p in ((target, proposal), (spoilt, broken))
    )
    for ours, theirs in zip(jax.tree.leaves(good), jax.tree.leaves(bad), strict=True):
        np.testing.assert_array_equal(ours[1:], theirs[1:])
    kept, token = int(bad[0].num_accepted[0]), int(bad[0].next_token[0])
    assert 0 <= kept <= proposal.num_tokens[0]
    assert (token == NO_TOKEN) == np.isnan(spoilt[0, kept]).any()


@SETTINGS
@hypothesis.given(rounds(5))
def test_coupled_says_what_plain_decoding_draws(case):
    """Pathwise, for any distributions, drafts and noise: what is emitted is what the target
    draws.
    """
    target_probs, proposal, uniforms, gumbel = case
    verdict, *_ = compiled("coupled")(target_probs, proposal, uniforms, gumbel)
    drawn = np.asarray(jax.jit(sample)(jnp.asarray(target_probs), gumbel))
    for row, count in enumerate(np.asarray(verdict.num_accepted)):
        emitted = [*np.asarray(proposal.tokens)[row, :count], int(verdict.next_token[row])]
        assert emitted == drawn[row, : count + 1].tolist()
        wanted = min(int(proposal.num_tokens[row]), WIDTH)
        if count < wanted:  # it stops only where the draft is something else
            assert drawn[row, count] != int(proposal.tokens[row, count])


@pytest.mark.parametrize("name", ["greedy", "rejection", "block", "k_seq", "coupled"])
@hypothesis.given(logits=LOGITS, tokens=TOKENS, counts=COUNTS, seed=st.integers(0, 99))
@SETTINGS
def test_at_temperature_0_the_rules_match(name, logits, tokens, counts, seed):
    """What `judge` decides without distributions is what the rule decides with them: ties, -inf,
    NaN.

    The drafts' distributions are whatever they may be, a hot drafter's or certain.
    """
    drafts = Proposal(jnp.asarray(tokens), jnp.asarray(counts))
    weights = np.random.default_rng(seed).dirichlet(np.ones(VOCAB), (ROWS, WIDTH))
    hot = drafts.replace(probs=jnp.asarray(weights, jnp.float32))
    for proposal in (drafts, hot):
        matched, by_distribution = both_methods(name)(
            jnp.asarray(logits), proposal, jnp.uint32(seed)
        )
        np.testing.assert_array_equal(matched.num_accepted, by_distribution.num_accepted)
        np.testing.assert_array_equal(matched.next_token, by_distribution.next_token)


def test_rules_match_where_that_is_known_of_them():
    """A rule that does not say so, or a lossy rule, is asked itself."""
    lossless = "greedy", "rejection", "block", "k_seq", "coupled"
    assert all(get_rule(name).matches_at_zero for name in lossless)
    for name in ("typical", "lenient_argmax", "lenient"):
        assert not get_rule(name).matches_at_zero
