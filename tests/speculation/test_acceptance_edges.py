"""The rules with noise put in by hand: what no statistic can see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.sampling.distribution import NO_TOKEN
from jspec.sampling.noise import AcceptanceNoise
from jspec.speculation.acceptance import RULES, RuleOptions, chain, get_rule
from jspec.speculation.types import Proposal
from tests.speculation.enumeration import acceptance_probs, next_token_probs
from tests.speculation.rules import rule_cases

ALMOST_ONE = np.float32(1 - 2**-24)
REJECTION = get_rule("rejection")


def propose(tokens, probs=None, num_tokens=None):
    """Returns a proposal of one row."""
    count = len(tokens) if num_tokens is None else num_tokens
    return Proposal(
        tokens=jnp.array([tokens], jnp.int32),
        num_tokens=jnp.array([count], jnp.int32),
        probs=None if probs is None else jnp.array([probs], jnp.float32),
    )


def noise(uniforms, vocab, gumbel=None):
    gumbel = np.zeros(vocab) if gumbel is None else gumbel
    return AcceptanceNoise(
        jnp.array([uniforms], jnp.float32), jnp.asarray(gumbel, jnp.float32)[None]
    )


def accept(target, proposal, uniforms, rule=REJECTION, gumbel=None):
    target = jnp.array([target], jnp.float32)
    round_noise = noise(uniforms, target.shape[-1], gumbel)
    if rule.noise.is_shared:
        round_noise = AcceptanceNoise(None, jnp.zeros_like(target))
    verdict = jax.jit(rule.accept)(target, proposal, round_noise)
    return int(verdict.num_accepted[0]), int(verdict.next_token[0])


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("options", [{}, {"lenience": 0.0, "typical_epsilon": 0.0}], ids=str)
def test_a_token_of_target_probability_zero_is_refused_even_at_u_zero(name, options):
    """`<=` for `<` differs with probability 2^-23: no chi-square will ever see it."""
    target, rule = [[0.0, 1.0], [0.5, 0.5]], get_rule(name, RuleOptions(**options))
    assert accept(target, propose([0], [[1.0, 0.0]]), [0.0], rule) == (0, 1)
    assert accept(target, propose([0]), [0.0], rule) == (0, 1)


def test_a_token_of_any_probability_passes_at_u_zero():
    """An epsilon on the draft's side would forbid what the target says once in a great while."""
    target = [[1e-30, 1.0], [0.5, 0.5]]
    assert accept(target, propose([0], [[1.0, 0.0]]), [0.0])[0] == 1
    assert accept(target, propose([0]), [0.0])[0] == 1


@pytest.mark.parametrize("name", RULES)
def test_a_draft_of_probability_zero_on_both_sides_is_refused(name):
    """0 < 0 is false: no division, so no 0/0 either; and the stated probability says so too."""
    target, rule = [[0.0, 1.0], [0.5, 0.5]], get_rule(name)
    proposal = propose([0], [[0.0, 1.0]])
    assert accept(target, proposal, [0.0], rule) == (0, 1)
    assert acceptance_probs(rule, jnp.array([target]), proposal).tolist() == [[0]]


@pytest.mark.parametrize("name", ["rejection", "block", "lenient"])
def test_equal_distributions_accept_at_the_largest_uniform(name):
    """draft == target keeps every draft; an epsilon or a rounded division would refuse some."""
    probs = np.asarray(jax.nn.softmax(jnp.asarray(np.random.default_rng(0).normal(size=(3, 7)))))
    proposal = propose([0, 3], probs[:2])
    assert accept(probs, proposal, [ALMOST_ONE] * 2, get_rule(name))[0] == 2


def test_acceptance_turns_exactly_at_the_ratio():
    """target / draft = 1/2: u just below is kept, u = 1/2 is refused."""
    target, proposal = [[0.25, 0.75], [0.5, 0.5]], propose([0], [[0.5, 0.5]])
    assert accept(target, proposal, [np.nextafter(np.float32(0.5), np.float32(0))])[0] == 1
    assert accept(target, proposal, [0.5])[0] == 0
    np.testing.assert_allclose(
        acceptance_probs(REJECTION, jnp.array([target], jnp.float32), proposal), [[0.5]]
    )


def test_a_deterministic_draft_is_kept_with_the_targets_probability():
    """Its distribution is one-hot: u · 1 < target."""
    target, proposal = [[0.25, 0.75], [0.5, 0.5]], propose([0])
    assert accept(target, proposal, [np.nextafter(np.float32(0.25), np.float32(0))])[0] == 1
    assert accept(target, proposal, [0.25])[0] == 0


def test_a_deterministic_draft_leaves_the_rest_of_the_distribution_as_residual():
    """After its refusal the draft itself can no longer come."""
    target = jnp.array([[[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]]])
    distribution = next_token_probs(REJECTION, target, propose([0]), jnp.array([0]))
    np.testing.assert_allclose(distribution, [[0, 0.6, 0.4]], rtol=1e-6)


def test_without_residual_the_targets_distribution_stands_in():
    """Rounding may refuse where draft == target; 0 / 0 would draw NaN's argmax, token 0."""
    probs = [[0.0, 0.4, 0.6], [1.0, 0.0, 0.0]]
    distribution = next_token_probs(
        REJECTION, jnp.array([probs], jnp.float32), propose([1], probs[:1]), jnp.array([0])
    )
    np.testing.assert_allclose(distribution, [[0.0, 0.4, 0.6]])


