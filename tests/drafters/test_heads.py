"""Trained heads by their folders; those on the last hidden state: their chains."""

import dataclasses

import numpy as np
import pytest
import scipy.special

from jspec.common.errors import InputError
from jspec.generation.request import SamplingParams
from tests import tiny, tiny_blockwise, tiny_medusa
from tests.drafters.rows import LAST, LENGTHS, TEXT, WIDTH, build, observe, propose
from tests.speculation.drive import request_settings
from tests.tiny_heads import SAVE_HEAD

KINDS = {kind.NAME: kind for kind in (tiny_medusa, tiny_blockwise)}
USED = 50  # ids that are no padding of the target's table
# What a message calls each kind, and the drafts that a tiny head makes.
ABOUT = {
    "medusa": ("heads of Medusa; it has no medusa_num_heads", 4),
    "blockwise": ("heads of blockwise decoding; it has no blockwise_num_heads", 4),
    "lookahead": ("look-ahead embeddings; it has no lookahead_num_tokens", 4),  # of three
    "dflash": ("a head of DFlash or DSpark, with architectures among", 7),  # of eight slots
}


@pytest.mark.parametrize("name", ABOUT)
def test_there_are_no_more_drafts_than_a_head_makes(name, tmp_path):
    """Chains are cut, and the drafter's kind says so."""
    head = SAVE_HEAD[name](tmp_path / "head", tiny.CONFIG)
    for wanted in (2, 9):
        drafter = build(name, wanted, head=head).drafter
        assert drafter.num_draft_tokens == drafter.kinds[0].most == min(wanted, ABOUT[name][1])


@pytest.mark.parametrize("name", ABOUT)
def test_heads_are_asked_for(name, tmp_path):
    """And an empty folder, and heads of every other kind, are named."""
    with pytest.raises(InputError, match=f"'{name}' expects draft_head"):
        build(name)
    with pytest.raises(InputError, match=r"no config\.json in the folder; expected one with"):
        build(name, head=tmp_path)
    for foreign in SAVE_HEAD.keys() - {name}:
        SAVE_HEAD[foreign](tmp_path / foreign, tiny.CONFIG)
        with pytest.raises(InputError, match=f"expected {ABOUT[name][0]}"):
            build(name, head=tmp_path / foreign)


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture(scope="module")
def drafter(kind):
    return dataclasses.replace(kind.drafter(WIDTH), vocab_size=USED)


@pytest.fixture(scope="module")
def heads(kind, tiny_pair):
    return kind.params_for(tiny_pair)


@pytest.fixture(scope="module")
def observed(drafter, tiny_pair, heads):
    """Returns the state that has seen another number of tokens of each row, in blocks of 5."""
    return observe(tiny_pair, drafter, heads)


@pytest.fixture(scope="module")
def logits(kind, tiny_pair, heads):
    """Returns what the heads say behind each row's text, [b h v], by numpy."""
    said = []
    for row, length in enumerate(LENGTHS):
        hidden = tiny.outputs_of(tiny_pair, TEXT[row : row + 1, :length], ())
        said.append(kind.logits_of(tiny_pair, heads, np.asarray(hidden, np.float64)[0, -1]))
    said = np.stack(said)[:, :WIDTH]
    said[..., USED:] = -np.inf
    return said


def test_drafts_are_what_the_heads_say(drafter, tiny_pair, heads, observed, logits):
    """Rows of different lengths, whose last tokens came in blocks that were partly padding."""
    proposal, _ = propose(tiny_pair, drafter, heads, observed, limit=[WIDTH, 2, 0])
    np.testing.assert_array_equal(proposal.num_tokens, [WIDTH, 2, 0])
    meant = np.arange(WIDTH) < np.array([WIDTH, 2, 0])[:, None]
    np.testing.assert_array_equal(proposal.tokens[meant], logits.argmax(axis=-1)[meant])


def test_the_distribution_is_what_was_drawn_from(kind, drafter, tiny_pair, heads, observed, logits):
    """At a temperature: each head's softmax without padding, or none, where nothing is drawn."""
    proposal, _ = propose(tiny_pair, drafter, heads, observed, 0.7)
    if kind is tiny_blockwise:
        assert proposal.probs is None
        np.testing.assert_array_equal(proposal.tokens, logits.argmax(axis=-1))
    else:
        assert (np.asarray(proposal.tokens) < USED).all()
        expected = scipy.special.softmax(logits / 0.7, axis=-1)
        np.testing.assert_allclose(proposal.probs, expected, rtol=1e-3, atol=1e-6)


def test_processors_see_the_drafts_before(drafter, tiny_pair, heads, observed, logits):
    """A penalty counts the row's own drafts, and a bias takes the first head's favourite away."""
    favourite = int(logits[0, 0].argmax())
    settings = SamplingParams(presence_penalty=2.0, logit_bias={favourite: -50.0})
    settings = request_settings(settings, [[token] for token in LAST.tolist()], 61)
    proposal, _ = propose(tiny_pair, drafter, heads, observed, settings=settings)
    for row in range(len(LENGTHS)):
        processed, seen = logits[row].copy(), set()
        for place in range(WIDTH):
            processed[place, favourite] -= 50
            processed[place, list(seen)] -= 2.0
            seen.add(int(processed[place].argmax()))
            assert proposal.tokens[row, place] == processed[place].argmax()


def test_an_unsure_head_ends_the_chain(tiny_pair, kind, heads, observed, logits):
    """Where its distribution's largest probability is below the confidence, before it is drawn
    from.

    Also greedily, where the distribution that is drawn from is one-hot and thus sure of everything.
    """
    if kind is not tiny_medusa:
        pytest.skip("what is not drawn is never unsure")
    largest = scipy.special.softmax(logits, axis=-1).max(axis=-1)
    confidence = float(np.median(largest))
    drafter = dataclasses.replace(kind.drafter(WIDTH, min_confidence=confidence), vocab_size=USED)
    for temperature in (0.0, 1.0):
        proposal, _ = propose(tiny_pair, drafter, heads, observed, temperature)
        expected = np.cumprod(largest >= confidence, axis=-1).sum(axis=-1)
        np.testing.assert_array_equal(proposal.num_tokens, expected)
    assert len(set(expected.tolist())) > 1
