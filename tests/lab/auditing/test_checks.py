"""The audit's checks of single facts: edges, seeds, greedy parity, where two answers part."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters import spec as shipped
from jspec.generation.logits_after import make_logits_after
from jspec.lab.auditing.checks import (
    check_edges,
    check_parity,
    check_seeds,
    parting_gap,
    run_checks,
)
from jspec.lab.auditing.controls import keeping_all
from jspec.lab.auditing.rows import build_drafter
from jspec.models import init_cache, make_apply
from jspec.sampling.distribution import sample
from jspec.speculation.acceptance import RULES, RuleOptions, coupled, get_rule, rejection
from jspec.speculation.acceptance.chain import (
    count_accepted,
    draft_probs_of_drafts,
    probs_of_drafts,
)
from jspec.speculation.types import Verdict
from tests.cases import slow_unless
from tests.lab.auditing.subjects import PROMPTS, SETTINGS, make_subject
from tests.tiny import one_program
from tests.tiny_eagle import save_head
from tests.tiny_models import CONFIG, target

_MAX_NEW_TOKENS = 12
_LOGITS = np.array([0.0, 2.0, 1.5, -1.0])


@pytest.mark.parametrize("rule", ["rejection", "coupled"])  # whose noise differs
def test_edges_of_lossless_rules_pass(rule):
    """A draft of target probability 0 is rejected at u = 0."""
    check = check_edges(get_rule(rule))
    assert check.has_passed, check.detail


def accept_at_the_edge(target_probs, proposal, noise):
    """`<=` in the place of `<`."""
    threshold = noise.uniforms * draft_probs_of_drafts(proposal)
    num_accepted = count_accepted(threshold <= probs_of_drafts(target_probs, proposal), proposal)
    distribution = rejection.next_token_probs(target_probs, proposal, num_accepted)
    return Verdict(num_accepted, sample(distribution, noise.gumbel))


def accept_whatever_comes(target_probs, proposal, noise):
    """A coupled rule that does not look at the target."""
    return coupled.accept(target_probs, proposal, noise).replace(num_accepted=proposal.num_tokens)


@pytest.mark.parametrize(
    ("rule", "accept"), [("rejection", accept_at_the_edge), ("coupled", accept_whatever_comes)]
)
def test_edges_of_wrong_rules_fail(rule, accept):
    """What differs once in 2^24 draws; both kinds of draft are named."""
    check = check_edges(get_rule(rule)._replace(accept=accept, tree=None))
    assert not check.has_passed
    assert len(check.data["accepted"]) == 2


@pytest.mark.parametrize(
    ("rule", "drafter"),
    [
        ("coupled", "prompt_lookup"),
        slow_unless(False, "block", "model"),
        slow_unless(False, "coupled", "model"),
    ],
)
def test_seeds_and_greedy_parity_pass(rule, drafter):
    """In a batch, with other chunking, and under the coupled rule with other drafters.

    Those are not asked for a draft temperature, which they do not read.
    """
    settings = dataclasses.replace(SETTINGS, draft_temperature=0.5 if drafter == "model" else None)
    subject = make_subject(rule, drafter, settings=settings)
    seeds = check_seeds(subject, PROMPTS, _MAX_NEW_TOKENS)
    assert seeds.has_passed, seeds.detail
    assert set(seeds.data) >= {"in a batch", "other chunking"}
    assert ("plain" in seeds.data) == (rule == "coupled")
    parity = check_parity(subject, "float32", PROMPTS, _MAX_NEW_TOKENS)
    assert parity.has_passed, parity.detail
    assert parity.data["gaps"] == []


def test_plain_decoding_is_asked_for_nothing_that_it_does_not_read():
    """A number of drafts and a lenience are the subject's drafter's alone."""
    lenient = make_subject("lenient_argmax", rule_options=RuleOptions(lenience=0.2))
    assert lenient.generator(drafter="none").num_draft_tokens == 0


@pytest.mark.slow
def test_a_rule_that_accepted_nothing_was_not_audited():
    """Guards against "lossless" for a rule whose acceptance no row has come upon."""

    def refuse(target_probs, proposal, noise):
        return get_rule("rejection").accept(
            target_probs, proposal.replace(num_tokens=jnp.zeros_like(proposal.num_tokens)), noise
        )

    RULES["refuse"] = lambda options: get_rule("rejection")._replace(
        accept=refuse, matches_at_zero=False
    )
    try:
        checks = list(run_checks(make_subject("refuse"), num_rows=64, max_new_tokens=4))
    finally:
        del RULES["refuse"]
    (drafts,) = (check for check in checks if check.name == "drafts")
    assert not drafts.has_passed
    assert drafts.data["num_proposed"] > 0


def noise_by_row(seed, position, width, vocab_size, is_random):
    """Noise that depends on the row's place in the batch."""
    rows = jnp.arange(seed.shape[0], dtype=jnp.uint32)
    noise = get_rule("rejection").noise.acceptance
    return noise(seed + rows, position, width, vocab_size, is_random)


