"""The sparse feed-forward layer; `test_families` compares models of it with transformers'."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import kernels
from jspec.models.config import DecoderConfig
from jspec.models.layers import Experts

_CONFIG = DecoderConfig(
    vocab_size=32, embed_dim=24, hidden_dim=56, num_layers=1, num_heads=2, num_kv_heads=2,
    head_dim=12, max_seq_len=64, num_experts=7, num_experts_per_token=3, expert_dim=20,
)  # fmt: skip
_SHAPES = {"router": (7, 24), "experts_gate_up": (7, 2, 20, 24), "experts_down": (7, 24, 20)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_does_not_depend_on_its_neighbours(dtype):
    """Guards against a verify call whose logits differ from those of single steps."""
    rng = np.random.default_rng(2)
    params = {name: jnp.asarray(0.5 * rng.normal(size=_SHAPES[name]), dtype) for name in _SHAPES}
    inputs = rng.normal(size=(1, 40, 24)).astype(np.float32)
    apply = jax.jit(lambda inputs: Experts(_CONFIG).apply({"params": params}, inputs))
    together = np.asarray(apply(inputs))
    assert np.std(together) > 0
    for token in range(0, 40, 7):
        np.testing.assert_array_equal(apply(inputs[:, token : token + 1])[0], together[:, token])
    for width in (2, 6):
        np.testing.assert_array_equal(apply(inputs[:, :width]), together[:, :width])


@pytest.mark.parametrize("sizes", [[0, 5, 0, 1], [6, 0, 0, 0], [1, 2, 2, 1], [0, 0, 0, 0]])
@pytest.mark.parametrize("is_native", [True, False], ids=["C++", "XLA"])
def test_grouped_product_is_one_product_a_group(sizes, is_native, monkeypatch):
    """Guards against groups without rows that shift the others."""
    if not is_native:
        monkeypatch.setattr("jspec.kernels.library.is_available", lambda: False)
    rng = np.random.default_rng(3)
    for dtype in ("float32", "bfloat16"):
        matrices = jnp.asarray(rng.normal(size=(4, 11, 32)), dtype)
        rows = jnp.asarray(rng.normal(size=(sum(sizes), 32)), jnp.float32)
        actual = kernels.grouped_product(rows, matrices, jnp.asarray(sizes, jnp.int32))
        owners = np.repeat(np.arange(4), sizes)
        rounded = np.asarray(rows.astype(dtype), np.float64)
        expected = np.einsum("ri,roi->ro", rounded, np.asarray(matrices, np.float64)[owners])
        np.testing.assert_allclose(actual, expected, atol=1e-4)
