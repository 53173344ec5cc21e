"""Small images, pixel after pixel: 8 x 8 digits of 17 grey levels (scikit-learn's set).

g is a network that sees all pixels before, f one that sees the four neighbours among them, or a
table of how often each pixel has each level. All are trained here, in a minute or two.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jaxtyping import Array, Float32, Int32

from jspec.common.errors import InputError
from jspec.speculation.distributions import Categorical

WIDTH, NUM_LEVELS = 8, 17
NUM_PIXELS = WIDTH**2
_NEIGHBOURS = (1, WIDTH - 1, WIDTH, WIDTH + 1)  # left, and the three above: so far back
_HELD_OUT, _BATCH_SIZE = 297, 16
_LARGE, _SMALL = (512, 512), (32,)  # widths of the hidden layers

Params = list[dict[str, Array]]


class Canvas(struct.PyTreeNode):
    """An image, and how many of its pixels are drawn; the others are 0."""

    pixels: Int32[Array, "64"]
    count: Int32[Array, ""]


def load_images() -> Int32[np.ndarray, "n 64"]:
    """Returns the images, levels from 0 to 16.

    Raises:
      InputError: scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-not-found]
    except ImportError:
        raise InputError(
            "the digits are those of scikit-learn, which is not installed: pip install scikit-learn"
        ) from None
    return load_digits().data.astype(np.int32)


def empty_canvas() -> Canvas:
    """Returns an image of which nothing is drawn."""
    return Canvas(jnp.zeros([NUM_PIXELS], jnp.int32), jnp.int32(0))


def draw_pixel(canvas: Canvas, level: Array) -> Canvas:
    """Returns the image with its next pixel: `update` of the chain."""
    return Canvas(canvas.pixels.at[canvas.count].set(level), canvas.count + 1)


def see_all(canvas: Canvas) -> Float32[Array, "x"]:
    """Returns what the large network is told: the pixels drawn, and which one is next."""
    is_drawn = jnp.arange(NUM_PIXELS) < canvas.count
    return jnp.concatenate([jnp.where(is_drawn, _scaled(canvas.pixels), 0.0), _place(canvas)])


def see_neighbours(canvas: Canvas) -> Float32[Array, "x"]:
    """Returns what the small network is told: four neighbours, and which pixel is next."""
    before = canvas.count - jnp.array(_NEIGHBOURS)
    levels = _scaled(canvas.pixels[jnp.maximum(before, 0)])
    return jnp.concatenate([jnp.where(before >= 0, levels, 0.0), _place(canvas)])


def _scaled(levels: Array) -> Array:
    return levels.astype(jnp.float32) / (NUM_LEVELS // 2) - 1


def _place(canvas: Canvas) -> Array:
    return jax.nn.one_hot(canvas.count, NUM_PIXELS, dtype=jnp.float32)


def apply_network(see: Callable[[Canvas], Array], params: Params, canvas: Canvas) -> Categorical:
    """Returns the distribution of the next pixel's level."""
    hidden = see(canvas)
    for layer in params[:-1]:
        hidden = jax.nn.relu(hidden @ layer["kernel"] + layer["bias"])
    return Categorical(hidden @ params[-1]["kernel"] + params[-1]["bias"])


def look_up(logits: Float32[Array, "64 17"], canvas: Canvas) -> Categorical:
    """Returns how often the next pixel has each level."""
    return Categorical(logits[jnp.minimum(canvas.count, NUM_PIXELS - 1)])


def count_levels(images: Int32[np.ndarray, "n 64"]) -> Float32[Array, "64 17"]:
    """Returns the logarithms of the levels' shares at each pixel, one image more of each level."""
    counts = 1.0 + (images[:, :, None] == np.arange(NUM_LEVELS)).sum(axis=0)
    return jnp.asarray(np.log(counts / counts.sum(axis=1, keepdims=True)), jnp.float32)


def loss(step: Callable[[Canvas], Categorical], images: Int32[Array, "n 64"]) -> Array:
    """Returns minus the mean log-likelihood of a pixel, in nats."""

    def of_pixel(image: Array, count: Array) -> Array:
        drawn = jnp.where(jnp.arange(NUM_PIXELS) < count, image, 0)
        return -step(Canvas(drawn, count)).log_prob(image[count])

    of_image = jax.vmap(of_pixel, (None, 0))
    return jnp.mean(jax.vmap(of_image, (0, None))(images, jnp.arange(NUM_PIXELS)))


def train(
    see: Callable[[Canvas], Array],
    widths: Sequence[int],
    images: Int32[np.ndarray, "n 64"],
    num_updates: int,
) -> Params:
    """Returns a network, trained on images by Adam with a cosine schedule; the seed is fixed."""
    key, data = jax.random.key(0), jnp.asarray(images)
    sizes = [see(empty_canvas()).size, *widths, NUM_LEVELS]
    params = [
        {
            "kernel": jax.random.normal(jax.random.fold_in(key, i), [n, m]) * (2 / n) ** 0.5,
            "bias": jnp.zeros([m]),
        }
        for i, (n, m) in enumerate(itertools.pairwise(sizes))
    ]
    optimiser = optax.adam(optax.cosine_decay_schedule(1e-3, num_updates))

    def update(carry: tuple[Any, Any], key: Array) -> tuple[tuple[Any, Any], None]:
        params, state = carry
        batch = data[jax.random.randint(key, [_BATCH_SIZE], 0, len(data))]
        slope = jax.grad(lambda params: loss(functools.partial(apply_network, see, params), batch))
        changes, state = optimiser.update(slope(params), state)
        return (optax.apply_updates(params, changes), state), None

    keys = jax.random.split(jax.random.fold_in(key, len(sizes)), num_updates)
    run = jax.jit(lambda params, keys: jax.lax.scan(update, (params, optimiser.init(params)), keys))
    return run(params, keys)[0][0]


@functools.cache
def make_step(name: str, num_updates: int) -> tuple[Any, float]:
    """Returns a step, "large", "small" or "table", and its loss on the images held out."""
    images = load_images()
    training, held_out = images[:-_HELD_OUT], images[-_HELD_OUT:]
    if name == "table":
        step = jax.tree_util.Partial(look_up, count_levels(training))
    else:
        see, widths = (see_all, _LARGE) if name == "large" else (see_neighbours, _SMALL)
        apply = functools.partial(apply_network, see)
        step = jax.tree_util.Partial(apply, train(see, widths, training, num_updates))
    return step, float(jax.jit(loss)(step, jnp.asarray(held_out)))
