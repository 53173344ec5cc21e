"""Pages of prompts: a row that was given them is, bit for bit, one that has read the prompt."""

import jax
import numpy as np
import pytest

from jspec.generation.batch import Batch
from jspec.generation.engine import NARROW_PROMPT
from jspec.generation.request import Request, Settings
from jspec.generation.rows import Row
from jspec.sampling.settings import Switches
from tests.tiny_models import shared_generator

CHUNK = 64
PROMPT = [1 + n % 90 for n in range(3 * CHUNK)]
LONG = [1 + n * n % 97 for n in range(8 * CHUNK - 1)]
ALL = ("none", "prompt_lookup", "model", "hierarchical", "tree")


def begin(drafter, prompt, **settings):
    """Returns a batch, and a reading of a prompt that has not begun."""
    programs = shared_generator(drafter, batch_size=2)
    batch = Batch(programs, 2, programs.max_seq_len, Switches())
    row = Row(Settings(**settings), prompt, (0,), 512)
    return batch, batch.begin(row, widest=CHUNK)


def read(batch, reading, count):
    """Reads chunks; returns their pages, each copied once its chunk was read."""
    pages = []
    for _ in range(count):
        batch.read(reading)
        pages.append(reading.copy(batch.pages))
    return pages


def leaves(state):
    """Returns copies on the host, as later programs take the state's own arrays."""
    return [np.array(leaf) for leaf in jax.tree.leaves(state)]


@pytest.mark.parametrize("drafter", ALL)
def test_pages_are_what_reading_leaves(drafter):
    """Of another request's prompt, with other settings: in float32 not a bit differs."""
    batch, other = begin(drafter, [*PROMPT[: 2 * CHUNK], 5, 6], temperature=0.0)
    pages = read(batch, other, 2)
    batch, expected = begin(drafter, PROMPT, temperature=0.9, seed=7)
    read(batch, expected, 2)
    batch, given = begin(drafter, PROMPT, temperature=0.9, seed=7)
    given.put(batch.pages, pages)
    assert given.chunk() is None, "the last one is always read"
    for reading in (expected, given):
        batch.read(reading)
        assert reading.is_done
    for one, two in zip(leaves(given.state), leaves(expected.state), strict=True):
        np.testing.assert_array_equal(one, two)


def test_any_number_of_pages_may_be_put_at_once():
    """Guards against a place or a snapshot that is off where several pages share a call."""
    for count in (3, 4, 7):
        batch, expected = begin("prompt_lookup", LONG)
        pages = read(batch, expected, count)
        batch, given = begin("prompt_lookup", LONG)
        given.put(batch.pages, pages)
        for one, two in zip(leaves(given.state), leaves(expected.state), strict=True):
            np.testing.assert_array_equal(one, two)


def test_a_page_in_the_wrong_place_is_seen():
    """The control of the test above: a page of other tokens changes the state."""
    batch, other = begin("model", [9, *PROMPT])
    pages = read(batch, other, 2)
    batch, expected = begin("model", PROMPT)
    read(batch, expected, 2)
    batch, given = begin("model", PROMPT)
    given.put(batch.pages, pages)
    pairs = zip(leaves(given.state), leaves(expected.state), strict=True)
    assert any((one != two).any() for one, two in pairs)


@pytest.mark.parametrize("drafter", ALL)
def test_a_shared_page_is_never_written(drafter):
    """Two rows go on differently from the same pages, and run: the pages stay as they were."""
    batch, first = begin(drafter, PROMPT)
    pages = read(batch, first, 2)
    before = leaves(pages)
    while not first.is_done:
        batch.read(first)
    batch.insert(0, first)
    programs = shared_generator(drafter, batch_size=2)
    second = batch.begin(
        programs.make_row(Request([*PROMPT[: 2 * CHUNK], 50, 51], Settings())), widest=CHUNK
    )
    second.put(batch.pages, pages)
    while not second.is_done:
        batch.read(second)
    batch.insert(1, second)
    for _ in range(3):
        batch.run(4)
    for one, two in zip(leaves(pages), before, strict=True):
        np.testing.assert_array_equal(one, two)


def test_what_a_drafter_has_not_read_is_not_kept():
    """A draft model reads a prompt in its first round: its empty cache is in no page."""
    batch, reading = begin("model", PROMPT)
    (page,) = read(batch, reading, 1)
    plain_batch, plain_reading = begin("none", PROMPT)
    (plain,) = read(plain_batch, plain_reading, 1)
    sizes = [sum(leaf.nbytes for leaf in one) for one in (page, plain)]
    assert sizes[1] <= sizes[0] <= sizes[1] + 8 * CHUNK


def test_chunks_cover_the_prompt_once():
    """With a widest one, wide chunks are full ones, and none is wider than it, or than 64."""
    engine = shared_generator("none").engine
    assert {width for _, width in engine.chunks(10_000)} <= {CHUNK, 256}
    for length in (1, CHUNK, NARROW_PROMPT, NARROW_PROMPT + 1, 256, 257, 1000, 1024):
        for widest in (None, 1, CHUNK, 255, 256, 10**6):
            calls = engine.chunks(length, widest=widest)
            ends = [begin + width for begin, width in calls]
            assert [begin for begin, _ in calls] == [0, *ends[:-1]]
            assert ends[-2:-1] < [length] <= ends[-1:]
            if widest is not None:
                assert all(width <= max(widest, CHUNK) for _, width in calls)
                assert all(width == CHUNK or begin + width <= length for begin, width in calls)
