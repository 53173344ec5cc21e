"""Invariant 1: the sum over all drafts, verdicts and next tokens is the target's distribution,
exactly.

Jointly over three rounds, for every kind of draft distribution, to 1e-6: what float32 leaves. The
coupled rule is not here: its text is that of plain decoding, token for token (test_coupled.py).
"""

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jspec.sampling.distribution import sampling_probs
from jspec.sampling.noise import INDEPENDENT
from jspec.sampling.settings import Switches
from jspec.speculation.acceptance import RuleOptions, block, chain, get_rule, rejection
from jspec.speculation.types import Temperatures
from tests.cases import slow_unless
from tests.speculation.drive import settings_of
from tests.speculation.enumeration import (
    all_counts,
    as_float32,
    enumerate_paths,
    kept_probs,
    random_distributions,
    truncated,
    worst_error,
    worst_error_of,
)
from tests.speculation.rules import rule_cases
from tests.speculation.toys import make_tables, softmax

VOCAB = 4
TABLES = make_tables(seed=1, vocab=VOCAB)


def is_enumerated(rule):
    """Returns whether a rule claims to be lossless, at every temperature and with its own noise."""
    is_any = rule.temperatures is Temperatures.ANY
    return rule.is_lossless and is_any and rule.noise is INDEPENDENT


LOSSLESS = rule_cases(is_enumerated)
KINDS = ["sampled", "deterministic", "one-hot"]
TOLERANCE = 1e-6
VISIBLE = 1e-3  # a wrong rule's error, at least


def distributions(temperature):
    """Returns target and draft distributions at a temperature."""
    if temperature == 0:
        return [np.eye(VOCAB)[np.argmax(np.asarray(table), axis=-1)] for table in TABLES]
    return [as_float32(softmax(table, temperature)) for table in TABLES]


def error(rule, width, kind, temperatures=(1.0, 1.0), **options):
    """Returns the worst error over the toy tables."""
    if isinstance(rule, str):
        rule = LOSSLESS.get(rule) or get_rule(rule)
    target, draft = distributions(temperatures[0])[0], distributions(temperatures[1])[1]
    return worst_error(rule, target, draft, width, kind, **options)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LOSSLESS)
def test_rules_are_lossless(name, kind, width):
    """Guards against a bias, also one that appears only from the second round on."""
    assert error(name, width, kind) < TOLERANCE


@pytest.mark.parametrize("kind", ["sampled", "deterministic"])
@pytest.mark.parametrize("name", LOSSLESS)
def test_rows_with_fewer_drafts_are_lossless(name, kind):
    """After a row's last valid draft the target's own distribution applies, not the residual."""
    assert error(name, 3, kind, counts_of=all_counts) < TOLERANCE


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_drafter_that_stops_when_unsure_is_lossless(name):
    """Guards against a number of drafts that depends on the drafts before: `block` looks ahead."""
    paths = enumerate_paths(distributions(1.0)[0], distributions(1.0)[1], 3, stop_below=0.7)
    counts = np.asarray(paths.proposal.num_tokens).reshape(VOCAB**2, -1)
    assert (counts.min(axis=1) < counts.max(axis=1)).any()
    assert error(name, 3, "sampled", stop_below=0.7) < TOLERANCE


@pytest.mark.parametrize(
    "temperatures",
    [(0.7, 1.5), (1.0, 0.0), (0.0, 1.0)],
    ids=str,
)
@pytest.mark.parametrize("name", LOSSLESS)
def test_a_draft_temperature_of_its_own_is_lossless(name, temperatures):
    """Target and draft may each be sampled or greedy, in every combination."""
    assert error(name, 2, "sampled", temperatures) < TOLERANCE


@pytest.mark.parametrize("name", LOSSLESS)
def test_drafts_cut_by_filters_of_their_own_are_lossless(name):
    """The target is not cut: what the draft can no longer say comes from the residual.

    Negative control: drafts of the cut distribution, reported as if they had not been cut.
    """
    top_k, top_p = (jnp.full(VOCAB, value) for value in (3, 0.8))
    settings = settings_of(VOCAB, 1.0).replace(
        top_k=top_k.astype(jnp.int32), top_p=top_p, switches=Switches(top_k=True, top_p=True)
    )
    target, whole = distributions(1.0)
    draft = as_float32(sampling_probs(TABLES[1], settings))
    assert ((draft == 0) & (target > 0)).any()
    assert worst_error(LOSSLESS[name], target, draft, 2) < TOLERANCE
    paths, uncut = (enumerate_paths(target, probs, 2) for probs in (draft, whole))
    proposal = paths.proposal.replace(probs=uncut.proposal.probs)
    assert worst_error_of(LOSSLESS[name], target, paths._replace(proposal=proposal)) > VISIBLE


