"""Law 1: the sum over all drafts, verdicts and next tokens is the target's law, exactly.

The rules' probabilities are enumerated for every context of the last two tokens; rounds are then
composed in float64: the joint law of the first tokens is exact over several rounds.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.speculation.acceptance import get_rule
from jspec.speculation.types import AcceptanceRule, Proposal
from tests.speculation.toys import make_tables, softmax

VOCAB = 4
NUM_TOKENS = 6  # of the joint law
NUM_ROUNDS = 3
CONTEXTS = list(itertools.product(range(VOCAB), repeat=2))
TABLES = make_tables(seed=1, vocab=VOCAB)


def laws(temperature):
    if temperature == 0:
        return [np.eye(VOCAB)[np.argmax(np.asarray(table), axis=-1)] for table in TABLES]
    return [softmax(table, temperature) for table in TABLES]


def all_counts(context, width):
    """Returns a row's number of valid drafts, any from 0 to width, as a function of its context."""
    return (3 * context[0] + context[1]) % (width + 1)


def draft_paths(draft, context, width, kind):
    """Yields (tokens, probability of drafting them, laws of each draft) for one context."""
    for path in itertools.product(range(VOCAB), repeat=width):
        chain = [*context, *path]
        rows = np.stack([draft[chain[i], chain[i + 1]] for i in range(width)])
        if kind == "deterministic":  # the worst choice, so that most are refused
            weight = float(all(rows[i].argmin() == path[i] for i in range(width)))
        else:
            weight = np.prod([rows[i, path[i]] for i in range(width)])
        if weight > 0:
            yield path, weight, rows


def one_round(rule, target, draft, width, kind, counts_of):
    """Returns, for m = 1 .. width + 1, the probability [context, m emitted tokens] of a round."""
    cases = [
        (context, path, weight, rows)
        for context in CONTEXTS
        for path, weight, rows in draft_paths(draft, context, width, kind)
    ]
    chains = np.array([[*context, *path] for context, path, _, _ in cases])
    target_probs = jnp.asarray(target[chains[:, :-1], chains[:, 1:]], jnp.float32)
    counts = np.array([counts_of(context, width) for context, *_ in cases])
    proposal = Proposal(
        tokens=jnp.asarray(chains[:, 2:], jnp.int32),
        num_tokens=jnp.asarray(counts, jnp.int32),
        probs=None
        if kind == "deterministic"
        else jnp.asarray(np.stack([case[3] for case in cases]), jnp.float32),
    )
    accept = np.asarray(rule.acceptance_probs(target_probs, proposal), np.float64)
    accept = np.where(np.arange(width) < counts[:, None], accept, 0.0)
    weights = np.array([case[2] for case in cases])
    index = np.array([CONTEXTS.index(case[0]) for case in cases])
    emitted = {m: np.zeros((len(CONTEXTS), *[VOCAB] * m)) for m in range(1, width + 2)}
    for kept in range(width + 1):
        # The probability of exactly so many kept drafts, then the law of the token after them.
        reached = weights * np.prod(accept[:, :kept], axis=1)
        if kept < width:
            reached = reached * (1 - accept[:, kept])
        kept_counts = jnp.full(len(cases), kept, jnp.int32)
        law = np.asarray(rule.next_token_probs(target_probs, proposal, kept_counts), np.float64)
        for next_token in range(VOCAB):
            where = (index, *chains[:, 2 : 2 + kept].T, next_token)
            np.add.at(emitted[kept + 1], where, reached * law[:, next_token])
    return emitted


def joint_law(emitted, target, start):
    """Composes rounds from one context into the law of the first NUM_TOKENS tokens.

    After NUM_ROUNDS rounds, what is missing is drawn from the target.
    """
    pending = {0: np.ones(())}
    finished = np.zeros([VOCAB] * NUM_TOKENS)
    for _ in range(NUM_ROUNDS):
        after = {}
        for length, probs in pending.items():
            for m, round_probs in emitted.items():
                by_context = round_probs.reshape(VOCAB, VOCAB, *[VOCAB] * m)
                grown = extend(probs, by_context, length, start)
                extra = length + m - NUM_TOKENS
                if extra >= 0:
                    finished += grown.sum(axis=tuple(range(NUM_TOKENS, length + m)))
                else:
                    after[length + m] = after.get(length + m, 0) + grown
        pending = after
    for length, probs in pending.items():
        for n in range(length, NUM_TOKENS):
            probs = extend(probs, target, n, start)
        finished += probs
    return finished