def test_seeds_of_noise_that_depends_on_the_row_fail(monkeypatch):
    """Negative control: right distributions, and a text that depends on the neighbours."""
    right = get_rule("rejection")
    wrong = right._replace(noise=right.noise._replace(acceptance=noise_by_row))
    monkeypatch.setitem(RULES, "by row", lambda options: wrong)
    check = check_seeds(make_subject("by row"), PROMPTS, _MAX_NEW_TOKENS)
    assert not check.has_passed
    assert check.data["in a batch"] > 0
    assert check.data["other chunking"] == 0


def test_parity_of_a_rule_that_keeps_everything_fails(monkeypatch):
    """Negative control: the gaps tell that it is no rounding."""
    monkeypatch.setitem(RULES, "all", lambda options: keeping_all(get_rule("rejection")))
    check = check_parity(make_subject("all"), "float32", PROMPTS, _MAX_NEW_TOKENS)
    assert not check.has_passed
    assert max(check.data["gaps"]) > 0.01


def test_the_head_that_comes_with_jspec_need_not_be_named(monkeypatch, tmp_path):
    """Guards against an audit of the default drafter that ends where its rows are compiled."""
    subject = make_subject(drafter="prompt_lookup+eagle")
    save_head(tmp_path / "head", subject.target.config)
    monkeypatch.setattr(shipped, "_FOLDER", tmp_path)
    monkeypatch.setitem(shipped._HEADS, ("eagle", subject.target.name), "head")
    assert build_drafter(subject).params[1] is not None


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([1, 2], [1, 2], None),
        ([1, 1, 3], [1, 2, 3], 0.5),
        ([2], [3], 3.0),  # neither is the best: the worse one counts
        ([1, 2], [1], math.inf),
        ([], [1], math.inf),
    ],
)
def test_the_first_difference_is_found(left, right, expected):
    """Guards against an excuse for a token that is far from the best, or for a lost end."""
    assert parting_gap([5], left, right, lambda _: _LOGITS) == expected


def test_the_logits_are_those_before_the_difference():
    """Guards against a look one token early or late, with the prompt forgotten."""
    seen = []

    def logits_after(token_ids):
        seen.append(token_ids)
        return _LOGITS

    parting_gap([5, 6], [1, 2, 3], [1, 2, 0], logits_after)
    assert seen == [[5, 6, 1, 2]]


@pytest.mark.parametrize("length", [1, 129])
def test_padding_changes_nothing(length):
    """Guards against logits of a padding token."""
    tokens = np.random.default_rng(length).integers(1, CONFIG.vocab_size, length).tolist()
    cache = init_cache(CONFIG, batch_size=1, capacity=length, dtype=jnp.float32)
    apply = one_program(make_apply(CONFIG))
    expected = apply(target().params, jnp.array([tokens]), cache)[0][0, -1]
    np.testing.assert_allclose(make_logits_after(target())(tokens), expected, atol=1e-4)
