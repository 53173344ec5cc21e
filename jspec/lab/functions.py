"""Chains that are no text, and what guesses save in them: a table, and for images a picture.

Digits: small images, pixel after pixel, 8 x 8 of 17 grey levels (scikit-learn's set). g is a
network that sees all pixels before, f one that sees the four neighbours among them, or a table of
how often each pixel has each level. All are trained here, in a minute or two.

Two chains are on a posterior whose likelihood is costly: that of a logistic regression in which few
of the 20,000 outcomes are 1, so that it is skewed. The guess puts a quadratic in the place of the
log-likelihood, that of Laplace's approximation, and never reads the data. Positions are in units in
which it is -|z|^2 / 2. A Metropolis step decides: 1 moves to a proposal, whose noise follows from
the state, 0 stays. So a surrogate speculates which decisions come, and all likelihoods that they
lead to are computed side by side; compare predictive prefetching (Angelino et al., arXiv
1403.7265). An unadjusted Langevin step is a Gaussian around z plus the gradient, and shows the
residual by reflection.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jaxtyping import Array, Float32, Int32

from jspec.common.errors import InputError
from jspec.common.typing import Params
from jspec.lab.experiments.spec import FunctionsSpec
from jspec.speculation.distributions import Categorical, Gaussian
from jspec.speculation.functions import Speculation, latest, speculate

_NUM_CALLS = 50  # timed of vmapped g
_NUM_PICTURES = 12

WIDTH, NUM_LEVELS = 8, 17
NUM_PIXELS = WIDTH**2
_NEIGHBOURS = (1, WIDTH - 1, WIDTH, WIDTH + 1)  # left, and the three above: so far back
_HELD_OUT, _BATCH_SIZE = 297, 16
_LARGE, _SMALL = (512, 512), (32,)  # widths of the hidden layers

_NUM_OUTCOMES, _NUM_FEATURES, _INTERCEPT = 20_000, 10, -6.0
_LANGEVIN_STEP = 0.1
_NEWTON_STEPS = 30


class Chain(NamedTuple):
    """Two functions, how the state goes on, and where it begins; see `speculate`."""

    f: Any
    g: Any
    update: Callable[[Any, Any], Any]
    state: Any
    notes: list[str]


def make_chain(spec: FunctionsSpec) -> Chain:
    """Returns the chain, its networks trained."""
    if spec.chain == "digits":
        (g, large), (f, small) = (
            make_step(name, spec.num_updates) for name in ("large", spec.guess)
        )
        note = f"Held out: {large:.3f} nats a pixel for g, {small:.3f} for f."
        return Chain(f, g, draw_pixel, empty_canvas(), [note])
    by_data, guesses = _ON_POSTERIOR[spec.chain]
    g, f = jax.tree_util.Partial(by_data, of := make_posterior()), guesses[spec.guess]
    if spec.chain == "metropolis":
        return Chain(f, g, move, start_walk(jax.random.key(1)), [])
    return Chain(f, g, latest, jnp.zeros_like(of.mode), [])


def measure(spec: FunctionsSpec) -> dict[str, Any]:
    """Returns a table of what each number of guesses gives, and images with whose pixels are whose.

    `columns`, `units`, `rows` and `notes` are a table's; `images` are [n 64] levels, `is_guess` the
    same for the pixels that f guessed, at the largest number of guesses.
    """
    chain = make_chain(spec)
    rows, results = [], []
    for number in spec.num_drafts:
        for compiled in (number, 0):
            _run(spec, chain, compiled, 0)
        pairs = [(_run(spec, chain, number, seed), _run(spec, chain, 0, seed))
                 for seed in range(spec.num_chains)]  # fmt: skip
        results = [result for (result, _), _ in pairs]
        calls = sum(int(result.num_rounds) for result in results)
        kept = sum(int(result.num_accepted) for result in results)
        proposed = sum(int(result.num_proposed) for result in results)
        speed = statistics.median(alone / seconds for (_, seconds), (_, alone) in pairs)
        total = spec.num_chains * spec.num_steps
        rows.append([number, total / calls, kept / proposed, _call_cost(chain, number + 1), speed])
    note = (
        f"{spec.num_chains} chains of {spec.num_steps} steps, rule {spec.acceptance}. Calls and "
        "guesses are counted, and the same in every run; the last two columns are times on this "
        "machine."
    )
    record = {
        "columns": ["guesses a round", "values per call of g", "guesses kept",
                    "call on all states", "speed"],
        "units": ["", "", "", "times a call on one", "times g alone"],
        "rows": rows,
        "notes": [note, *chain.notes],
    }  # fmt: skip
    if spec.chain == "digits":
        shown = results[:_NUM_PICTURES]
        rest = 0, NUM_PIXELS - spec.num_steps  # an image that is not drawn to its end
        record["images"] = [np.pad(result.values, rest).tolist() for result in shown]
        record["is_guess"] = [np.pad(result.is_guess, rest).tolist() for result in shown]
    return record


def _run(
    spec: FunctionsSpec, chain: Chain, num_drafts: int, seed: int
) -> tuple[Speculation, float]:
    begin = time.perf_counter()
    result = speculate(
        chain.f, chain.g, chain.state, jax.random.key(seed), num_steps=spec.num_steps,
        num_drafts=num_drafts, update=chain.update, acceptance=spec.acceptance,
    )  # fmt: skip
    result.values.block_until_ready()
    return result, time.perf_counter() - begin


def _call_cost(chain: Chain, count: int) -> float:
    """Returns how many times longer a call of g on this many states takes than on one state."""
    mapped = jax.jit(jax.vmap(chain.g))
    seconds: list[list[float]] = [[], []]
    states = [
        jax.tree.map(lambda leaf, n=n: jnp.stack([jnp.asarray(leaf)] * n), chain.state)
        for n in (1, count)
    ]
    for repeat in range(_NUM_CALLS):
        for times, state in zip(seconds, states, strict=True):
            begin = time.perf_counter()
            jax.block_until_ready(mapped(state))
            if repeat:  # the first compiles
                times.append(time.perf_counter() - begin)
    return statistics.median(seconds[1]) / statistics.median(seconds[0])


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


class Posterior(NamedTuple):
    """A posterior in the units of its Laplace approximation.

    Attributes:
      features: signed by the outcome and in those units, [n d].
      offsets: of the same at the mode, [n].
      mode: in the prior's units, [d].
      root: from those units to the prior's, [d d].
    """

    features: Float32[Array, "n d"]
    offsets: Float32[Array, "n"]
    mode: Float32[Array, "d"]
    root: Float32[Array, "d d"]

    def terms(self, position: Float32[Array, "d"]) -> Float32[Array, "m"]:
        """Returns what adds up to the log-density, a number an outcome, and the prior's."""
        likelihood = jax.nn.log_sigmoid(self.features @ position + self.offsets)
        return jnp.append(likelihood, -jnp.sum((self.mode + self.root @ position) ** 2) / 2)


