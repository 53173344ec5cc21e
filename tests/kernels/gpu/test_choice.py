"""Kernels or XLA: where they are asked, tried once a shape, and what follows a failed trial.

The block's own numbers are tested elsewhere. Here XLA's block, spoilt or not, stands in for it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.kernels import fused_block
from jspec.kernels import fused_choice as choice
from jspec.kernels.quantized import QuantizedKernel
from jspec.models import decoder, init_cache, make_apply
from tests.kernels.families import make_model

CONFIG, PARAMS = make_model("llama")


@pytest.fixture
def trials(monkeypatch):
    """Makes a decoder believe in a GPU on which nothing was tried; returns the tried shapes."""
    tried = []

    def record(reference, fused, make, distance, attempt=choice._try):
        tried.append(make.args[0][1].shape)
        return attempt(reference, fused, make, distance)

    monkeypatch.setattr(choice, "_try", record)
    monkeypatch.setattr(choice, "_is_on", lambda: True)
    monkeypatch.setattr(choice, "_VERDICTS", {})
    jax.clear_caches()
    yield tried
    jax.clear_caches()


def stand_in(monkeypatch, spoil=lambda x: x):
    """Lets XLA's block, with its outputs spoilt, stand in for the kernels; returns its calls."""
    calls = []

    def run_block(config, block_offset, params, x, rope, visible, cache):
        calls.append(x.shape)
        module = decoder.Block(config)
        outputs, cache = module.apply({"params": params}, x, rope, visible, cache, block_offset)
        return spoil(outputs), cache

    monkeypatch.setattr(fused_block, "run_block", run_block)
    return calls


def call(width=3, **changed):
    """Returns the logits of a block of tokens."""
    cache = init_cache(CONFIG, batch_size=2, capacity=40, dtype=jnp.bfloat16)
    tokens = jnp.arange(2 * width, dtype=jnp.int32).reshape(2, width)
    return jax.jit(make_apply(CONFIG))(PARAMS | changed, tokens, cache)[0]


def test_a_shape_is_tried_once(trials, monkeypatch, capsys):
    """Two layers, two programs: one trial for three tokens and one for two, and all are used."""
    calls = stand_in(monkeypatch)
    expected = call(3)
    call(2)
    jax.clear_caches()
    np.testing.assert_array_equal(call(3), expected)
    assert trials == [(2, 3, 64), (2, 2, 64)]
    # Tried and traced, and traced once more.
    assert calls == [(2, 3, 64), (2, 3, 64), (2, 2, 64), (2, 2, 64), (2, 3, 64)]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda x: x.at[..., 0].add(2.0), "(on random numbers it differs from XLA's by"),
        (lambda x: x.at[1, 0, 0].set(jnp.nan), "it differs from XLA's by nan%"),
    ],
)
def test_a_wrong_result_is_not_used(spoil, reason, trials, monkeypatch, capsys):
    monkeypatch.setattr(choice, "_is_on", lambda: False)
    expected = call(3)
    jax.clear_caches()
    monkeypatch.setattr(choice, "_is_on", lambda: True)
    stand_in(monkeypatch, spoil)
    np.testing.assert_array_equal(call(3), expected)
    assert trials == [(2, 3, 64)]
    warning = capsys.readouterr().err
    assert warning.startswith("jspec: the GPU's fused block is not used for a shape (")
    assert reason in warning
    assert warning.endswith("; decoding takes longer\n")
    assert warning.count("\n") == 1


def test_a_failure_is_reported_once(trials, monkeypatch, capsys):
    """Two shapes that Triton does not compile, each with a reason of its own: one line."""

    def fail(x):
        raise RuntimeError(f"no kernel image for {x.shape}.\nand more")

    stand_in(monkeypatch, fail)
    results = call(3), call(2)
    assert all(jnp.isfinite(result).all() for result in results)
    assert trials == [(2, 3, 64), (2, 2, 64)]
    assert capsys.readouterr().err == (
        "jspec: the GPU's fused block is not used for a shape (RuntimeError: no kernel image for "
        "(2, 3, 64).); decoding takes longer\n"
    )


def test_nothing_is_tried_on_a_gpu_without_bfloat16(trials, monkeypatch):
    calls = stand_in(monkeypatch)
    monkeypatch.setattr(choice, "has_bfloat16", lambda: False)
    assert jnp.isfinite(call(3)).all()
    assert trials == calls == []


def test_its_derivatives_are_those_of_xlas_block(trials, monkeypatch):
    """Those of Pallas are never asked for: writing in place has none."""

    def loss(embedding):
        return jnp.sum(jnp.sin(call(3, embedding=embedding)))

    stand_in(monkeypatch, lambda x: x * 1.0001)
    slope = jax.grad(loss)(PARAMS["embedding"])
    found = loss(PARAMS["embedding"])
    monkeypatch.setattr(choice, "_is_on", lambda: False)
    jax.clear_caches()
    assert loss(PARAMS["embedding"]) != found  # it was used
    np.testing.assert_array_equal(slope, jax.grad(loss)(PARAMS["embedding"]))
    assert trials == [(2, 3, 64)]


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is one")
def test_the_integers_of_a_trial_are_those_of_a_kernel():
    """Guards against a product that no int8 holds, which XLA and the kernel compute differently."""
    shape = (64, 512)
    kernel = QuantizedKernel(
        jax.ShapeDtypeStruct((64, 256), jnp.uint8), jax.ShapeDtypeStruct((64,), jnp.float32),
        jax.ShapeDtypeStruct((64, 16), jnp.int8), shape, jnp.dtype(jnp.bfloat16),
    )  # fmt: skip
    rows = jax.ShapeDtypeStruct((1, 512), jnp.float32)
    _, drawn = choice.random_product((rows, kernel))
    assert -8 * int(drawn.multipliers.max()) >= -128
    assert int(drawn.multipliers.min()) >= 1


def test_without_a_gpu_nothing_is_tried(monkeypatch):
    """Nor where it is switched off."""

    def compute():
        return choice.compute_block(lambda *operands: operands, CONFIG, 0, *"pxrvc")

    assert compute() == tuple("pxrvc")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert choice._is_on()
    monkeypatch.setenv("JSPEC_FUSED", "0")
    assert compute() == tuple("pxrvc")
