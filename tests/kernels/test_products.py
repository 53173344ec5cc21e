"""Products in C++: right to rounding, and a row's result does not depend on others."""

import ctypes
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.kernels import library as native
from jspec.kernels.product import chunk_widths, float_product
from jspec.models.layers import linear
from jspec.weights.quantize import INTEGERS, dequantize, quantize
from tests import tiny_models
from tests.weights.toys import quantize_params

SHAPES = [(963, 576), (17, 70), (3, 5), (1, 32), (5000, 64)]  # outputs, inputs


product_by_xla = float_product.__wrapped__
pytestmark = pytest.mark.usefixtures("library")


@jax.jit
def product(rows, kernel):
    result = native.floats(rows.shape[0], kernel.shape[0])
    return native.call("product", product_by_xla, result, rows.astype(jnp.float32), kernel)


def draw(shape, seed, dtype):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_float64(shape, dtype):
    """Guards the rest behind the last whole step, and the order of bfloat16's halves."""
    rows, kernel = draw((19, shape[1]), 0, dtype), draw(shape, 1, dtype)
    exact = np.asarray(rows, np.float64) @ np.asarray(kernel, np.float64).T
    np.testing.assert_allclose(product(rows, kernel), exact, atol=1e-6 * shape[1], rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_rows_result_does_not_depend_on_its_neighbours(dtype):
    """Bit for bit, for every number of rows: each is compiled separately."""
    rows, kernel = draw((71, 203), 0, dtype), draw((333, 203), 1, dtype)
    together = np.asarray(product(rows, kernel))
    for count in (*range(1, 10), 17, 18, 70):
        np.testing.assert_array_equal(product(rows[:count], kernel), together[:count])
        np.testing.assert_array_equal(product(rows[count : count + 1], kernel)[0], together[count])


def test_rows_are_rounded_to_the_weights_type():
    """To the nearest, of two the even one; what is not finite stays so."""
    numbers = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -3.14159, 1e-30, np.inf, np.nan]
    rows = jnp.asarray(numbers, jnp.float32)[:, None]
    rows = jnp.concatenate([rows, jnp.zeros([7, 40], jnp.float32)], axis=1)
    kernel = jnp.ones([16, 41], jnp.bfloat16)
    rounded = rows[:, 0].astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(product(rows, kernel), np.tile(rounded[:, None], 16))
    assert rounded[0] != rows[0, 0]


@pytest.mark.parametrize(("dtype", "most"), [("float32", 64), ("bfloat16", 512)])
def test_the_model_uses_them_where_they_are_faster(dtype, most):
    kernel = draw((8, 32), 1, dtype)

    def calls(num_tokens):
        rows = draw((1, num_tokens, 32), 0, dtype)
        return "jspec_product" in jax.jit(linear).lower(rows, kernel).as_text()

    assert [calls(count) for count in (1, most, most + 1)] == [True, True, False]


def test_a_loop_that_carries_an_empty_array():
    """XLA loses the interface of a call that stands in such a loop itself."""
    rows, kernel = draw((1, 32), 0, "bfloat16"), draw((8, 32), 1, "bfloat16")

    @jax.jit
    def loop(rows, empty):
        def body(carry):
            total, empty = carry
            joined = jnp.concatenate([total, empty], axis=1)
            return joined + product(rows, kernel), empty

        start = jnp.zeros([1, 8]), empty
        return jax.lax.while_loop(lambda carry: carry[0].max() < 5, body, start)[0]

    assert np.isfinite(loop(rows, jnp.zeros([1, 0]))).all()


def test_derivatives_are_those_of_xlas_product():
    rows, kernel = draw((3, 40), 0, "float32"), draw((8, 40), 1, "float32")

    def loss(multiply, rows, kernel):
        return jnp.sum(jnp.sin(multiply(rows, kernel)))

    slopes = jax.grad(loss, (1, 2))(product, rows, kernel)
    xlas = jax.grad(loss, (1, 2))(product_by_xla, rows, kernel)
    for ours, theirs in zip(slopes, xlas, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_batching_over_rows_and_kernels():
    rows, kernels = draw((4, 3, 40), 0, "float32"), draw((4, 8, 40), 1, "float32")
    np.testing.assert_allclose(
        jax.vmap(product)(rows, kernels), jax.vmap(product_by_xla)(rows, kernels), atol=1e-4
    )


def build_elsewhere(monkeypatch, tmp_path, *options):
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "_CPP_OPTIONS", ("-std=gnu++17", "-O1", "-fPIC", "-w", *options))
    library = native.load_library(native.cpp_recipe())
    library.jspec_has_pairs.restype = ctypes.c_bool
    return library


