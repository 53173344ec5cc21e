"""Lenience: how far it may stray, and that it strays no further."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.drafters.model import ModelDrafter
from jspec.sampling.noise import AcceptanceNoise
from jspec.speculation.acceptance import RuleOptions, get_rule
from jspec.speculation.types import Proposal, Temperatures
from tests.speculation.drive import Engine, settings_of
from tests.speculation.enumeration import (
    NUM_TOKENS,
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
@pytest.mark.parametrize("seed", range(2))
def test_no_token_comes_with_more_than_its_share(seed, lenience):
    """The bound target / l at each of six positions, given what came before, over three rounds.

    Guards against a residual that is made lenient too, which has no such bound; and the
    distribution is off, or the rule would do nothing.
    """
    target, draft = distribution_pair(seed)
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


def accept(rule, target, tokens, uniforms, probs=None):
    """Returns how many drafts of one row are kept, and the next token."""
    proposal = Proposal(
        jnp.array([tokens], jnp.int32),
        jnp.array([len(tokens)], jnp.int32),
        None if probs is None else jnp.array([probs], jnp.float32),
    )
    target = jnp.array([target], jnp.float32)
    noise = AcceptanceNoise(jnp.array([uniforms], jnp.float32), jnp.zeros([1, target.shape[-1]]))
    verdict = jax.jit(rule)(target, proposal, noise)
    return int(verdict.num_accepted[0]), int(verdict.next_token[0])


def test_acceptance_turns_exactly_at_the_lenient_ratio():
    """target / (l · draft) = 1/2: u just below is kept, u = 1/2 is refused."""
    target, probs = [[0.125, 0.875], [0.5, 0.5]], [[0.5, 0.5]]
    below = np.nextafter(np.float32(0.5), np.float32(0))
    assert accept(lenient(0.5).accept, target, [0], [below], probs)[0] == 1
    assert accept(lenient(0.5).accept, target, [0], [0.5], probs)[0] == 0


def test_a_lenience_of_one_is_rejection_itself():
    """Pathwise, on 500 random rows: 1 means no lenience."""
    rng = np.random.default_rng(0)
    target, draft = rng.dirichlet([0.5] * 6, (2, 500, 4)).astype(np.float32)
    proposal = Proposal(
        jnp.asarray(rng.integers(0, 6, (500, 3)), jnp.int32),
        jnp.asarray(rng.integers(0, 4, 500), jnp.int32),
        jnp.asarray(draft[:, :3]),
    )
    noise = AcceptanceNoise(
        jnp.asarray(rng.uniform(size=(500, 3)), jnp.float32),
        jnp.asarray(rng.gumbel(size=(500, 6)), jnp.float32),
    )
    rules = lenient(1.0), get_rule("rejection"), lenient(0.5)
    verdicts = [jax.jit(rule.accept)(target, proposal, noise) for rule in rules]
    for ours, theirs in zip(*map(jax.tree.leaves, verdicts[:2]), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert verdicts[2].num_accepted.sum() > verdicts[0].num_accepted.sum()


def test_argmax_form_keeps_what_is_nearly_the_best():
    """The paper prints the inequality reversed: that would keep token 2 and refuse token 0."""
    target = [[0.5, 0.3, 0.2], [0.5, 0.25, 0.25]]
    rule = lenient(0.5, "lenient_argmax")
    assert [accept(rule.accept, target, [token], [0.0]) for token in range(3)] == [
        (1, 0), (1, 0), (0, 0),
    ]  # fmt: skip
    assert accept(rule.accept, target[1:] * 2, [1], [0.0])[0] == 1  # exactly l · max
    assert accept(lenient(1.0, "lenient_argmax").accept, target, [1], [0.0]) == (0, 0)


def test_argmax_form_is_told_the_distribution_of_temperature_one():
    """At temperature 0 the sampled distribution is one-hot, and nothing but the best would ever
    pass.
    """
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 5)), jnp.float32)
    rule = lenient(0.5, "lenient_argmax")
    distribution = rule.distribution(logits, settings_of(2, 0.0))
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
    for prompt, tokens in zip(prompts, strict.tokens, strict=True):
        text = [*prompt, *tokens]
        for a, b, token in zip(text, text[1:], text[2:], strict=False):
            assert token == distribution[a, b].argmax()
    assert mild.tokens != strict.tokens
    assert len(mild.num_accepted) < len(strict.num_accepted)  # fewer rounds
    for prompt, tokens in zip(prompts, mild.tokens, strict=True):
        text = [*prompt, *tokens]
        for a, b, token in zip(text, text[1:], text[2:], strict=False):
            assert distribution[a, b, token] >= 0.2 * distribution[a, b].max() * (1 - 1e-6)


@pytest.mark.parametrize("name", ["lenient", "lenient_argmax"])
@pytest.mark.parametrize("lenience", [-0.1, 1.01, float("nan")])
def test_a_lenience_out_of_range_is_named(name, lenience):
    """One clear line, and not a rule that keeps everything."""
    with pytest.raises(InputError, match=r"lenience from 0 to 1; got"):
        lenient(lenience, name)


@pytest.mark.parametrize("name", ["lenient", "lenient_argmax", "typical"])
def test_equal_options_give_the_same_rule(name):
    """Guards against a recompile: programs are found again by their rule."""
    assert get_rule(name, RuleOptions()) is get_rule(name)
    assert not get_rule(name).is_lossless