class Walk(struct.PyTreeNode):
    """The state of a Metropolis chain; its key gives each step's proposal."""

    position: Float32[Array, "d"]
    step: Int32[Array, ""]
    key: Array


@functools.cache
def make_posterior(seed: int = 0, num_outcomes: int = _NUM_OUTCOMES) -> Posterior:
    """Returns the posterior of drawn data under a standard Gaussian prior."""
    return _draw_posterior(jax.random.key(seed), num_outcomes)


@functools.partial(jax.jit, static_argnames="num_outcomes")
def _draw_posterior(key: Array, num_outcomes: int) -> Posterior:
    keys = jax.random.split(key, 3)
    features = jax.random.normal(keys[0], [num_outcomes, _NUM_FEATURES])
    features = features.at[:, 0].set(_INTERCEPT)
    truth = jax.random.normal(keys[1], [_NUM_FEATURES]).at[0].set(1.0)
    is_one = jax.random.uniform(keys[2], [num_outcomes]) < jax.nn.sigmoid(features @ truth)
    signed = jnp.where(is_one, 1.0, -1.0)[:, None] * features

    def precision(weights: Array) -> Array:
        likely = jax.nn.sigmoid(signed @ weights)
        return (signed.T * (likely * (1 - likely))) @ signed + jnp.eye(_NUM_FEATURES)

    def newton(_: Array, weights: Array) -> Array:
        gradient = signed.T @ jax.nn.sigmoid(-(signed @ weights)) - weights
        return weights + jnp.linalg.solve(precision(weights), gradient)

    mode = jax.lax.fori_loop(0, _NEWTON_STEPS, newton, truth)
    root = jnp.linalg.cholesky(jnp.linalg.inv(precision(mode)))
    return Posterior(signed @ root, signed @ mode, mode, root)


