"""Kernels rounded to Q4_0 and Q8_0: what other readers of these formats read, and how exact."""

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jspec.kernels import PackedKernel
from jspec.kernels.packed import as_in_file, unpack
from jspec.weights.gguf import load_gguf
from jspec.weights.quantize import quantize_blocks
from tests.weights.toys import GGUF_CONFIG, random_tensors, write_gguf

_KINDS = gguf.GGMLQuantizationType
_FORMATS = {"q4_0": _KINDS.Q4_0, "q8_0": _KINDS.Q8_0}


def _weights(shape, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * np.exp(rng.normal(size=(shape[0], 1)))).astype(np.float32)


def _rounded(weights, kind):
    """Returns the weights [o i] of a kernel rounded to blocks."""
    kernel = quantize_blocks(jnp.asarray(weights), kind, "float32")
    return np.asarray(unpack(kernel.strips, kind))[: len(weights)], kernel


@pytest.mark.parametrize("kind", _FORMATS)
def test_gguf_reads_the_same_weights(kind):
    """Guards against halves of a block swapped, codes without their offset, a scale's two bytes."""
    weights = _weights((21, 96))
    rounded, kernel = _rounded(weights, kind)
    blocks = np.asarray(as_in_file(kernel.strips, kind)).reshape(32, -1)[:21]
    np.testing.assert_array_equal(gguf.quants.dequantize(blocks, _FORMATS[kind]), rounded)
    assert (kernel.shape, kernel.kind, kernel.dtype) == ((21, 96), kind, jnp.float32)


def test_the_best_of_several_scales_beats_the_usual_one():
    """Guards against a search that does nothing; gguf's scale is the one that clips no weight."""
    weights = _weights((64, 256))
    usual = gguf.quants.dequantize(gguf.quants.quantize(weights, _KINDS.Q4_0), _KINDS.Q4_0)
    error, usual_error = (
        np.mean((x - weights) ** 2) for x in (_rounded(weights, "q4_0")[0], usual)
    )
    assert 0.8 * usual_error < error < 0.92 * usual_error


def test_a_weight_of_q8_0_is_at_most_half_a_step_off():
    """Guards against a scale over the wrong inputs."""
    weights = _weights((9, 64))
    steps = np.abs(weights).reshape(9, 2, 32).max(axis=2).repeat(32, axis=1) / 127
    errors = np.abs(_rounded(weights, "q8_0")[0] - weights)
    assert np.all(errors <= 0.57 * steps)  # the scale itself is rounded: 127 steps · 2^-11
    assert np.max(errors / steps) > 0.4


@pytest.mark.parametrize("kind", _FORMATS)
def test_zeros_stay_zeros(kind):
    """Guards against 0 / 0 in a block without weights."""
    weights = _weights((4, 64))
    weights[1], weights[:, 32:] = 0, 0
    rounded, _ = _rounded(weights, kind)
    assert np.all(rounded[weights == 0] == 0)
    assert np.any(rounded[0] != 0)


def test_a_file_is_rounded_only_where_that_saves_bits(tmp_path):
    """Guards against a second rounding of 4-bit weights, and an embedding that grows."""
    kinds = {"ffn": _KINDS.Q4_0, "token_embd": _KINDS.Q5_0, "": _KINDS.Q8_0}
    path = tmp_path / "m.gguf"
    write_gguf(path, GGUF_CONFIG, random_tensors(GGUF_CONFIG), kinds=kinds)
    kept, rounded = (flatten_dict(load_gguf(path, "bfloat16", q)[1]) for q in ("packed", "q4_0"))
    for key, kernel in kept.items():
        if not isinstance(kernel, PackedKernel):
            np.testing.assert_array_equal(rounded[key], kernel)
            continue
        leaf = rounded[key]
        assert (leaf.shape, leaf.dtype) == (kernel.shape, kernel.dtype)
        assert leaf.takes_bytes
        is_rounded = key[-1] in ("qkv", "out", "head")
        assert leaf.kind == ("q4_0" if is_rounded else kernel.kind)
        if not is_rounded:
            np.testing.assert_array_equal(leaf.strips, kernel.strips)
            continue
        weights, exact = (unpack(packed.strips, packed.kind) for packed in (leaf, kernel))
        assert 0.003 < np.mean((weights - exact) ** 2) / np.mean(exact**2) < 0.01
