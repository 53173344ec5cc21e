"""Products of few rows in CUDA C++ say what float64 says, wherever a row stands, in any order."""

import ctypes
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.kernels import PackedKernel
from jspec.kernels.cuda_block import ACTIVATIONS, PACKED, Fused, multiply, storage_of, takes_kernel
from jspec.kernels.packed import FORMATS, round_to_bytes
from jspec.kernels.quantized import quantized_rows
from jspec.weights.quantize import quantize
from tests.cases import slow_unless
from tests.kernels.test_packed import packed, random_rows

KINDS = ["bfloat16", "int8", "int4", *PACKED]
OPTIONS = {
    "plain": {},
    "all": {"norm", "bias", "residual", "scale"},
    "silu": {"norm", "silu", "result"},
    "gelu": {"bias", "gelu_tanh", "residual", "rows"},
}


def normal(seed, *shape, mean=0.0, deviation=1.0, dtype=jnp.float32):
    """Returns random numbers, without a program of JAX for each shape."""
    numbers = np.random.default_rng(seed).normal(mean, deviation, shape)
    return jnp.asarray(numbers.astype(dtype))


def normal_scales(inputs, dtype=jnp.float32):
    return normal(1, inputs, mean=1, deviation=1 / 4, dtype=dtype)


@functools.cache
def make_kernel(kind, outputs, inputs):
    if kind in PACKED:
        rows, weights = random_rows(kind, outputs, inputs)
        strips = jnp.asarray(packed(rows, kind))
        kernel = PackedKernel(strips, kind, (outputs, inputs), jnp.dtype(jnp.bfloat16))
        return kernel, weights.astype(np.float64)
    dtype = jnp.bfloat16 if kind == "bfloat16" else jnp.float32
    floats = normal(7, outputs, inputs, deviation=1 / math.sqrt(inputs), dtype=dtype)
    if kind == "bfloat16":
        return floats, np.asarray(floats, np.float64)
    kernel = quantize(floats, path=("mlp", "down"), kind=kind, dtype=jnp.bfloat16)
    weights = jax.jit(quantized_rows)(kernel, jnp.arange(outputs)[None])[0]
    return kernel, np.asarray(weights, np.float64)


def make_options(parts, num_rows, inputs, outputs):
    activation = next((name for name in ("silu", "gelu_tanh") if name in parts), None)
    kernel_outputs = outputs * (2 if activation else 1)
    dtype = jnp.bfloat16 if "silu" in parts else jnp.float32
    return {
        "norm": normal_scales(inputs, dtype) if "norm" in parts else None,
        "epsilon": 0.1 if "norm" in parts else 0.0,
        "bias": normal(2, kernel_outputs, dtype=jnp.bfloat16) if "bias" in parts else None,
        "residual": normal(3, num_rows, outputs) if "residual" in parts else None,
        "scale": 0.5 if "scale" in parts else 1.0,
        "activation": activation,
        "dtype": jnp.bfloat16 if "result" in parts else jnp.float32,
    }


def as_taken(rows, norm=None, epsilon=0.0, takes_bytes=False):
    """Returns the rows as the product takes them, rounded before their norm's factor."""
    rows = np.asarray(rows, np.float64)
    factor = 1.0
    if norm is not None:
        factor = 1 / np.sqrt((rows**2).mean(axis=1, keepdims=True) + epsilon)
        rows = rows * np.asarray(norm, np.float64)
    rows = rows.astype(np.float32)
    rows = np.asarray(jax.jit(round_to_bytes)(rows)) if takes_bytes else rows
    return rows.astype(jnp.bfloat16).astype(np.float64) * factor


def reference(rows, weights, *, norm, epsilon, bias, activation, residual, scale, dtype):
    outputs = as_taken(rows, norm, epsilon) @ weights.T
    if bias is not None:
        outputs += np.asarray(bias, np.float64)
    if activation is not None:
        gates, outputs = np.split(outputs, 2, axis=1)
        inner = gates
        if activation == "gelu_tanh":
            inner = 2 * math.sqrt(2 / math.pi) * (gates + 0.044715 * gates**3)
        with np.errstate(over="ignore"):
            outputs = outputs * gates / (1 + np.exp(-inner))
    return outputs * scale + (0 if residual is None else np.asarray(residual, np.float64))


