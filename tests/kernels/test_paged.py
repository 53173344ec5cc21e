"""Attention and writes through a table: bit for bit those without pages, wherever the pages lie."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.kernels import PAGE, attend, paged

# batch, tokens, heads, key/value heads, pages of a row, dimensions
SHAPES = [(1, 1, 9, 3, 4, 64), (2, 6, 8, 2, 3, 32), (3, 70, 4, 2, 11, 128), (2, 5, 6, 1, 2, 8)]
BY_XLA = {name: inspect.unwrap(getattr(paged, name)) for name in ("attend_pages", "write_pages")}


def in_pages(rows, seed, spoilt=np.nan):
    """Returns rows [b k s h] in pages in any order, among others that hold rubbish; a table."""
    b, k, s, h = rows.shape
    table = np.random.default_rng(seed).permutation(2 * b * s // PAGE)[: b * s // PAGE]
    table = table.reshape(b, -1).astype(np.int32)
    pages = np.full((2 * b * s // PAGE, k, PAGE, h), spoilt, np.float32)
    pages[table] = np.asarray(rows, np.float32).reshape(b, k, -1, PAGE, h).swapaxes(1, 2)
    return jnp.asarray(pages, rows.dtype), jnp.asarray(table)


def draw(shape, dtype):
    """Returns queries, keys, values, and what each query may see; the rest is NaN."""
    b, t, n, k, m, h = shape
    rng, s = np.random.default_rng(0), m * PAGE
    queries = jnp.asarray(3 * rng.normal(size=(b, t, n, h)) / np.sqrt(h), jnp.float32)
    ends = rng.integers(1, s - t + 1, b)[:, None] + np.arange(t)
    visible = np.arange(s) < ends[:, :, None]
    keys, values = (rng.normal(size=(b, k, s, h)) for _ in range(2))
    for leaf in (keys, values):
        leaf[np.broadcast_to(~visible[:, -1, None, :, None], leaf.shape)] = np.nan
    return queries, jnp.asarray(keys, dtype), jnp.asarray(values, dtype), jnp.asarray(visible)


@pytest.mark.parametrize(
    ("dtype", "shape"), [*(("bfloat16", shape) for shape in SHAPES), ("float32", SHAPES[1])]
)
def test_attention_is_that_of_a_cache_without_pages(shape, dtype):
    """In C++ and, where that does not attend, in JAX: whatever other pages and free slots hold."""
    queries, keys, values, visible = draw(shape, dtype)
    clean = [jnp.nan_to_num(leaf) for leaf in (keys, values)]
    expected = jax.jit(attend)(queries, *clean, visible)
    for seed in range(2):
        pages, table = in_pages(keys, seed)
        operands = queries, pages, in_pages(values, seed)[0], visible, table
        for function in (paged.attend_pages, BY_XLA["attend_pages"]):
            np.testing.assert_array_equal(jax.jit(function)(*operands), expected)


def test_another_page_is_seen():
    """The control of the test above: a table that names another row's page changes the result."""
    queries, keys, values, visible = draw(SHAPES[1], "float32")
    pages, table = in_pages(keys, 0)
    operands = queries, pages, in_pages(values, 0)[0], visible
    expected = paged.attend_pages(*operands, table)
    assert (paged.attend_pages(*operands, table[::-1]) != expected).any()


@pytest.mark.parametrize("by", ["write_pages", "xla"])
@pytest.mark.parametrize("num_tokens", [1, 6, PAGE + 9])
def test_a_block_is_written_over_the_edges_of_pages(by, num_tokens):
    """From the first page, an edge, the last slot, and after it: what falls there is lost."""
    write = BY_XLA["write_pages"] if by == "xla" else paged.write_pages
    rng, starts = (
        np.random.default_rng(0),
        np.array([3, PAGE - 2, 2 * PAGE - 1, 2 * PAGE], np.int32),
    )
    rows = jnp.asarray(rng.normal(size=(4, 2, 2 * PAGE, 8)), jnp.bfloat16)
    block = jnp.asarray(rng.normal(size=(4, num_tokens, 2, 8)), jnp.float32)
    pages, table = in_pages(rows, 0, spoilt=7)
    written = np.asarray(jax.jit(write)(pages, block, jnp.asarray(starts), table), np.float32)
    for row, start in enumerate(starts.tolist()):
        expected = np.asarray(rows[row], np.float32)
        new = block[row].astype(jnp.bfloat16).astype(jnp.float32).swapaxes(0, 1)
        count = min(num_tokens, 2 * PAGE - start)
        expected[:, start : start + count] = new[:, :count]
        slots = written[table[row]].swapaxes(0, 1).reshape(expected.shape)
        np.testing.assert_array_equal(slots, expected)
    others = np.delete(written, np.asarray(table).ravel(), axis=0)
    assert (others == 7).all(), "a page of nobody here was written"
