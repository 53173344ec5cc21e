"""Products of few rows in one kernel say what norm, product, bias, gate and residual say apart."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.kernels import QuantizedKernel, geglu, rms_norm, swiglu
from jspec.kernels.fused_block import takes_kernel
from jspec.kernels.gpu import few_rows_product
from jspec.weights.quantize import quantize

pytestmark = pytest.mark.usefixtures("interpreted")
GATES = {"silu": swiglu, "gelu_tanh": geglu}


def normal(key, *shape, dtype=jnp.float32):
    return jax.random.normal(key, shape, dtype)


def make_kernel(key, outputs, inputs, kind=None):
    kernel = normal(key, outputs, inputs) / jnp.sqrt(jnp.float32(inputs))
    if kind is None:
        return kernel.astype(jnp.bfloat16)
    return quantize(kernel, path=("mlp", "down"), kind=kind, dtype=jnp.bfloat16)


def as_floats(kernel):
    if isinstance(kernel, QuantizedKernel):
        return kernel.values.astype(jnp.float32) * kernel.scales[:, None]
    return kernel.astype(jnp.float32)


def reference(
    rows, kernel, norm=None, epsilon=0.0, bias=None, activation=None, residual=None, scale=1.0
):
    """Returns the same from the operations of the decoder, in float32."""
    if norm is not None:
        rows = inspect.unwrap(rms_norm)(rows[None], norm, jnp.float32(epsilon))[0]
    with jax.default_matmul_precision("highest"):
        outputs = rows @ as_floats(kernel).T
    if bias is not None:
        outputs += bias.astype(jnp.float32).reshape(-1)
    if activation is not None:
        gate_up = outputs.reshape(1, len(rows), 2, -1)
        outputs = inspect.unwrap(GATES[activation])(gate_up)[0]
    return outputs * scale + (0 if residual is None else residual)


@pytest.mark.parametrize("kind", [None, "int8"])
@pytest.mark.parametrize(
    ("num_rows", "inputs", "outputs", "parts"),
    [
        (1, 32, 64, {"norm", "bias"}),
        (5, 96, 32, {"residual", "bias"}),
        (16, 576, 64, {"norm", "silu"}),
        (17, 640, 32, {"norm", "bias", "gelu_tanh"}),
        (40, 512, 32, {"norm", "bias", "silu", "residual"}),
    ],
)
def test_it_says_what_the_operations_say_one_by_one(kind, num_rows, inputs, outputs, parts):
    """Within the rounding of inputs to bfloat16: rows of one tile and of three, odd turns."""
    keys = jax.random.split(jax.random.key(inputs), 5)
    activation = next(iter(parts & GATES.keys()), None)
    total = outputs if activation is None else 2 * outputs
    kernel = make_kernel(keys[0], total, inputs, kind)
    options = {
        "norm": 1 + normal(keys[1], inputs, dtype=jnp.bfloat16) / 4 if "norm" in parts else None,
        "bias": normal(keys[2], total, dtype=jnp.bfloat16) if "bias" in parts else None,
        "residual": normal(keys[3], num_rows, outputs) if "residual" in parts else None,
        "activation": activation,
        "epsilon": 0.1,
        "scale": 0.5,
    }
    rows = 3 * normal(keys[4], num_rows, inputs)
    assert takes_kernel(kernel, inputs)
    expected = reference(rows, kernel, **options)
    weights, units = kernel, None
    if kind is not None:
        weights, units = kernel.values, kernel.scales
    result = few_rows_product(rows, weights, units=units, **options)
    rest = 0 if options["residual"] is None else options["residual"]
    distance = jnp.linalg.norm(result - expected, axis=1)
    assert (distance < 0.01 * jnp.linalg.norm(expected - rest, axis=1)).all()


def test_a_row_does_not_depend_on_the_rows_beside_it():
    """Bit for bit: alone, first of sixteen, and in the second tile."""
    keys = jax.random.split(jax.random.key(0), 3)
    kernel, norm = make_kernel(keys[0], 64, 96), normal(keys[1], 96, dtype=jnp.bfloat16)
    rows = normal(keys[2], 20, 96)

    def multiply(rows):
        return few_rows_product(rows, kernel, norm=norm, epsilon=1e-5, activation="silu")

    together = multiply(rows)
    for begin, end in ((0, 1), (3, 19), (18, 20)):
        np.testing.assert_array_equal(multiply(rows[begin:end]), together[begin:end])


def test_rows_that_are_no_numbers_stay_alone():
    """A row of NaN leaves the other rows of its tile as they are."""
    kernel = make_kernel(jax.random.key(0), 32, 64)
    rows = normal(jax.random.key(1), 3, 64)
    result = few_rows_product(rows.at[1].set(jnp.nan), kernel)
    np.testing.assert_array_equal(result[::2], few_rows_product(rows, kernel)[::2])


@pytest.mark.parametrize(
    ("dtype", "kind", "outputs", "inputs", "is_taken"),
    [
        (jnp.bfloat16, None, 32, 16, True),
        (jnp.bfloat16, "int8", 32, 64, True),
        (jnp.bfloat16, "int4", 32, 64, False),
        (jnp.float32, "int8", 32, 64, False),
        (jnp.float32, None, 32, 64, False),
        (jnp.bfloat16, None, 48, 64, False),
        (jnp.bfloat16, None, 32, 40, False),
    ],
)
def test_kernels_of_other_types_and_odd_sizes_are_left_to_xla(
    dtype, kind, outputs, inputs, is_taken
):
    kernel = jnp.ones([outputs, inputs], dtype)
    if kind is not None:
        kernel = quantize(kernel, path=("mlp", "down"), kind=kind, dtype=dtype)
    assert takes_kernel(kernel, inputs) == is_taken