def check(result, expected, dtype):
    """Compares with the largest number of each row: a rounding of the norm moves a bfloat16."""
    assert result.dtype == dtype
    bound = 0.006 if dtype == jnp.bfloat16 else 0.002
    error = np.abs(np.asarray(result, np.float64) - expected).max(axis=1)
    assert (error <= bound * np.abs(expected).max(axis=1)).all(), error


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_decoded_as_the_references_decode_them(emulator, kind):
    """All codes of a strip of random bytes, by the lanes of one warp."""
    inputs = {"bfloat16": 96, "int8": 96}.get(kind, 768)
    kernel, weights = make_kernel(kind, 32, inputs)
    _, values, units, multipliers = storage_of(kernel, inputs)
    arrays = [None if x is None else np.array(x) for x in (values, multipliers)]
    pointers = [x if x is None else x.ctypes.data_as(ctypes.c_void_p) for x in arrays]
    result = np.full([16, inputs], np.nan, np.float32)
    to = result.ctypes.data_as(ctypes.c_void_p)
    emulator.check_decode(KINDS.index(kind), *pointers, inputs, to)
    scaled = result if units is None else result * np.asarray(units)[:16, None]
    np.testing.assert_allclose(scaled, weights[:16].astype(np.float32), rtol=1e-6, atol=1e-6)


_SHAPES = [
    (1, 32, 512), (2, 48, 256), (5, 96, 768), (8, 32, 512), (9, 144, 256), (16, 32, 512),
    (17, 48, 768),
]  # fmt: skip


def _is_quick(kind, name, shape):
    """Has every format, option and shape at least once, and one format with all options."""
    i, j, k = KINDS.index(kind), list(OPTIONS).index(name), _SHAPES.index(shape)
    return (j, k) == (i % len(OPTIONS), 3 * i % len(_SHAPES)) or (kind == "bfloat16" and k == 4)


@pytest.mark.parametrize(
    ("kind", "name", "num_rows", "outputs", "inputs"),
    [
        slow_unless(_is_quick(kind, name, shape), kind, name, *shape)
        for kind in KINDS
        for name in OPTIONS
        for shape in _SHAPES
    ],
)
def test_it_says_what_float64_says(emulator, kind, name, num_rows, outputs, inputs):
    """All formats and options; results and shared memory are NaN before they are written."""
    parts = OPTIONS[name]
    options = make_options(parts, num_rows, inputs, outputs)
    kernel_outputs = outputs * (2 if options["activation"] else 1)
    kernel, weights = make_kernel(kind, kernel_outputs, inputs)
    dtype = jnp.bfloat16 if "rows" in parts else jnp.float32
    rows = normal(4, num_rows, inputs, dtype=dtype)
    result = multiply(rows, kernel, Fused(**options))
    check(result, reference(rows, weights, **options), options["dtype"])


@pytest.mark.parametrize(("kind", "inputs"), [("bfloat16", 32), ("int8", 96)])
def test_inputs_that_leave_a_rest_of_a_step(emulator, kind, inputs):
    """Lanes without inputs take zeros, not what lies behind."""
    kernel, weights = make_kernel(kind, 32, inputs)
    rows = normal(4, 3, inputs)
    expected = as_taken(rows) @ weights.T
    check(multiply(rows, kernel), expected, jnp.float32)


def test_blocks_fit_the_gpus_with_the_least_shared_memory(emulator):
    """That of a block of compute capability 8.6, 8.9 or 12.0: 99 KiB."""
    assert 0 < emulator.check_shared_bytes() <= 99 << 10


@pytest.mark.parametrize(
    ("kind", "processors", "inputs", "activation"),
    [
        slow_unless(kind == "bfloat16" or (kind, case[1]) == ("q6_k", 4096), kind, *case)
        for kind in KINDS
        for case in ((2, 5120, None), (4, 2048, None), (132, 4096, None), (132, 1024, "silu"))
    ],
)
def test_blocks_that_share_inputs(emulator, on_processors, kind, processors, inputs, activation):
    """One block takes several units; two or four of a cluster share one, in slices of the inputs.

    However many tokens there are: the first row is the same, bit for bit.
    """
    outputs = 160
    kernel, weights = make_kernel(kind, outputs * (2 if activation else 1), inputs)
    rows, norm = normal(4, 16, inputs), normal_scales(inputs)
    bias = normal(2, len(weights))
    options = {"norm": norm, "epsilon": 1e-5, "bias": bias, "activation": activation}
    with on_processors(processors):
        result = multiply(rows, kernel, Fused(**options))
        alone = multiply(rows[3:4], kernel, Fused(**options))
    others = {"residual": None, "scale": 1.0, "dtype": jnp.float32}
    check(result, reference(rows, weights, **options, **others), jnp.float32)
    np.testing.assert_array_equal(result[3:4], alone)


