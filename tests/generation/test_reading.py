"""Snapshots and pages: a row that was given them is, bit for bit, one that has read the prompt."""

import jax
import numpy as np
import pytest

from jspec.generation.paged_batch import PagedBatch
from jspec.generation.request import SamplingParams
from jspec.generation.rows import Row
from jspec.kernels.product import ChunkWidths
from jspec.sampling.settings import Switches
from tests.cases import slow_unless
from tests.tiny_models import shared_generator

CHUNK = 64
PROMPT = [1 + n % 90 for n in range(3 * CHUNK)]
ALL = [
    slow_unless(name == "model", name)
    for name in ("none", "prompt_lookup", "model", "hierarchical", "tree")
]
FIRST, SECOND = ([1, 2, 3, 4], [1, 2, 3, 4]), ([1, 2, 5, 6], [5, 6, 7, 8])  # pages


def make(drafter):
    generator = shared_generator(drafter, batch_size=2)
    compiled = generator.engine, generator.params, generator.compile_notice
    return PagedBatch(*compiled, 2, generator.max_seq_len, Switches())


def begin(batch, prompt, snapshots=(), pages=FIRST, **settings):
    row = Row(SamplingParams(**settings), prompt, (0,), 200)
    # A drafter without a cache has no pages.
    pages = [
        pages_of_part[: table.shape[1]]
        for pages_of_part, table in zip(pages, batch.tables, strict=True)
    ]
    return batch.begin_in(row, pages, CHUNK, snapshots)


def read(batch, reading, count):
    """Reads chunks; returns their snapshots, each copied once its chunk was read."""
    snapshots = []
    for _ in range(count):
        chunk = reading.next_chunk
        batch.read(reading)
        snapshots.append(batch.snapshot(reading, *chunk))
    return snapshots


def leaves(state):
    """Returns copies on the host, as later programs take the state's own arrays."""
    return [np.array(leaf) for leaf in jax.tree.leaves(state)]


def pages_of(batch, numbers):
    return [np.array(leaf[np.array(numbers)]) for leaf in jax.tree.leaves(batch._layers[0])]


def assert_same(ones, others):
    for left, right in zip(ones, others, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("drafter", ALL)
def test_snapshots_are_what_reading_leaves(drafter):
    """Of another request's prompt, with other settings: in float32 not a bit differs."""
    batch = make(drafter)
    snapshots = read(batch, begin(batch, [*PROMPT[: 2 * CHUNK], 5, 6], temperature=0.0), 2)
    expected = begin(batch, PROMPT, pages=([5, 4, 3], []), temperature=0.9, seed=7)
    read(batch, expected, 2)
    batch.read(expected)
    tokens = pages_of(batch, [5, 4, 3])
    given = begin(batch, PROMPT, snapshots, ([1, 2, 6], []), temperature=0.9, seed=7)
    assert given.next_chunk == (2 * CHUNK, CHUNK)
    batch.read(given)
    assert expected.is_done
    assert given.is_done
    for reading in (expected, given):
        reading.state = reading.state.replace(
            target_cache=reading.state.target_cache.replace(table=0)
        )
    assert_same(leaves(given.state), leaves(expected.state))
    assert_same(pages_of(batch, [1, 2, 6]), tokens)


def test_a_snapshot_in_the_wrong_place_is_seen():
    """The control of the test above: a snapshot of other tokens changes the state."""
    batch = make("model")
    snapshots = read(batch, begin(batch, [9, *PROMPT]), 2)
    expected = begin(batch, PROMPT)
    read(batch, expected, 2)
    given = begin(batch, PROMPT, snapshots)
    pairs = zip(leaves(given.state), leaves(expected.state), strict=True)
    assert any((left != right).any() for left, right in pairs)


@pytest.mark.parametrize("drafter", ALL)
def test_a_shared_page_is_never_written(drafter):
    """Two rows go on differently from the same pages, and run: the pages stay as they were."""
    batch = make(drafter)
    first = begin(batch, PROMPT[: 2 * CHUNK + 20])
    snapshots = read(batch, first, 2)
    before = pages_of(batch, [1, 2])
    batch.read(first)
    batch.insert(0, first)
    second = begin(batch, [*PROMPT[: 2 * CHUNK], 50, 51], snapshots, SECOND)
    batch.read(second)
    batch.insert(1, second)
    for _ in range(3):
        batch.run(4)
    assert_same(pages_of(batch, [1, 2]), before)
    assert any((left != right).any() for left, right in zip(
        pages_of(batch, [3]), pages_of(batch, [5]), strict=True
    ))  # fmt: skip


def test_a_row_that_is_done_writes_into_no_page():
    """Its pages may be another's by then; while it runs it does write them."""
    batch, held = make("model"), [1, 2, 3, 4]
    for row, pages in enumerate((([1, 2, 3, 4],) * 2, ([5, 6, 7, 8],) * 2)):
        reading = begin(batch, PROMPT[:20], pages=pages)
        batch.read(reading)
        batch.insert(row, reading)
    begun = pages_of(batch, held)
    batch.run(2)
    before = pages_of(batch, held)
    assert any((left != right).any() for left, right in zip(begun, before, strict=True))
    batch.finish(0)
    batch.run(4)
    assert_same(pages_of(batch, held), before)


def test_what_a_drafter_has_not_read_is_not_kept():
    """A draft model reads a prompt in its first round: its empty cache is in no snapshot."""
    sizes = []
    for drafter in ("model", "none"):
        batch = make(drafter)
        (snapshot,) = read(batch, begin(batch, PROMPT), 1)
        sizes.append(sum(leaf.nbytes for leaf in snapshot))
    assert sizes[1] <= sizes[0] <= sizes[1] + 8 * CHUNK


@pytest.mark.parametrize("widths", [ChunkWidths(64, 256, 129), ChunkWidths(16, 64, 49)])
def test_chunks_cover_the_prompt_once(monkeypatch, widths):
    """With a limit, wide chunks are full ones, and none but a narrow one is wider than it."""
    engine = shared_generator("none").engine
    monkeypatch.setattr(engine, "_widths_of_chunks", widths)
    narrow, wide, fewest = widths
    assert engine.widths_of(fewest - 1) == {narrow}
    assert engine.widths_of(fewest) == {wide}
    assert engine.widths_of(10 * wide + 1) == {narrow, wide}
    for length in (1, narrow, fewest - 1, fewest, wide, wide + 1, 1000, 1024):
        for widest in (None, 1, narrow, wide - 1, wide, 10**6):
            calls = engine.chunks(length, widest=widest)
            ends = [begin + width for begin, width in calls]
            assert [begin for begin, _ in calls] == [0, *ends[:-1]]
            assert ends[-2:-1] < [length] <= ends[-1:]
            if widest is not None:
                assert all(width <= max(widest, narrow) for _, width in calls)
                assert all(width == narrow or begin + width <= length for begin, width in calls)
