"""Counts of n-grams against plain Python: the choice, the chain, the window and the sampled
distribution.
"""

import collections
import dataclasses

import hypothesis
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from jspec.drafters.ngram import NgramDrafter
from jspec.lab.analysis.goodness import goodness_of_fit
from jspec.sampling.settings import Processor, Switches
from tests.drafters.test_prompt_lookup import CAPACITY, as_history, propose_after
from tests.speculation import drive
from tests.speculation.drive import drafts_of, settings_of

WIDTH, VOCAB, BATCH = 4, 5, 4
FALSE_ALARM = 1e-6

# Windows longer than the capacity, shorter than the text, and shorter than the context.
DRAFTERS = [
    NgramDrafter(WIDTH, VOCAB, VOCAB, min_order=min_order, max_order=max_order, window=window)
    for min_order, max_order, window in ((2, 4, 64), (3, 4, 9), (2, 2, 3))
]


def reference_counts(drafter, committed, drafts):
    """Returns the order and the counts, {token: (count, last place)}, of the longest context."""
    window, text = committed[-drafter.window :], [*committed, *drafts]
    for order in range(drafter.max_order, drafter.min_order - 1, -1):
        context, actual = text[len(text) - order + 1 :], collections.defaultdict(lambda: (0, 0))
        for begin in range(len(window) - order + 1):
            if window[begin : begin + order - 1] == context:
                token = window[begin + order - 1]
                actual[token] = (actual[token][0] + 1, begin)
        if actual:
            return order, dict(actual)
    return 0, {}


def reference_drafts(drafter, text, limit=WIDTH):
    """Returns the most frequent continuations, one after another."""
    drafts = []
    while len(drafts) < limit:
        _, actual = reference_counts(drafter, text, drafts)
        if not actual:
            break
        drafts.append(max(actual, key=lambda token: actual[token]))
    return drafts


def propose(drafter, rows, *, temperature=0.0, limit=WIDTH, seed=0, switches=None):
    """Returns the proposal for texts, the last token of each not yet committed."""
    settings, states = settings_of(len(rows), temperature), ()
    if switches is not None:
        states = tuple(jnp.zeros([len(rows), 1]) for _ in switches.processors)
        settings = settings.replace(switches=switches, states=states)
    seeds = np.arange(seed, seed + len(rows))
    return propose_after(drafter, rows, settings=settings, seeds=seeds, limit=limit)


texts = st.lists(st.integers(0, 2), min_size=1, max_size=CAPACITY)
batches = st.lists(texts, min_size=BATCH, max_size=BATCH)


@hypothesis.settings(deadline=None, max_examples=60, derandomize=True)
@hypothesis.given(rows=batches, drafter=st.sampled_from(DRAFTERS), limit=st.integers(0, WIDTH))
def test_drafts_equal_plain_counting(rows, drafter, limit):
    """Three letters, so that every order, many ties and many counts occur."""
    proposal = propose(drafter, rows, limit=limit)
    assert proposal.probs is None, "drafts that follow from the text have a one-hot distribution"
    assert drafts_of(proposal) == [reference_drafts(drafter, text, limit) for text in rows]
    orders = [reference_counts(drafter, text, [])[0] for text in rows]
    kinds = [max(order - drafter.min_order, 0) for order in orders]
    assert proposal.kind.tolist() == kinds


SAMPLED = NgramDrafter(WIDTH, VOCAB, VOCAB, min_order=2, max_order=3, window=20, is_sampled=True)


def distribution_of(counts, temperature):
    """Returns counts as probabilities, sharpened by the temperature; of equals the smallest id."""
    distribution = np.zeros(VOCAB)
    for token, (count, _) in counts.items():
        distribution[token] = count ** (1 / temperature) if temperature else count
    if not temperature:
        distribution = 1.0 * (np.arange(VOCAB) == distribution.argmax())
    return distribution / max(distribution.sum(), 1)


@hypothesis.settings(deadline=None, max_examples=60, derandomize=True)
@hypothesis.given(
    rows=batches, temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]), seed=st.integers(0, 1000)
)
def test_the_reported_distribution_is_the_counts(rows, temperature, seed):
    """At every draft, given those before it; the row ends where nothing was counted."""
    proposal = propose(SAMPLED, rows, temperature=temperature, seed=seed)
    probs = np.asarray(proposal.probs)
    for row, drafts in enumerate(drafts_of(proposal)):
        for i, token in enumerate(drafts):
            _, counts = reference_counts(SAMPLED, rows[row], drafts[:i])
            expected = distribution_of(counts, temperature)
            np.testing.assert_allclose(probs[row, i], expected, rtol=1e-5, atol=1e-7)
            assert expected[token] > 0
        if len(drafts) < WIDTH:
            assert reference_counts(SAMPLED, rows[row], drafts) == (0, {})


