"""The rules with noise put in by hand: what no statistic can see."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.sampling.distribution import NO_TOKEN
from jspec.sampling.noise import AcceptanceNoise
from jspec.speculation.acceptance import RULES, RuleOptions, chain, get_rule
from jspec.speculation.types import Proposal
from tests.speculation.rules import rule_cases

ALMOST_ONE = np.float32(1 - 2**-24)
REJECTION = get_rule("rejection")
CASES = rule_cases(lambda rule: True)
HALF = [0.5, 0.5]


@functools.partial(jax.jit, static_argnames="rule")
def decide(rule, target, proposal, uniforms, gumbel):
    """Returns a rule's verdict, its acceptance probabilities and the next token's distribution."""
    noise = AcceptanceNoise(uniforms, gumbel)
    if rule.noise.is_shared:
        noise = AcceptanceNoise(None, jnp.broadcast_to(gumbel[:, None], target.shape))
    verdict = rule.accept(target, proposal, noise)
    distribution = rule.next_token_probs(target, proposal, verdict.num_accepted)
    return verdict, rule.acceptance_probs(target, proposal), distribution


def propose(tokens, probs=None, num_tokens=None):
    """Returns a proposal of one row, of two drafts at least: one program serves all."""
    count = len(tokens) if num_tokens is None else num_tokens
    if probs is not None:
        probs = jnp.array([[*probs, HALF][:2]], jnp.float32)
    return Proposal(jnp.array([[*tokens, 0][:2]], jnp.int32), jnp.array([count], jnp.int32), probs)


def outcome(rule, target, proposal, uniforms):
    """Returns what `decide` does for one row, whose target has some distributions of two tokens."""
    target = jnp.array([[*target, HALF, HALF][:3]], jnp.float32)
    uniforms = jnp.array([[*uniforms, 0][:2]], jnp.float32)
    return decide(rule, target, proposal, uniforms, jnp.zeros([1, 2]))


def accept(target, proposal, uniforms, rule=REJECTION):
    """Returns how many drafts are kept, and the token after them."""
    verdict = outcome(rule, target, proposal, uniforms)[0]
    return int(verdict.num_accepted[0]), int(verdict.next_token[0])


@pytest.mark.parametrize("rule", [pytest.param(rule, id=name) for name, rule in CASES.items()])
def test_a_token_of_target_probability_zero_is_refused_even_at_u_zero(rule):
    """`<=` for `<` differs with probability 2^-23: no chi-square will ever see it.

    0 < 0 is false, too: no division, so no 0/0 either; and the stated probability says so.
    """
    for probs in ([[1.0, 0.0]], [[0.0, 1.0]], None):
        proposal = propose([0], probs)
        assert accept([[0.0, 1.0]], proposal, [0.0], rule) == (0, 1)
        assert outcome(rule, [[0.0, 1.0]], proposal, [0.0])[1][0, 0] == 0


def test_a_token_of_any_probability_passes_at_u_zero():
    """An epsilon on the draft's side would forbid what the target says once in a great while."""
    for probs in ([[1.0, 0.0]], None):
        assert accept([[1e-30, 1.0]], propose([0], probs), [0.0])[0] == 1


@pytest.mark.parametrize("name", ["rejection", "block", "lenient"])
def test_equal_distributions_accept_at_the_largest_uniform(name):
    """draft == target keeps every draft; an epsilon or a rounded division would refuse some."""
    for probs in np.random.default_rng(0).dirichlet([1, 1], (10, 3)).astype(np.float32):
        proposal = propose([0, 1], probs[:2])
        assert accept(probs, proposal, [ALMOST_ONE] * 2, get_rule(name))[0] == 2


@pytest.mark.parametrize(("probs", "ratio"), [([HALF], 0.5), (None, 0.25)])
def test_acceptance_turns_exactly_at_the_ratio(probs, ratio):
    """u just below target / draft is kept, and the ratio itself is refused."""
    target, proposal = [[0.25, 0.75]], propose([0], probs)
    assert accept(target, proposal, [np.nextafter(np.float32(ratio), np.float32(0))])[0] == 1
    assert accept(target, proposal, [ratio])[0] == 0


def test_without_residual_the_targets_distribution_stands_in():
    """Rounding may refuse where draft == target; 0 / 0 would draw NaN's argmax, token 0."""
    probs = jnp.array([[[0.4, 0.6]]], jnp.float32)
    distribution = REJECTION.next_token_probs(
        jnp.repeat(probs, 3, axis=1), propose([1], probs[0]), jnp.array([0])
    )
    np.testing.assert_allclose(distribution, probs[0])


@pytest.mark.parametrize("name", RULES)
def test_padding_is_never_accepted(name):
    """Padding drafts would pass every test here; the next token is the target's."""
    target = [[0.9, 0.1]] * 2 + [[0.2, 0.8]]
    for num_tokens in range(3):
        proposal = propose([0, 0], [[0.9, 0.1]] * 2, num_tokens)
        verdict, _, distribution = outcome(get_rule(name), target, proposal, [0.0, 0.0])
        assert verdict.num_accepted == num_tokens
        expected = target[num_tokens]
        if name in ("greedy", "lenient_argmax"):
            expected = np.eye(2)[np.argmax(expected)]
        np.testing.assert_allclose(distribution[0], expected, rtol=1e-6)


