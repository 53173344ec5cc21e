"""Products with quantised kernels, by each way to compute them, and a Llama of such kernels."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.kernels import library as native
from jspec.models import QuantizedKernel, init_cache, make_apply
from jspec.models.layers import linear, look_up
from jspec.weights.quantize import INTEGERS, dequantize, quantize
from tests import tiny_models
from tests.cases import slow_unless
from tests.weights.toys import quantize_params

CONFIG = dataclasses.replace(tiny_models.CONFIG, hidden_dim=64, num_layers=1)
_SHAPES = {
    "qkv": (2, 4, 5, 64),
    "gate_up": (2, 33, 32),
    "down": (41, 160),
    "embedding": (53, 64),
    "head": (37, 70),  # not a whole number of groups: int8 even in int4
}


def _kernel(name, kind, dtype="float32"):
    """Returns a quantised kernel and the same one in float64, outputs by inputs."""
    weights = np.random.default_rng(len(name)).normal(size=_SHAPES[name])
    kernel = quantize(jnp.asarray(weights, jnp.float32), (name,), kind, dtype)
    flat = np.asarray(dequantize(kernel), np.float64)
    return kernel, flat.reshape(-1, kernel.shape[-1])


def _inputs(b, t, num_inputs, seed=0):
    """Returns activations whose rows differ in size a thousandfold."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(b, t, num_inputs)) * 10.0 ** rng.uniform(-2, 1, (b, t, 1))
    return jnp.asarray(rows, jnp.float32)


@pytest.fixture(params=["c++", "digits", "floats"])
def method(request, monkeypatch):
    """On CPU with and without a compiler, and on other devices."""
    if request.param == "c++":
        request.getfixturevalue("library")
        return request.param
    monkeypatch.setattr(native, "is_available", lambda: False)
    monkeypatch.setattr(
        jax, "default_backend", lambda: "cpu" if request.param == "digits" else "gpu"
    )
    return request.param


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize(
    "name", ["gate_up", "head", slow_unless(False, "qkv"), slow_unless(False, "down")]
)
@pytest.mark.usefixtures("method")
def test_products_are_those_of_the_dequantised_kernel(name, kind):
    """Guards against halves of groups swapped, blocks of outputs lost, a digit too few. Float32."""
    kernel, weights = _kernel(name, kind)
    inputs = _inputs(2, 3, weights.shape[1])
    # A separate function: a compiled one would serve the next way, too.
    outputs = jax.jit(lambda inputs, kernel: linear(inputs, kernel))(inputs, kernel)
    assert outputs.shape == (2, 3, *kernel.shape[:-1])
    expected = np.asarray(inputs, np.float64) @ weights.T
    size = np.linalg.norm(inputs, axis=2)[..., None] * np.linalg.norm(weights, axis=1)
    errors = np.abs(np.asarray(outputs).reshape(expected.shape) - expected)
    assert np.all(errors <= 1e-5 * size)


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.usefixtures("method")
def test_bfloat16_models_multiply_no_less_exactly_than_in_bfloat16(kind):
    """Guards against activations of 8 bits, which would be ten times further off."""
    kernel, weights = _kernel("down", kind, "bfloat16")
    inputs = _inputs(1, 6, weights.shape[1])
    expected = np.asarray(inputs[0], np.float64) @ weights.T
    rounded = np.asarray(inputs[0].astype(jnp.bfloat16), np.float64) @ weights.T
    outputs = jax.jit(lambda inputs, kernel: linear(inputs, kernel))(inputs, kernel)
    errors = np.abs(np.asarray(outputs[0]) - expected).max(axis=1)
    assert np.all(errors <= 1.001 * np.abs(rounded - expected).max(axis=1))


@pytest.mark.parametrize(
    ("method", "kind", "dtype"),
    [("c++", "int8", "bfloat16"), ("c++", "int8", "float32"), ("c++", "int4", "bfloat16"),
     ("c++", "int4", "float32"), ("digits", "int8", "bfloat16"), ("digits", "int4", "float32")],
    indirect=["method"],
)  # fmt: skip
def test_a_row_does_not_depend_on_its_neighbours(method, kind, dtype):
    """Guards against what makes bfloat16 part: one token and several, rounded differently."""
    weights = np.random.default_rng(0).normal(size=(500, 160))
    kernel = quantize(jnp.asarray(weights, jnp.float32), ("down",), kind, dtype)
    inputs = _inputs(1, 71, weights.shape[1])
    multiply = jax.jit(lambda inputs: linear(inputs, kernel))
    together = np.asarray(multiply(inputs))[0]
    assert np.std(together) > 0
    for count in (1, 2, 4, 5, 8, 9, 17) if method == "c++" else (1, 7):
        np.testing.assert_array_equal(multiply(inputs[:, :count])[0], together[:count])
        np.testing.assert_array_equal(multiply(inputs[:, count : count + 1])[0, 0], together[count])


