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


MATCHING = [name for name in RULES if get_rule(name).matches_at_zero]


@functools.partial(jax.jit, compiler_options=QUICK)
def both_methods(logits, proposal, seed):
    """Returns, by rule, the verdict of `judge`, and the rule's own by distributions."""
    zeros, verdicts = jnp.zeros([ROWS]), {}
    settings = SamplingSettings(zeros, zeros.astype(jnp.int32), zeros + 1, zeros)
    place = jnp.broadcast_to(seed, [ROWS]), jnp.full([ROWS], 7)
    for name in MATCHING:
        rule = get_rule(name)
        matched, probs = judge(rule, logits, settings, proposal, *place)
        assert probs is None
        noise = rule.noise.acceptance(*place, WIDTH, VOCAB, jnp.array(True))
        own = rule.accept(rule.distribution(logits, settings), proposal, noise)
        verdicts[name] = matched, own
    return verdicts


@functools.partial(jax.jit, compiler_options=QUICK)
def verdicts_of(target_probs, proposal, uniforms, gumbel):
    """Returns, by rule, its verdict and all probabilities."""
    results = {}
    for name in RULES:
        rule = get_rule(name)
        noise = AcceptanceNoise(uniforms, gumbel[:, 0])
        if rule.noise.is_shared:
            noise = AcceptanceNoise(None, gumbel)
        verdict = rule.accept(target_probs, proposal, noise)
        counts = jnp.minimum(verdict.num_accepted, proposal.num_tokens)
        distribution = rule.next_token_probs(target_probs, proposal, counts)
        results[name] = verdict, rule.acceptance_probs(target_probs, proposal), distribution
    return results


@pytest.mark.parametrize("vocab", [1, VOCAB])
@SETTINGS
@hypothesis.given(data=st.data())
def test_extreme_distributions_give_a_sound_verdict(vocab, data):
    """Guards against NaN, a count or token out of range, and drafts the target never says."""
    target, proposal, uniforms, gumbel = data.draw(rounds(vocab))
    results = jax.device_get(verdicts_of(target, proposal, uniforms, gumbel))
    tokens, counts = np.asarray(proposal.tokens), np.asarray(proposal.num_tokens)
    for name, (verdict, accept, distribution) in results.items():
        kept = verdict.num_accepted
        assert ((kept >= 0) & (kept <= counts)).all(), name
        assert ((verdict.next_token >= 0) & (verdict.next_token < vocab)).all(), name
        assert ((accept >= 0) & (accept <= 1)).all(), name
        assert (distribution >= 0).all(), name
        np.testing.assert_allclose(distribution.sum(axis=1), 1, atol=1e-5, err_msg=name)
        for row in range(ROWS):
            assert (target[row, range(kept[row]), tokens[row, : kept[row]]] > 0).all(), name
            assert target[row, kept[row], verdict.next_token[row]] > 0, name
        if vocab == 1:
            np.testing.assert_array_equal(kept, counts, err_msg=name)


@SETTINGS
@hypothesis.given(data=st.data())
def test_nan_in_a_row_stays_there(data):
    """Guards against an error, against a reduction that carries it to other rows, and its hiding.

    Where the distribution of the next token is NaN, there is no next token: the row is to end,
    saying so.
    """
    target, proposal, uniforms, gumbel = data.draw(rounds(VOCAB))
    spoilt = target.copy()
    spoilt[0, data.draw(st.integers(0, WIDTH))] = np.nan
    broken = proposal
    if proposal.probs is not None and data.draw(st.booleans()):
        broken = proposal.replace(probs=proposal.probs.at[0].set(np.nan))
    good, bad = (
        jax.device_get(verdicts_of(probs, drafts, uniforms, gumbel))
        for probs, drafts in ((target, proposal), (spoilt, broken))
    )
    for name in RULES:
        for ours, theirs in zip(*map(jax.tree.leaves, (good[name], bad[name])), strict=True):
            np.testing.assert_array_equal(ours[1:], theirs[1:], err_msg=name)
        verdict = bad[name][0]
        kept, token = int(verdict.num_accepted[0]), int(verdict.next_token[0])
        assert 0 <= kept <= proposal.num_tokens[0], name
        assert (token == NO_TOKEN) == np.isnan(spoilt[0, kept]).any(), name


@SETTINGS
@hypothesis.given(rounds(VOCAB))
def test_coupled_says_what_plain_decoding_draws(case):
    """Pathwise, for any distributions, drafts and noise: what is emitted is what the target
    draws.
    """
    target_probs, proposal, uniforms, gumbel = case
    verdict, *_ = verdicts_of(target_probs, proposal, uniforms, gumbel)["coupled"]
    drawn = np.asarray(jax.jit(sample)(jnp.asarray(target_probs), gumbel))
    for row, count in enumerate(np.asarray(verdict.num_accepted)):
        emitted = [*np.asarray(proposal.tokens)[row, :count], int(verdict.next_token[row])]
        assert emitted == drawn[row, : count + 1].tolist()
        wanted = min(int(proposal.num_tokens[row]), WIDTH)
        if count < wanted:  # it stops only where the draft is something else
            assert drawn[row, count] != int(proposal.tokens[row, count])


@hypothesis.given(logits=LOGITS, tokens=TOKENS, counts=COUNTS, seed=st.integers(0, 99))
@SETTINGS
def test_at_temperature_0_the_rules_match(logits, tokens, counts, seed):
    """What `judge` decides without distributions is what the rule decides with them: ties, -inf,
    NaN.

    The drafts' distributions are whatever they may be, a hot drafter's or certain.
    """
    drafts = Proposal(jnp.asarray(tokens), jnp.asarray(counts))
    weights = np.random.default_rng(seed).dirichlet(np.ones(VOCAB), (ROWS, WIDTH))
    hot = drafts.replace(probs=jnp.asarray(weights, jnp.float32))
    for proposal in (drafts, hot):
        verdicts = both_methods(logits, proposal, jnp.uint32(seed))
        for name, (matched, by_distribution) in verdicts.items():
            jax.tree.map(
                functools.partial(np.testing.assert_array_equal, err_msg=name),
                matched, by_distribution,
            )  # fmt: skip


def test_rules_match_where_that_is_known_of_them():
    """A rule that does not say so, or a lossy rule, is asked itself."""
    assert MATCHING == ["greedy", "rejection", "block", "coupled", "k_seq"]
