"""Lenience: how far it may stray, and that it strays no further."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.model import ModelDrafter
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
