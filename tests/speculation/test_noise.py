"""Where random numbers come from."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jspec.sampling.noise import Purpose, acceptance_noise, gumbel_noise, plain_noise, round_keys

YES = jnp.array(True)
noise_of = jax.jit(acceptance_noise, static_argnums=(2, 3))
keys_of = jax.jit(round_keys, static_argnums=3)
SEEDS = jnp.array([0, 1, 2**32 - 1], jnp.uint32)


def test_no_two_numbers_share_a_key():
    """Key reuse between rows, positions, purposes or offsets correlates what must not be."""
    seen = {}
    for purpose, position in itertools.product(Purpose, (0, 1, 2, 3, 1000)):
        keys = keys_of(SEEDS, jnp.full([3], position, jnp.int32), int(purpose), 5)
        data = np.asarray(jax.random.key_data(keys)).reshape(3, 5, -1)
        for row, offset in itertools.product(range(3), range(5)):
            where = (row, purpose.name, position, offset)
            clash = seen.setdefault(tuple(data[row, offset]), where)
            assert clash == where, f"{clash} and {where} share a key"


def test_acceptance_draws_from_keys_of_its_own_purposes():
    """Guards against a next token tied to a uniform, which 20,000 samples do not show."""
    positions = jnp.array([3, 1, 4])
    noise = noise_of(SEEDS, positions, 2, 5, YES)
    keys = keys_of(SEEDS, positions, int(Purpose.ACCEPT), 2)
    uniform = jax.jit(lambda key: jax.random.uniform(key, dtype=jnp.float32))
    uniforms = [[uniform(key) for key in row] for row in keys]
    np.testing.assert_array_equal(noise.uniforms, np.array(uniforms))
    next_keys = keys_of(SEEDS, positions, int(Purpose.NEXT), 1)[:, 0]
    np.testing.assert_array_equal(noise.gumbel, gumbel_noise(next_keys, 5, YES))


def test_noise_of_a_row_is_its_own():
    """A row's noise depends on its seed and position, not on its place or its neighbours."""
    seeds, positions = jnp.array([7, 8, 9], jnp.uint32), jnp.array([3, 1, 4])
    batch = noise_of(seeds, positions, 2, 5, YES)
    for row in range(3):
        alone = noise_of(seeds[row : row + 1], positions[row : row + 1], 2, 5, YES)
        np.testing.assert_array_equal(batch.uniforms[row], alone.uniforms[0])
        np.testing.assert_array_equal(batch.gumbel[row], alone.gumbel[0])


def test_noise_of_an_offset_does_not_depend_on_the_width():
    """A narrow verify call must decide its first draft as the wide one would."""
    positions = jnp.array([3, 1, 4])
    narrow, wide = (noise_of(SEEDS, positions, width, 5, YES) for width in (1, 2))
    np.testing.assert_array_equal(narrow.uniforms, wide.uniforms[:, :1])
    np.testing.assert_array_equal(narrow.gumbel, wide.gumbel)


def test_uniforms_and_gumbels_have_their_distributions():
    """N = 4,000: means within 5 standard errors; a false alarm has odds of 1e-6 (fixed seeds)."""
    seeds = jnp.arange(4_000, dtype=jnp.uint32)
    ones = jnp.ones([4_000], jnp.int32)
    noise = noise_of(seeds, ones, 1, 1, YES)
    assert abs(noise.uniforms.mean() - 0.5) < 5 / np.sqrt(12 * 4_000)
    assert 0 <= noise.uniforms.min() <= noise.uniforms.max() < 1
    assert abs(noise.gumbel.mean() - np.euler_gamma) < 5 * np.pi / np.sqrt(6 * 4_000)


def test_greedy_batches_are_spared_the_noise():
    """Nobody looks at it, and over a large vocabulary it costs more than a small model."""
    noise = plain_noise(SEEDS, jnp.array([1, 2, 3]), 5, jnp.array(False))
    np.testing.assert_array_equal(noise, np.zeros((3, 5)))


def test_noise_does_not_depend_on_the_default_generator():
    """Guards against a faster default such as rbg, which draws by the batch's shape."""
    positions = jnp.array([3, 1, 4])
    expected = noise_of(SEEDS, positions, 2, 5, YES)
    with jax.default_prng_impl("rbg"):
        noise = jax.jit(acceptance_noise, static_argnums=(2, 3))(SEEDS, positions, 2, 5, YES)
    jax.tree.map(np.testing.assert_array_equal, noise, expected)
