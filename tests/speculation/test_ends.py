"""Invariant 7: stop tokens and limits cut inside a block exactly where plain decoding would
stop.
"""

import jax
import numpy as np
import pytest

from tests.cases import slow_unless
from tests.speculation.drive import emitted_in_row
from tests.tiny_heads import head_cases

MAX_LENGTH = 48
HEADS = [slow_unless(False, "suffix"), slow_unless(False, "recycle"), *head_cases()]


@pytest.fixture(scope="module")
def plain(make_engine):
    return make_engine("plain")


@pytest.fixture(scope="module")
def drafted(make_engine):
    """Returns an engine whose draft is the target: blocks are full, ends inside of them."""
    return make_engine("self", 4)


@pytest.fixture(scope="module")
def text(plain, prompts):
    """Returns what plain decoding says without stops."""
    return plain.generate(prompts, max_length=MAX_LENGTH).tokens


def cut(tokens, stop):
    """Returns the tokens up to the first stop token, itself included."""
    return tokens[: tokens.index(stop) + 1] if stop in tokens else tokens


@pytest.mark.parametrize("name", ["plain", "self", "prompt_lookup", *HEADS])
def test_a_stop_token_ends_the_row_where_it_stands(make_engine, prompts, text, name):
    """As the first token after prefill, inside an accepted block, as the next token: all cut."""
    engine, num_kept = make_engine(name, 0 if name == "plain" else 4), 0
    for stop in dict.fromkeys(text[2][:9]):
        result = engine.generate(prompts, max_length=MAX_LENGTH, stop_ids=(stop, 60))
        assert result.tokens == [cut(cut(tokens, 60), stop) for tokens in text]
        assert bool(result.state.is_done.all())
        num_kept += result.num_accepted.sum()
    assert (num_kept > 0) == (name != "plain"), "without drafts that are kept nothing is cut"


def test_stops_fall_on_every_place_of_a_block(drafted, prompts, text):
    """Guards the test above: with the draft right, its nine stops meet each place of a block."""
    places = {text[2].index(stop) for stop in text[2][:9]}
    assert places >= {0, 1, 2, 3, 4, 5}  # prefill's token, four drafts, the next token
    result = drafted.generate(prompts, max_length=MAX_LENGTH)
    assert result.num_accepted[0].tolist() == [4] * 4


@pytest.mark.parametrize("name", ["plain", "self", "model", "prompt_lookup", *HEADS])
def test_max_length_cuts_inside_a_block(make_engine, prompts, text, name):
    """Every offset from 1 new token on; the row is then exactly as long as asked."""
    engine = make_engine(name, 0 if name == "plain" else 4)
    for extra in (1, 4, 8):
        new = np.array([0, 1, 2, 3]) + extra
        limits = [len(prompt) + n for prompt, n in zip(prompts, new, strict=True)]
        result = engine.generate(prompts, max_length=limits)
        assert result.tokens == [tokens[:n] for tokens, n in zip(text, new, strict=True)]
        assert bool(result.state.is_done.all())


def test_fewer_drafts_are_proposed_near_the_limit(drafted, prompts):
    """Drafts that could not be emitted count neither way."""
    result = drafted.generate(prompts, max_length=[len(prompt) + 9 for prompt in prompts])
    # 1 from prefill, then 4 drafts + 1; then room for 3 of which the last is the next token.
    assert result.infos.num_proposed.tolist() == [[4] * 4, [2] * 4]
    assert result.infos.num_tokens.tolist() == [[5] * 4, [3] * 4]


@pytest.mark.parametrize("name", ["plain", "self", "prompt_lookup", *HEADS])
def test_the_buffer_can_be_filled_to_its_last_slot(make_engine, prompts, name):
    """A verify call near the end writes past the capacity; that must not move good slots."""
    engine = make_engine(name, 0 if name == "plain" else 4)
    limits = [96, 95, 94, 93]
    result = engine.generate(prompts, max_length=limits)
    plain = make_engine("plain").generate(prompts, max_length=limits)
    assert result.tokens == plain.tokens
    assert [len(p) + len(t) for p, t in zip(prompts, result.tokens, strict=True)] == limits


@pytest.mark.parametrize("name", ["plain", "self", "prompt_lookup", *HEADS])
@pytest.mark.parametrize("by", ["limit", "stop"])
def test_done_rows_write_and_emit_nothing(make_engine, prompts, text, name, by):
    """Rounds go on for the others: a done row's tokens, counts and committed slots stay.

    A row that a stop token ended has room left, in which it must not propose.
    """
    engine = make_engine(name, 0 if name == "plain" else 4)
    if by == "limit":
        state = engine.start(prompts, max_length=[2, 12, 40, 60])
        assert state.is_done.tolist() == [True, False, False, False]
    else:
        state = engine.start(prompts, max_length=90, stop_ids=(text[0][0],))
        assert bool(state.is_done[0])
    before, done = state, np.array(state.is_done)
    assert not done.all()
    for _ in range(6):
        if done.all():
            break
        state, infos = engine.advance(before, 1)
        for row in np.flatnonzero(done):
            assert emitted_in_row(infos, row) == []
            assert infos.num_tokens[0, row] == infos.num_proposed[0, row] == 0
            assert infos.num_accepted[0, row] == 0
            assert int(state.last_token[row]) == int(before.last_token[row])
            assert bool(state.is_done[row])
            length = int(before.target_cache.length[row])
            assert int(state.target_cache.length[row]) == length
            for ours, theirs in zip(
                jax.tree.leaves((state.target_cache.keys, state.target_cache.values)),
                jax.tree.leaves((before.target_cache.keys, before.target_cache.values)),
                strict=True,
            ):
                np.testing.assert_array_equal(ours[row, :, :length], theirs[row, :, :length])
        before, done = state, np.array(state.is_done)
    assert done.sum() >= (2 if by == "limit" else 1)


def test_a_batch_that_is_done_runs_no_round(drafted, prompts):
    """The loop on the device ends by itself."""
    state = drafted.start(prompts, max_length=1)
    _, infos = drafted.advance(state, 9)
    assert len(infos.num_tokens) == 0