OF_ONE_UNIFORM = {
    name: rule
    for name, rule in CASES.items()
    if rule not in (get_rule("block"), get_rule("coupled"))
}


@pytest.mark.parametrize("name", OF_ONE_UNIFORM)
def test_acceptance_agrees_with_its_probabilities(name):
    """`accept` applies the probabilities that the enumeration of invariant 1 sums over.

    Every draft is decided by one uniform: keep iff u < probability, except within rounding. That of
    block verification, where more than one decides, is in test_block.py.
    """
    rng = np.random.default_rng(0)
    target, draft = rng.dirichlet([0.5] * 6, (2, 500, 4)).astype(np.float32)
    proposal = Proposal(
        tokens=jnp.asarray(rng.integers(0, 6, (500, 3)), jnp.int32),
        num_tokens=jnp.asarray(rng.integers(0, 4, 500), jnp.int32),
        probs=jnp.asarray(draft[:, :3]),
    )
    uniforms = rng.uniform(size=(500, 3)).astype(np.float32)
    gumbel = rng.gumbel(size=(500, 6)).astype(np.float32)
    decided = decide(OF_ONE_UNIFORM[name], target, proposal, uniforms, gumbel)
    verdict, probs, distribution = jax.tree.map(np.asarray, decided)
    kept = (uniforms < probs) & (np.arange(3) < np.asarray(proposal.num_tokens)[:, None])
    expected = np.cumprod(kept, axis=1).sum(axis=1)
    clear = (np.abs(uniforms - probs) > 1e-6).all(axis=1)
    np.testing.assert_array_equal(verdict.num_accepted[clear], expected[clear])
    with np.errstate(divide="ignore"):
        expected = np.argmax(np.log(distribution) + gumbel, axis=1)
    np.testing.assert_array_equal(verdict.next_token, expected)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("distribution", [None, [0.0, 0.0], [np.nan, np.nan]], ids=str)
def test_a_drafters_failure_costs_drafts_and_not_the_distribution(name, distribution):
    """NO_TOKEN among the drafts counts as the end of them, whatever distribution comes with it.

    Guards against -1 read as the last token of the vocabulary, and against a prefix before it that
    `block` would judge by a residual of NaN.
    """
    target, rule = [[0.2, 0.8], [0.4, 0.6], [0.1, 0.9]], get_rule(name)
    probs = None if distribution is None else [[0.3, 0.7], distribution]
    failed, short = (
        outcome(rule, target, proposal, [0.0, 0.0])
        for proposal in (propose([0, -1], probs), propose([0, 1], probs, num_tokens=1))
    )
    assert failed[0] == short[0]
    np.testing.assert_allclose(failed[1], [[short[1][0, 0], 0]], rtol=1e-6)
    np.testing.assert_allclose(failed[2], short[2], rtol=1e-6)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("distribution", [[0.0, 0.0], [np.nan, np.nan]], ids=str)
def test_without_a_distribution_there_is_no_next_token(name, distribution):
    """A target that fails must be seen to fail: token 0 would look like an answer."""
    rule, good = get_rule(name), [0.9, 0.1]
    assert accept([good, distribution], propose([0]), [0.0], rule) == (1, NO_TOKEN)
    assert accept([distribution, good], propose([0]), [0.0], rule) == (0, NO_TOKEN)


def test_greedy_needs_no_noise():
    """Drafts stay while they are the most likely token."""
    target = [[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]]
    assert accept(target, propose([1, 1]), [0.0, 0.0], get_rule("greedy")) == (1, 0)
    assert accept(target, propose([1, 0]), [0.99, 0.99], get_rule("greedy")) == (2, 1)


def test_shared_noise_has_no_uniforms():
    """Guards against a rule that is handed another one's noise."""
    proposal, target = propose([0], [[1.0, 0.0]]), jnp.full([1, 3, 2], 0.5)
    for name in ("rejection", "block", "lenient"):
        with pytest.raises(ValueError, match="expected independent noise"):
            get_rule(name).accept(target, proposal, AcceptanceNoise(None, jnp.zeros([1, 3, 2])))


@pytest.mark.parametrize("option", ["lenience", "typical_epsilon", "typical_delta"])
@pytest.mark.parametrize("value", [-0.1, 1.01, float("nan")])
def test_options_out_of_range_are_named(option, value):
    """One clear line, and not a rule that keeps everything."""
    with pytest.raises(InputError, match=f"{option.replace('_', ' ')} from 0 to 1; got"):
        get_rule("rejection", RuleOptions(**{option: value}))


@pytest.mark.parametrize("name", ["lenient", "lenient_argmax", "typical"])
def test_equal_options_give_the_same_rule(name):
    """Guards against a recompile: programs are found again by their rule."""
    assert get_rule(name, RuleOptions()) is get_rule(name)
    assert not get_rule(name).is_lossless


def test_no_token_is_never_accepted():
    """Not even where the model's best token is none, as its logits are NaN."""
    proposal = propose([-1, 1])
    assert chain.count_accepted(jnp.array([[True, True]]), proposal).tolist() == [0]