TEXT = [2, 1, 0, 2, 1, 3, 2, 0, 0, 2, 1, 0, 4, 2]  # shorter than the window


def joint_distribution(temperature):
    """Returns the distribution of the first two drafts after TEXT, [v v]."""
    distribution = np.zeros([VOCAB, VOCAB])
    first = distribution_of(reference_counts(SAMPLED, TEXT, [])[1], temperature)
    for token in np.flatnonzero(first):
        second = distribution_of(reference_counts(SAMPLED, TEXT, [int(token)])[1], temperature)
        distribution[token] = first[token] * second
    return distribution


def test_draws_follow_the_reported_distribution():
    """20,000 rows; one false alarm in a million. A place is drawn, a distribution of tokens
    reported.

    Negative control: draws of another temperature are refused.
    """
    temperature, counts = 0.5, np.zeros([VOCAB, VOCAB])
    proposal = propose(SAMPLED, [TEXT] * 20_000, temperature=temperature)
    assert (proposal.num_tokens >= 2).all()
    np.add.at(counts, tuple(np.asarray(proposal.tokens[:, :2]).T), 1)
    assert goodness_of_fit(counts, joint_distribution(temperature)).p_value > FALSE_ALARM
    assert goodness_of_fit(counts, joint_distribution(1.2 * temperature)).p_value < FALSE_ALARM


def test_draws_do_not_depend_on_the_capacity():
    """A neighbour's long prompt makes room for more tokens, and must not change the noise."""
    drawn = []
    for room in (0, 9):
        history = as_history([TEXT[:-1]] * 64)
        history = history.replace(tokens=jnp.pad(history.tokens[:, :14], ((0, 0), (0, room))))
        last, seeds = [TEXT[-1]] * 64, np.arange(64)
        actual, _ = drive.propose(None, SAMPLED, None, history, last, WIDTH, 1.0, seeds=seeds)
        drawn.append(actual.tokens.tolist())
    assert drawn[0] == drawn[1]
    assert len({tuple(row) for row in drawn[0]}) > 2


def processor(change):
    """Returns the switches of a processor that changes the logits, given the tokens' ids."""
    return Switches(processors=(Processor(
        "change", lambda settings: True, init=lambda *_, **__: None,
        apply=lambda _, logits: change(jnp.arange(VOCAB), logits),
        update=lambda state, token: state,
    ),))  # fmt: skip


def test_a_distribution_of_forbidden_tokens_only_is_no_distribution():
    """The row proposes nothing, rather than NaN or a token that cannot be kept."""
    rows = [[1, 0, 1], [3, 4, 3], TEXT, [2]]
    forbid = processor(lambda ids, logits: jnp.where(ids == 0, -jnp.inf, logits))
    for temperature in (0.0, 1.0):
        actual = propose(SAMPLED, rows, temperature=temperature, switches=forbid)
        drafts = drafts_of(actual)
        assert drafts[0] == drafts[3] == []
        assert drafts[1] == [4, 3, 4, 3]
        assert drafts[2]
        assert 0 not in drafts[2]
        assert (np.asarray(actual.tokens) >= 0).all()


def test_a_processor_adds_no_token_to_what_was_counted():
    """Guards against a draft that the distribution it is reported with cannot give."""
    add = processor(lambda ids, logits: jnp.where(ids == 4, 1.0, logits))
    rows = [[1, 0, 1, 0, 1], *[[1, 2, 1, 3, 1]] * 3]
    actual = propose(SAMPLED, rows, temperature=1.0, switches=add)
    meant = np.arange(WIDTH) < np.asarray(actual.num_tokens)[:, None]
    probs = np.asarray(actual.probs)[meant]
    assert meant[:, 0].all()
    assert (probs[:, 4] == 0).all()
    np.testing.assert_allclose(probs.sum(axis=-1), 1, rtol=1e-5)


def test_an_unsure_row_stops_before_it_draws():
    """`draft_confidence` holds for this drafter, too."""
    sure = dataclasses.replace(SAMPLED, min_confidence=0.9)
    rows = [[1, 2, 1, 2, 1], [1, 2, 1, 3, 1], [0], [1, 2, 1, 2, 1]]
    assert [len(d) for d in drafts_of(propose(sure, rows, temperature=1.0))] == [4, 0, 0, 4]
