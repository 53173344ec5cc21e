"""Products of few rows in one kernel say what norm, product, bias, gate and residual say apart."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.kernels import PackedKernel, QuantizedKernel, geglu, product, rms_norm, swiglu
from jspec.kernels import fused_choice as choice
from jspec.kernels.fused_block import multiply, takes_kernel
from jspec.kernels.gpu import DECODED, few_rows_product
from jspec.kernels.packed import packed_product, round_to_bytes, unpack
from jspec.kernels.packed_formats import FORMATS
from jspec.kernels.quantized import quantized_rows
from jspec.weights.quantize import quantize
from tests.cases import slow_unless
from tests.kernels.test_packed import packed, random_rows

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
        return quantized_rows(kernel, jnp.arange(kernel.shape[0])[None])[0]
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


_CASES = [
    (1, 32, 64, {"norm", "bias"}),
    (5, 96, 32, {"residual", "bias"}),
    (16, 576, 64, {"norm", "silu"}),
    (17, 640, 32, {"norm", "bias", "gelu_tanh"}),
    (40, 512, 32, {"norm", "bias", "silu", "residual"}),
]


@pytest.mark.parametrize(
    ("kind", "num_rows", "inputs", "outputs", "parts"),
    [
        slow_unless(kind is None or case in _CASES[::4], kind, *case)
        for kind in (None, "int8", "int4")
        for case in _CASES
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
    result = multiply(rows, kernel, **options)
    rest = 0 if options["residual"] is None else options["residual"]
    distance = jnp.linalg.norm(result - expected, axis=1)
    assert (distance < 0.01 * jnp.linalg.norm(expected - rest, axis=1)).all()


@pytest.mark.parametrize("takes_bytes", [slow_unless(False, False), True])
@pytest.mark.parametrize("kind", DECODED)
def test_packed_weights_are_decoded_as_xla_decodes_them(kind, takes_bytes):
    """Of random bytes, rounded to bfloat16, the same up to the order of the sum; with gates."""
    num_inputs = 3 * max(FORMATS[kind].inputs, 64)
    blocks, _ = random_rows(kind, 64, num_inputs)
    strips = jnp.asarray(packed(blocks, kind))
    rows = normal(jax.random.key(1), 5, num_inputs)
    form = {"packed": (kind, FORMATS[kind]), "takes_bytes": takes_bytes}
    weights = unpack(strips, kind).astype(jnp.bfloat16)
    rounded = (round_to_bytes(rows) if takes_bytes else rows).astype(jnp.bfloat16)
    expected = reference(rounded.astype(jnp.float32), weights)
    result = few_rows_product(rows, strips, **form)
    np.testing.assert_allclose(result, expected, atol=1e-5 * float(jnp.abs(expected).max()))
    gated = few_rows_product(rows, strips, activation="silu", **form)
    expected = inspect.unwrap(swiglu)(expected.reshape(1, 5, 2, -1))[0]
    np.testing.assert_allclose(gated, expected, atol=1e-5 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize("kind", ["q8_0", "q5_k"])
def test_packed_products_of_few_rows_take_the_kernel(kind, monkeypatch, capsys):
    """After its trial; float32 models, and formats and numbers of rows that it does not know, do
    not.
    """
    monkeypatch.setattr(choice, "_is_on", lambda: True)
    monkeypatch.setattr(choice, "_VERDICTS", {})
    strips = jnp.asarray(packed(random_rows(kind, 32, 512)[0], kind))
    rows = normal(jax.random.key(1), 65, 512)
    for dtype, num_rows, trials in (("float32", 2, 0), ("bfloat16", 65, 0), ("bfloat16", 2, 1)):
        kernel = PackedKernel(strips, kind, (32, 512), jnp.dtype(dtype))
        own = rows[:num_rows]
        result, expected = product(own, kernel), inspect.unwrap(packed_product)(own, kernel)
        np.testing.assert_allclose(result, expected, atol=0.01 * float(jnp.abs(expected).max()))
        assert list(choice._VERDICTS.values()) == [True] * trials
    assert capsys.readouterr().err == ""


def test_a_row_does_not_depend_on_the_rows_beside_it():
    """Bit for bit: alone, first of sixteen, and in the second tile."""
    keys = jax.random.split(jax.random.key(0), 3)
    kernel, norm = make_kernel(keys[0], 64, 96), normal(keys[1], 96, dtype=jnp.bfloat16)
    rows = normal(keys[2], 20, 96)

    def normed_product(rows):
        return multiply(rows, kernel, norm=norm, epsilon=1e-5, activation="silu")

    together = normed_product(rows)
    for begin, end in ((0, 1), (3, 19), (18, 20)):
        np.testing.assert_array_equal(normed_product(rows[begin:end]), together[begin:end])


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
        (jnp.bfloat16, "int4", 32, 64, True),
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