def check_product_elsewhere(library, name):
    """Checks its sums, and that those of a row do not depend on the rows beside it."""
    handler = jax.ffi.pycapsule(library.jspec_product)
    jax.ffi.register_ffi_target(name, handler, platform="cpu")

    @jax.jit
    def elsewhere(rows, kernel):
        result = jax.ShapeDtypeStruct((rows.shape[0], kernel.shape[0]), jnp.float32)
        return jax.ffi.ffi_call(name, result)(rows.astype(jnp.float32), kernel)

    rows, kernel = draw((19, 203), 0, "bfloat16"), draw((333, 203), 1, "bfloat16")
    together = np.asarray(elsewhere(rows, kernel))
    exact = np.asarray(rows, np.float64) @ np.asarray(kernel, np.float64).T
    np.testing.assert_allclose(together, exact, atol=2e-4, rtol=0)
    for count in (1, 5, 8):
        np.testing.assert_array_equal(elsewhere(rows[:count], kernel), together[:count])


def test_processors_without_tiles_have_products_too(monkeypatch, tmp_path):
    """The library as it is built where there is AVX-512 BF16, but no AMX."""
    if "amx_bf16" not in native._processor():
        pytest.skip("this processor has none itself")
    library = build_elsewhere(monkeypatch, tmp_path, "-march=native", "-mno-amx-bf16")
    assert library.jspec_has_pairs()
    check_product_elsewhere(library, "jspec_product_without_tiles")


@pytest.mark.slow  # the whole library is compiled once more
def test_processors_without_pairs_of_bfloat16_have_products_too(monkeypatch, tmp_path):
    """The library as it is built where there is no AVX-512 BF16."""
    library = build_elsewhere(monkeypatch, tmp_path)
    assert not library.jspec_has_pairs()
    check_product_elsewhere(library, "jspec_product_without_pairs")
    for kind in INTEGERS:
        kernel = quantize(draw((333, 224), 2, "float32"), ("down",), kind, "bfloat16")
        handler = jax.ffi.pycapsule(getattr(library, f"jspec_{kind}_product"))
        jax.ffi.register_ffi_target(f"jspec_{kind}_elsewhere", handler, platform="cpu")
        result = jax.ShapeDtypeStruct((19, 333), jnp.float32)
        call = jax.jit(jax.ffi.ffi_call(f"jspec_{kind}_elsewhere", result))
        rows = draw((19, 224), 0, "bfloat16")
        weights = [kernel.values, kernel.scales]
        weights += [] if kernel.multipliers is None else [kernel.multipliers]
        exact = np.asarray(rows, np.float64) @ np.asarray(dequantize(kernel), np.float64).T
        np.testing.assert_allclose(call(rows, *weights), exact, atol=2e-4, rtol=0)


def test_prompts_have_the_widths_of_chunks_that_are_fastest(monkeypatch):
    monkeypatch.setattr(native, "has_tiles", lambda: False)
    model = tiny_models.make_model()
    halved = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.params)
    params = {
        "bfloat16": halved,
        "float32": model.params,
        "int8": quantize_params(halved, model.config, "int8"),
    }
    models = {name: dataclasses.replace(model, params=own) for name, own in params.items()}
    widths = {name: chunk_widths(model.params["embedding"]) for name, model in models.items()}
    by_rows, by_calls = (16, 64, 49), (64, 256, 129)
    assert widths == {"bfloat16": by_rows, "float32": by_calls, "int8": by_rows}
    monkeypatch.setattr(native, "has_tiles", lambda: True)
    assert chunk_widths(models["bfloat16"].params["embedding"]) == by_calls
    assert chunk_widths(models["int8"].params["embedding"]) == by_rows
    monkeypatch.setattr(native, "is_available", lambda: False)
    for model in models.values():
        assert chunk_widths(model.params["embedding"]) == by_calls