def distribution_pair(relation, seed, vocab):
    """Returns target and draft distributions with exact zeros that stand in some relation."""
    rng = np.random.default_rng(seed)
    target = random_distributions(rng, (vocab,) * 3, zeros=0.3)
    draft = random_distributions(rng, (vocab,) * 3, zeros=0.3)
    if relation == "equal":
        draft = target
    if relation == "truncated draft":
        draft = truncated(draft, 2)
    if relation == "truncated target":
        target = truncated(target, 2)
    if relation == "disjoint":
        draft = np.where(target > 0, 0, 1.0)
        draft /= np.maximum(draft.sum(axis=-1, keepdims=True), 1)
        draft = as_float32(np.where(draft.sum(axis=-1, keepdims=True) > 0, draft, target))
    return target, draft


RELATIONS = ["any", "equal", "truncated draft", "truncated target", "disjoint"]


@pytest.mark.parametrize("name", LOSSLESS)
@hypothesis.settings(deadline=None, max_examples=12, derandomize=True)
@hypothesis.given(
    relation=st.sampled_from(RELATIONS),
    seed=st.integers(0, 2**32 - 1),
    counts_of=st.sampled_from([all_counts, lambda _, width: width]),
)
def test_random_distributions_with_zeros_are_lossless(name, relation, seed, counts_of):
    """Guards against 0 / 0, and against drafts that one of the two sides can never say."""
    target, draft = distribution_pair(relation, seed, vocab=3)
    assert worst_error(LOSSLESS[name], target, draft, 3, counts_of=counts_of) < TOLERANCE


@pytest.mark.parametrize("relation", [slow_unless(r in ("any", "disjoint"), r) for r in RELATIONS])
@pytest.mark.parametrize("name", LOSSLESS)
def test_six_tokens_are_lossless(name, relation):
    """A larger vocabulary has room for distributions that overlap in part only."""
    target, draft = distribution_pair(relation, seed=5, vocab=6)
    assert worst_error(LOSSLESS[name], target, draft, 2) < TOLERANCE


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_a_draft_distribution_equal_to_the_targets_keeps_everything(name):
    """Guards against a rounding error or an epsilon that refuses good drafts (invariant 4)."""
    target, draft = distribution_pair("equal", seed=2, vocab=4)
    paths = enumerate_paths(target, draft, 3)
    kept = kept_probs(LOSSLESS[name], paths)[paths.weights > 0]
    np.testing.assert_array_equal(kept[:, 3], 1)


@pytest.mark.parametrize("kind", ["sampled", "deterministic"])
@pytest.mark.parametrize("name", ["greedy", "typical"])
def test_rules_that_are_exact_at_temperature_zero(name, kind):
    """There, and only there, the greedy match and its relatives are exact."""
    assert error(name, 3, kind, (0.0, 1.0), counts_of=all_counts) < TOLERANCE
    assert error(name, 3, kind, (1.0, 1.0)) > VISIBLE


def test_no_lenience_is_lossless():
    """A lenience of 1 changes nothing; the default does."""
    assert error(get_rule("lenient", RuleOptions(lenience=1.0)), 2, "sampled") < TOLERANCE
    assert error("lenient", 2, "sampled") > VISIBLE


def no_residual(target_probs, proposal, num_accepted):
    """The classic mistake: after a refusal, draw from the target again."""
    del proposal
    return chain.probs_after(target_probs, num_accepted)


def residual_of_padding(target_probs, proposal, num_accepted):
    """Takes every row for full width: the residual of a draft that was never meant."""
    full = proposal.replace(num_tokens=jnp.full_like(proposal.num_tokens, proposal.width))
    return rejection.next_token_probs(target_probs, full, num_accepted)


def always(target_probs, proposal):
    """Keeps every draft."""
    del target_probs
    return jnp.ones(proposal.tokens.shape, jnp.float32)


@pytest.mark.parametrize(
    "change",
    [{"next_token_probs": no_residual}, {"next_token_probs": residual_of_padding},
     {"acceptance_probs": always}],
    ids=["no residual", "residual of padding", "always accept"],
)  # fmt: skip
def test_wrong_rejection_is_caught(change):
    """Negative controls: the enumeration would see each of these."""
    rule = get_rule("rejection")._replace(**change)
    assert error(rule, 2, "sampled", counts_of=all_counts) > VISIBLE


def weight_for_good_probability(target_probs, proposal):
    """Takes p_i for h_i: prefixes are then kept too often."""
    weights = block.prefix_weights(target_probs, proposal)[:, 1:]
    is_real = jnp.arange(proposal.width) < proposal.num_tokens[:, None]
    return block.longest_probs(jnp.where(is_real, weights, 0.0))


@pytest.mark.parametrize(
    "change",
    [{"next_token_probs": rejection.next_token_probs},
     {"acceptance_probs": weight_for_good_probability},
     {"acceptance_probs": block.good_prefix_probs}],
    ids=["residual without p", "p for h", "the first bad prefix ends it"],
)  # fmt: skip
def test_wrong_block_verification_is_caught(change):
    """Negative controls: the mistakes that one can make in reading the algorithm."""
    assert error(get_rule("block")._replace(**change), 3, "sampled") > VISIBLE
