"""Rotary embeddings against transformers' own tables."""

import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jspec.kernels import apply_rope
from jspec.models import PRESETS
from jspec.models.families.hf_config import to_hf_config
from jspec.models.layers import rope_cos_sin, rope_frequencies
from tests.models.test_config import ODD


@pytest.mark.parametrize("config", [ODD, *PRESETS.values()], ids=["odd", *PRESETS])
def test_frequencies_equal_transformers(config):
    """Llama 3's scaling divides low frequencies, keeps high ones and blends in between."""
    torch = pytest.importorskip("torch")
    theirs = transformers.LlamaConfig(**to_hf_config(config))
    if config.rope_scaling is not None:
        expected, factor = ROPE_INIT_FUNCTIONS["llama3"](theirs, torch.device("cpu"))
        assert factor == 1.0
    else:
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float()
        expected = 1.0 / config.rope_theta ** (exponents / config.head_dim)
    np.testing.assert_allclose(rope_frequencies(config), expected.numpy(), rtol=3e-6)


def test_scaling_reaches_all_three_bands():
    """A preset in which no frequency is blended would not test the blend."""
    config = PRESETS["llama3.2-1b"]
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    ratio = rope_frequencies(config) * config.rope_theta**exponents
    assert (abs(ratio - 1) < 1e-5).any()
    assert (abs(ratio - 1 / 32) < 1e-6).any()
    assert ((ratio > 0.04) & (ratio < 0.99)).any()


def test_angles_are_float32_for_a_bfloat16_model():
    """bfloat16 cannot tell position 257 from 256; float16 ends at 65,504."""
    config, positions = PRESETS["llama3.2-1b"], np.array([257, 4097, 131_071])
    cos, sin = rope_cos_sin(config, jnp.asarray(positions)[None])
    assert cos.dtype == sin.dtype == jnp.float32
    angles = positions[:, None] * rope_frequencies(config).astype(np.float64)
    # One rounding of the angle: half a float32 ulp of it.
    tolerance = positions[:, None] * 2**-24 + 1e-6
    assert np.all(np.abs(cos[0] - np.cos(angles)) < tolerance)
    assert np.all(np.abs(sin[0] - np.sin(angles)) < tolerance)
    heads = jnp.ones([1, 3, 1, 64], jnp.bfloat16)
    rotated = apply_rope(heads, cos, sin)
    assert rotated.dtype == jnp.float32
    np.testing.assert_array_equal(rotated, apply_rope(heads.astype(jnp.float32), cos, sin))