def extend(probs, by_context, length, start):
    """Multiplies the law of `length` tokens with what follows their last two."""
    new = (1,) * (by_context.ndim - 2)
    if length == 0:
        return probs * by_context[start]
    if length == 1:
        return probs.reshape(-1, *new) * by_context[start[1]]
    return probs.reshape(*probs.shape, *new) * by_context


def target_joint(target, start):
    probs = np.ones(())
    for n in range(NUM_TOKENS):
        probs = extend(probs, target, n, start)
    return probs


def worst_error(rule, width, kind, temperatures=(1.0, 1.0), counts_of=lambda _, width: width):
    target = laws(temperatures[0])[0]
    draft = laws(temperatures[1])[1]
    emitted = one_round(rule, target, draft, width, kind, counts_of)
    errors = [
        np.abs(joint_law(emitted, target, start) - target_joint(target, start)).max()
        for start in CONTEXTS
    ]
    return max(errors)


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("kind", ["sampled", "deterministic"])
def test_rejection_is_lossless(width, kind):
    """Jointly over three rounds: a bias may appear only from the second round on."""
    assert worst_error(get_rule("rejection"), width, kind) < 1e-6


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("kind", ["sampled", "deterministic"])
def test_rows_with_fewer_drafts_are_lossless(width, kind):
    """After a row's last valid draft the target's own law applies, not the residual."""
    assert worst_error(get_rule("rejection"), width, kind, counts_of=all_counts) < 1e-6


@pytest.mark.parametrize("temperatures", [(0.7, 1.5), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0)], ids=str)
def test_a_draft_temperature_of_its_own_is_lossless(temperatures):
    """Target and draft may each be sampled or greedy, in every combination."""
    assert worst_error(get_rule("rejection"), 2, "sampled", temperatures) < 1e-6


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("kind", ["sampled", "deterministic"])
def test_greedy_is_lossless_at_temperature_zero(width, kind):
    """There, and only there, the greedy match is exact."""
    rule = get_rule("greedy")
    assert worst_error(rule, width, kind, (0.0, 1.0), counts_of=all_counts) < 1e-6
    assert worst_error(rule, width, kind, (1.0, 1.0)) > 1e-3


def _no_residual(target_probs, proposal, num_accepted):
    """The classic mistake: after a refusal, draw from the target again."""
    del proposal
    return jnp.take_along_axis(target_probs, num_accepted[:, None, None], axis=1)[:, 0]


def _residual_of_padding(target_probs, proposal, num_accepted):
    """Takes every row for full width: the residual of a draft that was never meant."""
    full = proposal.replace(num_tokens=jnp.full_like(proposal.num_tokens, proposal.width))
    return get_rule("rejection").next_token_probs(target_probs, full, num_accepted)


def _always(target_probs, proposal):
    """Keeps every draft."""
    return jnp.ones(proposal.tokens.shape, jnp.float32) + 0 * target_probs[:, :-1, 0]


@pytest.mark.parametrize(
    "change",
    [{"next_token_probs": _no_residual}, {"next_token_probs": _residual_of_padding},
     {"acceptance_probs": _always}],
    ids=["no residual", "residual of padding", "always accept"],
)  # fmt: skip
def test_wrong_rules_are_caught(change):
    """Negative controls: the enumeration would see each of these."""
    rule = get_rule("rejection")._replace(**change)
    assert isinstance(rule, AcceptanceRule)
    assert worst_error(rule, 2, "sampled", counts_of=all_counts) > 1e-3


def test_enumeration_counts_every_path():
    """Guards the tests above: one round's probabilities sum to 1 in every context."""
    target, draft = (softmax(table) for table in TABLES)
    emitted = one_round(get_rule("rejection"), target, draft, 3, "sampled", lambda _, width: width)
    total = sum(probs.reshape(len(CONTEXTS), -1).sum(axis=1) for probs in emitted.values())
    np.testing.assert_allclose(total, 1, atol=1e-6)
    assert jax.tree.leaves(emitted)[0].min() >= 0
