"""Writing a block of each row into a cache layer in C++: in place, and never on a good slot."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.kernels import attention
from jspec.kernels import library as native
from jspec.kernels.attention import TAIL, write_rows

write_rows_by_xla = write_rows.__wrapped__
pytestmark = pytest.mark.usefixtures("library")
SLOTS = 40


def overflowing(starts, num_tokens, num_slots):
    rng = np.random.default_rng(0)
    layer = rng.normal(size=(len(starts), 2, num_slots, 8))
    block = rng.normal(size=(len(starts), num_tokens, 2, 8))
    expected = layer.copy()
    for row, start in enumerate(starts):
        count = max(0, min(num_tokens, num_slots - start))
        expected[row, :, start : start + count] = block[row, :count].swapaxes(0, 1)
    return layer, block, expected


def check(write, num_tokens, starts, num_slots=SLOTS + TAIL, dtype="float32"):
    """Checks what is written before the tail, which may change; returns the program's text.

    The layer that goes in, and is not donated, stays as it was.
    """
    starts = np.array(starts, np.int32)
    leaves = overflowing(starts, num_tokens, num_slots)
    layer, block, expected = (jnp.asarray(leaf, jnp.float32) for leaf in leaves)
    layer, expected = layer.astype(dtype), expected.astype(dtype)
    program = jax.jit(lambda *operands: write(*operands))  # traced anew
    written = program(layer, block, jnp.asarray(starts))
    np.testing.assert_array_equal(written[:, :, :SLOTS], expected[:, :, :SLOTS])
    np.testing.assert_array_equal(layer, jnp.asarray(leaves[0], jnp.float32).astype(dtype))
    return program.lower(layer, block, jnp.asarray(starts)).as_text()


@pytest.mark.parametrize(
    ("dtype", "num_tokens"), [("bfloat16", 6), *(("float32", size) for size in (1, 6, TAIL))]
)
def test_each_row_is_written_at_its_own_slot_and_what_falls_behind_is_lost(dtype, num_tokens):
    """Starts at the first slot, inside, at the last, and behind it."""
    starts = [0, 11, SLOTS - 3, SLOTS - 1, SLOTS, SLOTS + 5]
    assert "jspec_write_rows" in check(write_rows, num_tokens, starts, SLOTS, dtype)


@pytest.mark.parametrize("num_tokens", [1, 6, TAIL, TAIL + 5])  # the last one by XLA's scatter
def test_what_falls_behind_the_capacity_moves_onto_no_good_slot(num_tokens):
    """By XLA, too: the tail of the layer may change, what stands before it may not."""
    text = check(write_rows_by_xla, num_tokens, [0, 11, SLOTS - 3, SLOTS - 1, SLOTS])
    assert ("stablehlo.scatter" in text) == (num_tokens > TAIL)


@pytest.mark.parametrize("starts", [[11], [SLOTS - 3], [SLOTS + 5], [3, SLOTS - 1]])
def test_what_a_gpu_writes_is_the_same(starts, monkeypatch):
    """One row by a slice, several by a scatter."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert ("stablehlo.scatter" in check(write_rows_by_xla, 6, starts)) == (len(starts) > 1)


@pytest.mark.parametrize("num_tokens", [1, TAIL, TAIL + 5])
def test_what_a_tpu_writes_is_the_same(num_tokens, monkeypatch):
    """By slices alone, as it would copy a layer to scatter into it."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(attention, "pinned", lambda layer: layer)  # this is no TPU
    starts = [0, 11, SLOTS - 3, SLOTS - 1, SLOTS, SLOTS + 30]
    assert "stablehlo.scatter" not in check(write_rows_by_xla, num_tokens, starts)


def test_a_loop_writes_in_place():
    """Guards against a copy of the whole layer for every token."""
    layer = jnp.zeros([2, 2, 200_000, 8])
    block, start = jnp.ones([2, 1, 2, 8]), jnp.array([3, 5], jnp.int32)

    def loop(layer):
        return jax.lax.fori_loop(0, 9, lambda i, layer: write_rows(layer, block, start + i), layer)

    compiled = jax.jit(loop, donate_argnums=0).lower(layer).compile()
    text = compiled.as_text()
    assert "jspec_write_rows" in text
    assert compiled.memory_analysis().temp_size_in_bytes < layer.nbytes / 100
    out = compiled(layer)
    assert out[0, 0, :, 0].sum() == out[1, 1, :, 0].sum() == 9


def test_derivatives_are_those_of_xlas_write():
    layer, block = jnp.zeros([2, 2, SLOTS, 8]), jnp.ones([2, 3, 2, 8])
    start = jnp.array([3, 5], jnp.int32)

    def loss(write, layer, block):
        return jnp.sum(
            jnp.sin(write(layer, block, start)) * jnp.arange(SLOTS, dtype=jnp.float32)[:, None]
        )

    slopes = jax.grad(loss, (1, 2))(write_rows, layer, block)
    for ours, theirs in zip(
        slopes, jax.grad(loss, (1, 2))(write_rows_by_xla, layer, block), strict=True
    ):
        np.testing.assert_allclose(ours, theirs)
    assert native.is_available()
