"""Rotated heads in C++: those of XLA to rounding, and a token's do not depend on others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.kernels import library as native
from jspec.kernels import rotate_heads

rotate_heads_by_xla = rotate_heads.__wrapped__
pytestmark = pytest.mark.usefixtures("library")

# batch, tokens, key/value heads, heads beside each (g + 2), dimensions
SHAPES = [(1, 1, 3, 5, 64), (2, 7, 2, 3, 10), (1, 300, 1, 6, 32), (3, 2, 4, 3, 128)]


def draw(shape):
    b, t, _, _, h = shape
    rng = np.random.default_rng(0)
    angles = rng.uniform(0, 6, [b, t, h // 2]).astype(np.float32)
    return jnp.asarray(rng.normal(size=shape), jnp.float32), jnp.cos(angles), jnp.sin(angles)


@pytest.mark.parametrize("shape", SHAPES)
def test_they_are_those_of_xla(shape):
    """Guards against a value head that is turned, and keys that are scaled."""
    operands = draw(shape)
    assert "jspec_rotate_heads" in jax.jit(rotate_heads).lower(*operands).as_text()
    rotated = jax.jit(rotate_heads)(*operands)
    for ours, theirs in zip(rotated, rotate_heads_by_xla(*operands), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
        assert np.abs(ours).max() > 0.1


def test_a_tokens_heads_do_not_depend_on_its_neighbours():
    operands = draw(SHAPES[2])
    together = jax.jit(rotate_heads)(*operands)
    for token in (0, 1, 299):
        alone = jax.jit(rotate_heads)(*(leaf[:, token : token + 1] for leaf in operands))
        for heads, all_ in zip(alone, together, strict=True):
            np.testing.assert_array_equal(heads[:, 0], all_[:, token])


def test_derivatives_are_those_of_xla():
    operands = draw(SHAPES[1])

    def loss(rotate, qkv):
        queries, keys, values = rotate(qkv, *operands[1:])
        return jnp.sum(jnp.sin(queries)) + jnp.sum(jnp.cos(keys)) + jnp.sum(jnp.sin(values))

    slopes, xlas = (
        jax.grad(loss, 1)(rotate, operands[0]) for rotate in (rotate_heads, rotate_heads_by_xla)
    )
    np.testing.assert_allclose(slopes, xlas, atol=1e-6)
    assert native.is_available()