def test_nothing_after_a_refusal_is_kept():
    """A later draft hangs on the refused draft, however likely it is."""
    target = [[0.0, 1.0]] + [[1.0, 0.0]] * 2
    assert accept(target, propose([0, 0], [[1.0, 0.0]] * 2), [0.0, 0.0])[0] == 0


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("num_tokens", [0, 1, 2])
def test_padding_is_never_accepted(name, num_tokens):
    """Padding drafts would pass every test here; the next token is the target's."""
    target = [[0.9, 0.1]] * 2 + [[0.2, 0.8]]
    proposal = propose([0, 0], [[0.9, 0.1]] * 2, num_tokens)
    rule = get_rule(name)
    kept, _ = accept(target, proposal, [0.0, 0.0], rule)
    assert kept == num_tokens
    distribution = next_token_probs(rule, jnp.array([target]), proposal, jnp.array([num_tokens]))
    expected = target[num_tokens]
    if name in ("greedy", "lenient_argmax"):
        expected = np.eye(2)[np.argmax(expected)]
    np.testing.assert_allclose(distribution, [expected], rtol=1e-6)


OF_ONE_UNIFORM = rule_cases(lambda rule: rule not in (get_rule("block"), get_rule("coupled")))


@pytest.mark.parametrize("name", OF_ONE_UNIFORM)
def test_acceptance_agrees_with_its_probabilities(name):
    """`accept` applies the probabilities that the enumeration of invariant 1 sums over.

    Every draft is decided by one uniform: keep iff u < probability, except within rounding. That of
    block verification, where more than one decides, is in test_block.py.
    """
    rule = OF_ONE_UNIFORM[name]
    rng = np.random.default_rng(0)
    target, draft = rng.dirichlet([0.5] * 6, (2, 500, 4)).astype(np.float32)
    proposal = Proposal(
        tokens=jnp.asarray(rng.integers(0, 6, (500, 3)), jnp.int32),
        num_tokens=jnp.asarray(rng.integers(0, 4, 500), jnp.int32),
        probs=jnp.asarray(draft[:, :3]),
    )
    uniforms = rng.uniform(size=(500, 3)).astype(np.float32)
    gumbel = rng.gumbel(size=(500, 6)).astype(np.float32)
    noise = AcceptanceNoise(jnp.asarray(uniforms), jnp.asarray(gumbel))
    verdict = jax.jit(rule.accept)(target, proposal, noise)
    probs = np.asarray(acceptance_probs(rule, target, proposal))
    kept = (uniforms < probs) & (np.arange(3) < np.asarray(proposal.num_tokens)[:, None])
    expected = np.cumprod(kept, axis=1).sum(axis=1)
    clear = (np.abs(uniforms - probs) > 1e-6).all(axis=1)
    np.testing.assert_array_equal(np.asarray(verdict.num_accepted)[clear], expected[clear])
    distribution = next_token_probs(rule, target, proposal, verdict.num_accepted)
    with np.errstate(divide="ignore"):
        expected = np.argmax(np.log(np.asarray(distribution)) + gumbel, axis=1)
    np.testing.assert_array_equal(verdict.next_token, expected)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("distribution", [None, [0.0, 0.0], [np.nan, np.nan]], ids=str)
def test_a_drafters_failure_costs_drafts_and_not_the_distribution(name, distribution):
    """NO_TOKEN among the drafts counts as the end of them, whatever distribution comes with it.

    Guards against -1 read as the last token of the vocabulary, and against a prefix before it that
    `block` would judge by a residual of NaN.
    """
    target = jnp.array([[[0.2, 0.8], [0.4, 0.6], [0.1, 0.9]]])
    probs = None if distribution is None else [[0.3, 0.7], distribution]
    rule = get_rule(name)
    failed, short = propose([0, -1], probs), propose([0, 1], probs, num_tokens=1)
    expected = acceptance_probs(rule, target, short)[0, 0]
    np.testing.assert_allclose(acceptance_probs(rule, target, failed), [[expected, 0]], rtol=1e-6)
    assert accept(target[0], failed, [0.0, 0.0], rule) == accept(target[0], short, [0.0] * 2, rule)
    distributions = [
        next_token_probs(rule, target, proposal, jnp.array([1])) for proposal in (failed, short)
    ]
    np.testing.assert_allclose(*distributions, rtol=1e-6)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("distribution", [[0.0, 0.0], [np.nan, np.nan]], ids=str)
def test_without_a_distribution_there_is_no_next_token(name, distribution):
    """A target that fails must be seen to fail: token 0 would look like an answer."""
    assert accept([[0.9, 0.1], distribution], propose([0]), [0.0], get_rule(name)) == (1, NO_TOKEN)
    assert accept([distribution, [0.9, 0.1]], propose([0]), [0.0], get_rule(name)) == (0, NO_TOKEN)


def test_greedy_needs_no_noise():
    """Drafts stay while they are the most likely token."""
    target = [[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]]
    assert accept(target, propose([1, 1]), [0.0, 0.0], get_rule("greedy")) == (1, 0)
    assert accept(target, propose([1, 0]), [0.99, 0.99], get_rule("greedy")) == (2, 1)


def test_an_unknown_rule_is_named():
    """The message lists what there is."""
    with pytest.raises(InputError, match=rf"{', '.join(RULES)}.*'zebra'"):
        get_rule("zebra")


def test_shared_noise_has_no_uniforms():
    """Guards against a rule that is handed another one's noise."""
    proposal, target = propose([0], [[1.0, 0.0]]), jnp.array([[[0.5, 0.5]] * 2])
    for name in ("rejection", "block", "lenient"):
        with pytest.raises(ValueError, match="expected independent noise"):
            get_rule(name).accept(target, proposal, AcceptanceNoise(None, jnp.zeros([1, 2, 2])))


def test_no_token_is_never_accepted():
    """Not even where the model's best token is none, as its logits are NaN."""
    proposal = propose([-1, 1])
    assert chain.count_accepted(jnp.array([[True, True]]), proposal).tolist() == [0]
