"""The lossy rules: how far lenience may stray, and the threshold of typical acceptance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.model import ModelDrafter
from jspec.sampling.noise import AcceptanceNoise
from jspec.speculation.acceptance import RuleOptions, get_rule
from jspec.speculation.types import Proposal, Temperatures
from tests.speculation.drive import Engine, settings_of
from tests.speculation.enumeration import (
    NUM_TOKENS,
    acceptance_probs,
    enumerate_paths,
    expected_accepted,
    extend,
    joint_distribution,
    next_token_probs,
    one_round,
    random_distributions,
    target_joint,
)
from tests.speculation.toys import VOCAB, make_tables, softmax, toy_apply, toy_cache


def lenient(lenience, name="lenient"):
    return get_rule(name, RuleOptions(lenience=lenience))


def distribution_pair(seed, vocab=3):
    rng = np.random.default_rng(seed)
    return [random_distributions(rng, (vocab,) * 3, zeros=0.2) for _ in range(2)]


@pytest.mark.parametrize("lenience", [0.9, 0.5, 0.1])
def test_no_token_comes_with_more_than_its_share(lenience):
    """The bound target / l at each of six positions, given what came before, over three rounds.

    Guards against a residual that is made lenient too, which has no such bound; and the
    distribution is off, or the rule would do nothing.
    """
    target, draft = distribution_pair(0)
    paths = enumerate_paths(target, draft, 2)
    emitted = one_round(lenient(lenience), paths)
    for start in [(0, 0), (1, 2)]:
        joint = joint_distribution(emitted, target, start)
        for n in range(NUM_TOKENS):
            before, distribution = (joint.sum(axis=tuple(range(m, NUM_TOKENS))) for m in (n, n + 1))
            assert (distribution <= extend(before, target, n, start) / lenience + 1e-7).all()
        assert np.abs(joint - target_joint(target, start)).sum() / 2 > 1e-3


@pytest.mark.parametrize("lenience", [1.0, 0.6, 0.2])
def test_drafts_are_kept_with_the_lenient_overlap(lenience):
    """One draft is kept with the sum of min(draft, target / l), exactly: more for a smaller l."""
    target, draft = distribution_pair(3, vocab=5)
    accepted = expected_accepted(lenient(lenience), enumerate_paths(target, draft, 1))
    expected = np.minimum(draft, target / lenience).sum(axis=-1).reshape(-1)
    np.testing.assert_allclose(accepted, expected, atol=1e-6)


def test_argmax_form_keeps_what_is_nearly_the_best():
    """The paper prints the inequality reversed: that would keep token 2 and refuse token 0."""
    target = jnp.array([[[0.5, 0.3, 0.2]] * 2] * 3 + [[[0.5, 0.25, 0.25]] * 2])
    proposal = Proposal(jnp.array([[0], [1], [2], [1]], jnp.int32), jnp.ones([4], jnp.int32))

    def kept(lenience):
        rule = lenient(lenience, "lenient_argmax")
        return acceptance_probs(rule, target, proposal)[:, 0].tolist()

    assert kept(0.5) == [1, 1, 0, 1]  # the last is exactly l · max
    assert kept(1.0) == [1, 0, 0, 0]


def test_argmax_form_is_told_the_distribution_of_temperature_one():
    """At temperature 0 the sampled distribution is one-hot, and nothing but the best would ever
    pass.
    """
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 5)), jnp.float32)
    rule = lenient(0.5, "lenient_argmax")
    distribution = jax.jit(rule.distribution)(logits, settings_of(2, 0.0))
    np.testing.assert_allclose(distribution, softmax(logits), rtol=1e-5)
    assert rule.temperatures is Temperatures.ZERO
    assert lenient(0.5).temperatures is Temperatures.POSITIVE


def test_argmax_form_decodes_within_its_bound():
    """Through the compiled loop: each token at least l times as likely as the likeliest.

    A lenience of 1 gives the greedy text itself, and less of it keeps more drafts.
    """
    tables = make_tables(seed=3)
    prompts = [[a, b] for a in range(5) for b in range(5)]
    drafter = ModelDrafter(3, VOCAB, VOCAB, apply=toy_apply, init_cache=toy_cache)

    def run(rule):
        engine = Engine(toy_apply, toy_cache, tables, drafter, rule, max_rounds=20)
        return engine.generate(prompts, max_length=22)

    distribution = softmax(tables[0])
    strict, mild = (run(lenient(lenience, "lenient_argmax")) for lenience in (1.0, 0.2))
    assert mild.tokens != strict.tokens
    assert len(mild.num_accepted) < len(strict.num_accepted)  # fewer rounds
    for result, lenience in ((strict, 1.0), (mild, 0.2)):
        for prompt, tokens in zip(prompts, result.tokens, strict=True):
            text = [*prompt, *tokens]
            for a, b, token in zip(text, text[1:], text[2:], strict=False):
                best = distribution[a, b].max()
                assert distribution[a, b, token] >= lenience * best * (1 - 1e-6)


# Typical acceptance.

ROWS, WIDTH, SIZE = 300, 3, 6


def typical(epsilon=0.3, delta=0.09):
    return get_rule("typical", RuleOptions(typical_epsilon=epsilon, typical_delta=delta))


def proposal_of(tokens):
    tokens = jnp.asarray(tokens, jnp.int32)
    return Proposal(tokens, jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32))


def random_round(rng):
    """Returns target distributions with zeros, a proposal and noise."""
    target = rng.dirichlet([0.4] * SIZE, (ROWS, WIDTH + 1))
    target[target < 0.02] = 0
    target = jnp.asarray(target / target.sum(axis=-1, keepdims=True), jnp.float32)
    noise = AcceptanceNoise(
        jnp.asarray(rng.uniform(size=(ROWS, WIDTH)), jnp.float32),
        jnp.asarray(rng.gumbel(size=(ROWS, SIZE)), jnp.float32),
    )
    return target, proposal_of(rng.integers(0, SIZE, (ROWS, WIDTH))), noise


@pytest.mark.parametrize(("epsilon", "delta"), [(0.3, 0.09), (0.1, 0.9), (1.0, 1.0)])
def test_the_threshold_is_the_papers(epsilon, delta):
    """min(epsilon, delta · exp(-H)), in nats; guards against NaN from 0 · log 0."""
    target, proposal, _ = random_round(np.random.default_rng(0))
    probs = np.asarray(target, np.float64)[:, :WIDTH]
    entropy = -np.sum(probs * np.log(np.where(probs > 0, probs, 1)), axis=-1)
    threshold = np.minimum(epsilon, delta * np.exp(-entropy))
    of_drafts = np.take_along_axis(probs, np.asarray(proposal.tokens)[..., None], 2)[..., 0]
    clear = np.abs(of_drafts - threshold) > 1e-6
    kept = np.asarray(acceptance_probs(typical(epsilon, delta), target, proposal))
    np.testing.assert_array_equal(kept[clear], (of_drafts > threshold)[clear])
    assert 0 < kept.mean() < 1


def test_just_enough_is_too_little():
    """Strictly above: guards `>=`, and so a token of probability 0 at epsilon 0."""
    target = jnp.array([[[0.25, 0.75, 0.0]] * 2], jnp.float32)
    target = jnp.repeat(target, 3, axis=0)

    def kept(rule):
        return acceptance_probs(rule, target, proposal_of([[0], [1], [2]]))[:, 0].tolist()

    assert kept(typical(0.25, 1.0)) == [0, 1, 0]
    assert kept(typical(np.nextafter(np.float32(0.25), np.float32(0)).item(), 1.0)) == [1, 1, 0]
    assert kept(typical(0.0, 1.0)) == [1, 1, 0]


def test_temperature_zero_is_the_greedy_match():
    """One-hot distributions: token for token what `greedy` says, for every noise and every
    epsilon.
    """
    rng = np.random.default_rng(1)
    target, proposal, noise = random_round(rng)
    target = jax.nn.one_hot(jnp.argmax(target, axis=-1), SIZE, dtype=jnp.float32)
    likely = jnp.argmax(target[:, :WIDTH], axis=-1).astype(jnp.int32)
    is_likely = jnp.asarray(rng.uniform(size=likely.shape) < 0.7)
    proposal = proposal.replace(tokens=jnp.where(is_likely, likely, proposal.tokens))
    greedy = jax.jit(get_rule("greedy").accept)(target, proposal, noise)
    assert 0 < float(greedy.num_accepted.mean()) < WIDTH
    for rule in (typical(), typical(0.0, 0.0), typical(1.0, 0.9)):
        verdict = jax.jit(rule.accept)(target, proposal, noise)
        np.testing.assert_array_equal(verdict.num_accepted, greedy.num_accepted)
        np.testing.assert_array_equal(verdict.next_token, greedy.next_token)


def test_the_next_token_is_drawn_from_the_target():
    """Never from a residual: after a refusal the refused draft may come again."""
    target, proposal, noise = random_round(np.random.default_rng(2))
    verdict = jax.jit(typical().accept)(target, proposal, noise)
    distributions = np.asarray(target)[np.arange(ROWS), np.asarray(verdict.num_accepted)]
    with np.errstate(divide="ignore"):
        expected = np.argmax(np.log(distributions) + np.asarray(noise.gumbel), axis=-1)
    np.testing.assert_array_equal(verdict.next_token, expected)
    np.testing.assert_array_equal(
        next_token_probs(typical(), target, proposal, verdict.num_accepted), distributions
    )