@pytest.mark.parametrize(
    "kind", [slow_unless(kind in ("bfloat16", "int4", "q4_k"), kind) for kind in KINDS]
)
def test_a_row_does_not_depend_on_the_rows_beside_it(emulator, kind):
    """Bit for bit: alone, among 5 and 16, in the second tile, and beside a row of NaN."""
    kernel, _ = make_kernel(kind, 32, 512)
    rows, norm = normal(4, 20, 512), normal_scales(512)
    options = {"norm": norm, "epsilon": 1e-5, "activation": "silu"}
    together = multiply(rows, kernel, Fused(**options))
    for begin, end in ((0, 1), (3, 8), (2, 18), (19, 20)):
        part = multiply(rows[begin:end], kernel, Fused(**options))
        np.testing.assert_array_equal(part, together[begin:end])
    spoilt = multiply(rows.at[1].set(jnp.nan), kernel, Fused(**options))
    np.testing.assert_array_equal(spoilt[2:], together[2:])
    assert np.isnan(spoilt[1]).all()


@pytest.mark.parametrize(
    ("kind", "order"),
    [("bfloat16", 1), ("bfloat16", 2), ("q4_k", 1), slow_unless(False, "q6_k", 3)],
)
def test_the_order_of_threads_changes_no_bit(emulator, in_order, kind, order):
    kernel, _ = make_kernel(kind, 160, 512)
    rows, norm = normal(4, 9, 512), normal_scales(512)
    options = {"norm": norm, "epsilon": 1e-5, "activation": "gelu_tanh"}
    expected = multiply(rows, kernel, Fused(**options))
    with in_order(order):
        np.testing.assert_array_equal(multiply(rows, kernel, Fused(**options)), expected)


def test_rows_are_rounded_to_bytes(emulator):
    """As llama.cpp rounds them, with a group of zeros among them."""
    kernel, weights = make_kernel("q8_0", 32, 256)
    rows = normal(4, 2, 256).at[:, 32:64].set(0)
    result = multiply(rows, kernel.replace(takes_bytes=True))
    expected = as_taken(rows, takes_bytes=True) @ weights.T
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_it_is_a_part_of_a_program(emulator):
    """Under jit, in a loop, with a result that takes the residual's memory."""
    kernel, weights = make_kernel("bfloat16", 64, 64)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(rows):
        return jax.lax.fori_loop(0, 3, lambda _, x: multiply(x, kernel, Fused(residual=x)), rows)

    rows = normal(4, 3, 64)
    expected = np.asarray(rows, np.float64)
    for _ in range(3):
        expected = expected + as_taken(expected) @ weights.T
    check(run(rows), expected, jnp.float32)


@pytest.mark.parametrize(
    ("dtype", "kind", "outputs", "inputs", "is_taken"),
    [
        (jnp.bfloat16, "bfloat16", 32, 32, True),
        (jnp.bfloat16, "int8", 32, 64, True),
        (jnp.bfloat16, "int4", 32, 128, True),
        (jnp.bfloat16, "int4", 32, 96, False),
        (jnp.bfloat16, "q6_k", 32, 256, True),
        (jnp.float32, "int8", 32, 64, False),
        (jnp.float32, "q6_k", 32, 256, False),
        (jnp.float32, "float32", 32, 64, False),
        (jnp.bfloat16, "bfloat16", 48, 64, False),
        (jnp.bfloat16, "bfloat16", 32, 48, False),
        (jnp.bfloat16, "q2_k", 32, 256, False),
        (jnp.bfloat16, "q4_0", 48, 256, False),
    ],
)
def test_other_types_and_sizes_are_not_taken(dtype, kind, outputs, inputs, is_taken):
    if kind in FORMATS:
        strips = jnp.asarray(packed(random_rows(kind, outputs, inputs)[0], kind))
        kernel = PackedKernel(strips, kind, (outputs, inputs), jnp.dtype(dtype))
    else:
        kernel = jnp.ones([outputs, inputs], dtype)
        if kind.startswith("int"):
            kernel = quantize(kernel, path=("mlp", "down"), kind=kind, dtype=dtype)
    assert takes_kernel(kernel, inputs) == is_taken


def test_an_unknown_activation_is_refused():
    kernel, _ = make_kernel("bfloat16", 32, 64)
    with pytest.raises(ValueError, match=r"among .*silu.*got 'relu'"):
        multiply(normal(0, 1, 64), kernel, Fused(activation="relu"))
    assert None in ACTIVATIONS
