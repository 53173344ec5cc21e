"""Heads on the last hidden state: their chains, what they remember, and parity."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from jspec.common.errors import InputError
from jspec.drafters import DrafterOptions, DrafterSpec, make_drafter
from jspec.generation.request import SamplingParams
from tests import tiny, tiny_blockwise, tiny_medusa
from tests.drafters.rows import LENGTHS, WIDTH, observe
from tests.speculation.drive import propose, request_settings
from tests.tiny_heads import SAVE_HEAD

KINDS = {kind.NAME: kind for kind in (tiny_medusa, tiny_blockwise)}


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture(scope="module")
def heads(kind, tiny_pair):
    return kind.params_for(tiny_pair)


@pytest.fixture(scope="module")
def observed(kind, tiny_pair, heads):
    """Returns the state that has seen another number of tokens of each row, in blocks of 5."""
    return observe(tiny_pair, kind.drafter(WIDTH), heads)


@pytest.fixture(scope="module")
def logits(kind, tiny_pair, heads, text):
    """Returns what the heads say behind each row's text, [b h v], by numpy."""
    said = []
    for row, length in enumerate(LENGTHS):
        hidden = tiny.outputs_of(tiny_pair, text[row : row + 1, :length], ())
        said.append(kind.logits_of(tiny_pair, heads, np.asarray(hidden, np.float64)[0, -1]))
    return np.stack(said)[:, :WIDTH]


def test_drafts_are_what_the_heads_say(kind, tiny_pair, heads, observed, last, logits):
    """Rows of different lengths, whose last tokens came in blocks that were partly padding."""
    drafter = kind.drafter(WIDTH)
    proposal, _ = propose(tiny_pair, drafter, heads, observed, last, [WIDTH, 2, 0])
    np.testing.assert_array_equal(proposal.num_tokens, [WIDTH, 2, 0])
    meant = np.arange(WIDTH) < np.array([WIDTH, 2, 0])[:, None]
    np.testing.assert_array_equal(proposal.tokens[meant], logits.argmax(axis=-1)[meant])


def test_the_distribution_is_what_was_drawn_from(kind, tiny_pair, heads, observed, last, logits):
    """At a temperature: each head's softmax, or none, where nothing is drawn."""
    drafter = kind.drafter(WIDTH)
    proposal, _ = propose(tiny_pair, drafter, heads, observed, last, [WIDTH] * 3, 0.7)
    if kind is tiny_blockwise:
        assert proposal.probs is None
        np.testing.assert_array_equal(proposal.tokens, logits.argmax(axis=-1))
    else:
        expected = scipy.special.softmax(logits / 0.7, axis=-1)
        np.testing.assert_allclose(proposal.probs, expected, rtol=1e-3, atol=1e-6)


def test_processors_see_the_drafts_before(kind, tiny_pair, heads, observed, last, logits):
    """A penalty counts the row's own drafts, and a bias takes the first head's favourite away."""
    favourite = int(logits[0, 0].argmax())
    settings = SamplingParams(presence_penalty=2.0, logit_bias={favourite: -50.0})
    settings = request_settings(settings, [[one] for one in last.tolist()], 61)
    drafter = kind.drafter(WIDTH)
    limit = [WIDTH] * 3
    proposal, _ = propose(tiny_pair, drafter, heads, observed, last, limit, settings=settings)
    for row in range(len(LENGTHS)):
        processed, seen = logits[row].copy(), set()
        for place in range(WIDTH):
            processed[place, favourite] -= 50
            processed[place, list(seen)] -= 2.0
            seen.add(int(processed[place].argmax()))
            assert proposal.tokens[row, place] == processed[place].argmax()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_unsure_head_ends_the_chain(tiny_pair, last, kind, heads, observed, logits, temperature):
    """Where its distribution's largest probability is below the confidence, before it is drawn
    from.

    Also greedily, where the distribution that is drawn from is one-hot and thus sure of everything.
    """
    if kind is not tiny_medusa:
        pytest.skip("what is not drawn is never unsure")
    largest = scipy.special.softmax(logits, axis=-1).max(axis=-1)
    confidence = float(np.median(largest))
    drafter = kind.drafter(WIDTH, min_confidence=confidence)
    proposal, _ = propose(tiny_pair, drafter, heads, observed, last, [WIDTH] * 3, temperature)
    expected = np.cumprod(largest >= confidence, axis=-1).sum(axis=-1)
    np.testing.assert_array_equal(proposal.num_tokens, expected)
    assert len(set(expected.tolist())) > 1


def spec_of(folder, num_draft_tokens=3):
    """Returns what the drafter of a folder is built from."""
    options = DrafterOptions(draft_head=None if folder is None else str(folder))
    return DrafterSpec(num_draft_tokens, tiny.CONFIG, 61, None, jnp.float32, options=options)


def test_there_are_no_more_drafts_than_heads(kind, tmp_path):
    """Four heads make chains of four."""
    kind.save_head(tmp_path / "head", tiny.CONFIG)
    for wanted, got in ((2, 2), (7, 4)):
        drafter = make_drafter(kind.NAME, spec_of(tmp_path / "head", wanted)).drafter
        assert drafter.num_draft_tokens == got
        assert drafter.kinds[0].most == got


def test_heads_are_asked_for(kind, tmp_path):
    """And an empty folder, and heads of every other kind, are named."""
    with pytest.raises(InputError, match=f"'{kind.NAME}' expects draft_head"):
        make_drafter(kind.NAME, spec_of(None))
    with pytest.raises(InputError, match=r"no config\.json in the folder; expected one with heads"):
        make_drafter(kind.NAME, spec_of(tmp_path))
    for foreign in SAVE_HEAD.keys() - {kind.NAME}:
        SAVE_HEAD[foreign](tmp_path / foreign, tiny.CONFIG)
        with pytest.raises(InputError, match=rf"expected .*; it has no {kind.NAME}_num_heads"):
            make_drafter(kind.NAME, spec_of(tmp_path / foreign))


def test_the_padding_of_a_vocabulary_is_never_proposed(kind, tiny_pair, heads, observed, last):
    """Ids that no tokenizer has, at the end of the target's table."""
    used = 20
    drafter = dataclasses.replace(kind.drafter(WIDTH), vocab_size=used)
    proposal, _ = propose(tiny_pair, drafter, heads, observed, last, [WIDTH] * 3, 1.0)
    assert (np.asarray(proposal.tokens) < used).all()
    if proposal.probs is not None:
        assert (np.asarray(proposal.probs)[..., used:] == 0).all()