@pytest.mark.usefixtures("method")
def test_activations_that_are_not_finite_give_nothing_finite():
    """Guards against a NaN that becomes some integer, and a token after it; and 0 / 0."""
    kernel, weights = _kernel("down", "int8")
    inputs = np.array(_inputs(1, 4, weights.shape[1]))
    inputs[0, 1, 3], inputs[0, 2, 3], inputs[0, 3] = np.nan, np.inf, 0
    outputs = jax.jit(lambda inputs, kernel: linear(inputs, kernel))(jnp.asarray(inputs), kernel)
    assert np.isfinite(outputs[0]).all(axis=1).tolist() == [True, False, False, True]
    assert not np.isfinite(outputs[0, 1:3]).any()
    assert not np.any(outputs[0, 3])


@pytest.mark.parametrize("name", ["down", "embedding"])
@pytest.mark.parametrize("kind", INTEGERS)
def test_look_up_gives_dequantised_rows(kind, name):
    """Guards against rows of packed bytes, and another row's scale. "down" is packed in int4."""
    table, weights = _kernel(name, kind)
    ids = jnp.array([[0, 5, 5], [40, 2, 1]], jnp.int32)
    actual = look_up(table, ids)
    np.testing.assert_allclose(actual, weights[np.asarray(ids)], rtol=1e-6)


_APPLY = jax.jit(make_apply(CONFIG))


def _logits(params, tokens):
    cache = init_cache(CONFIG, batch_size=1, capacity=tokens.shape[1], dtype=jnp.float32)
    return np.asarray(_APPLY(params, tokens, cache)[0])


def test_a_quantised_llama_has_nearly_the_logits_of_the_original():
    """Guards against a kernel left out or in the wrong place; int4 is further off than int8."""
    params = tiny_models.peaked_params(CONFIG)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 128, (1, 40)), jnp.int32)
    exact = _logits(params, tokens)
    errors = {}
    for kind in INTEGERS:
        quantized_params = quantize_params(params, CONFIG, kind)
        actual = _logits(quantized_params, tokens)
        errors[kind] = np.sqrt(np.mean((actual - exact) ** 2) / np.mean(exact**2))
        floats = jax.tree.map(
            lambda leaf: dequantize(leaf) if isinstance(leaf, QuantizedKernel) else leaf,
            quantized_params,
            is_leaf=lambda leaf: isinstance(leaf, QuantizedKernel),
        )
        np.testing.assert_allclose(actual, _logits(floats, tokens), atol=1e-4 * np.std(exact))
    assert 0.001 < errors["int8"] < 0.05
    assert errors["int8"] < errors["int4"] < 0.6


def test_a_kernel_of_another_shape_is_refused():
    """Guards against Flax's own check, which quantised kernels go around."""
    params = quantize_params(tiny_models.peaked_params(CONFIG), CONFIG, "int8")
    params["layers_0"]["mlp"]["down"] = params["layers_0"]["attention"]["out"]
    with pytest.raises(ValueError, match="expected down of shape"):
        _logits(params, jnp.zeros([1, 2], jnp.int32))


@pytest.mark.usefixtures("optimised")
def test_a_loop_holds_no_unpacked_weights(monkeypatch):
    """Guards against XLA unpacking int4 weights ahead of the loop: four times their bytes."""
    monkeypatch.setattr(native, "is_available", lambda: False)
    weights = jnp.ones([2048, 512], jnp.float32)
    kernel = quantize(weights, ("down",), "int4", "bfloat16")

    def steps(inputs, kernel):
        return jax.lax.fori_loop(
            0, 3, lambda _, x: x + 1e-9 * linear(x, kernel)[:, :, :512], inputs
        )

    memory = jax.jit(steps).lower(jnp.ones([1, 1, 512]), kernel).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 3 * kernel.values.nbytes