def start_walk(key: Array) -> Walk:
    """Returns a walk at the mode; the key is consumed."""
    return Walk(jnp.zeros([_NUM_FEATURES]), jnp.int32(0), key)


def proposal_of(walk: Walk) -> Float32[Array, "d"]:
    """Returns where the walk may go next."""
    noise = jax.random.normal(jax.random.fold_in(walk.key, walk.step), walk.position.shape)
    return walk.position + 2.4 / _NUM_FEATURES**0.5 * noise


def move(walk: Walk, decision: Array) -> Walk:
    """Returns the walk after a decision: `update` of the chain."""
    position = jnp.where(decision == 1, proposal_of(walk), walk.position)
    return walk.replace(position=position, step=walk.step + 1)


def decide(difference: Array) -> Categorical:
    """Returns the decisions' distribution: 1 with probability min(1, exp(difference))."""
    accept = jnp.exp(jnp.minimum(difference, 0.0))
    return Categorical(jnp.log(jnp.stack([1 - accept, accept])))


def metropolis_by_data(posterior: Posterior, walk: Walk) -> Categorical:
    """Decides by the posterior itself: reads all data."""
    # Term by term: two sums of 20,000 terms would cancel.
    terms = posterior.terms(proposal_of(walk)) - posterior.terms(walk.position)
    return decide(jnp.sum(terms))


def metropolis_by_quadratic(walk: Walk) -> Categorical:
    """Decides by Laplace's approximation."""
    return decide((jnp.sum(walk.position**2) - jnp.sum(proposal_of(walk) ** 2)) / 2)


def metropolis_by_coin(walk: Walk) -> Categorical:
    """Decides by a coin that falls on 1 about as often as the chain moves: a poor guess."""
    del walk
    return decide(jnp.log(jnp.float32(0.25)))


def langevin_by_data(posterior: Posterior, position: Float32[Array, "d"]) -> Gaussian:
    """Returns a Langevin step along the posterior's gradient."""
    gradient = jax.grad(lambda z: jnp.sum(posterior.terms(z)))(position)
    return _langevin(position, gradient)


def langevin_by_quadratic(position: Float32[Array, "d"]) -> Gaussian:
    """Returns a Langevin step along the gradient of Laplace's approximation."""
    return _langevin(position, -position)


def langevin_by_nothing(position: Float32[Array, "d"]) -> Gaussian:
    """Returns a Langevin step without a gradient: a poor guess."""
    return _langevin(position, jnp.zeros_like(position))


def _langevin(position: Array, gradient: Array) -> Gaussian:
    return Gaussian(position + _LANGEVIN_STEP * gradient, (2 * _LANGEVIN_STEP) ** 0.5)


_ON_POSTERIOR: dict[str, tuple[Callable[..., Any], dict[str, Callable[..., Any]]]] = {
    "metropolis": (
        metropolis_by_data, {"quadratic": metropolis_by_quadratic, "coin": metropolis_by_coin}
    ),
    "langevin": (
        langevin_by_data, {"quadratic": langevin_by_quadratic, "nothing": langevin_by_nothing}
    ),
}  # fmt: skip
