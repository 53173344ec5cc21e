"""Distributions of one step, and what speculation asks of two of them: a ratio and a residual.

Anything with `sample` and `log_prob` that is a JAX pytree will do, such as the distributions of
numpyro and distrax. `Categorical` and `Gaussian` are here because for them the residual,
norm(max(target - draft, 0)), is drawn by an exact formula:

- two categoricals: by the rule of `acceptance.rejection`;
- two Gaussians of the same scales: a rejected draft is reflected in the plane half way between the
  means, in units of the scales. This is the reflection maximal coupling (Jacob, O'Leary and
  Atchadé, arXiv 1708.03625, section 4);
- all others: draw y from the target and keep it with probability 1 - min(1, draft(y) / target(y)),
  until one is kept. Its density is then target - min(target, draft), up to a factor.

With TV the total variation between the two, a draft is rejected with probability TV, and the loop
then takes 1 / TV draws on average: together one draw for each draft examined. A loop that has kept
nothing after 2^24 draws takes the target's last draw, with probability TV (1 - TV)^(2^24), below
2.2e-8 for every TV, less than the resolution of the uniform number that decides an acceptance.
"""

import inspect
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from jspec.kernels import while_any
from jspec.sampling.distribution import sample

MOST_DRAWS = 2**24


@runtime_checkable
class Distribution(Protocol):
    """What a step gives: a JAX pytree with these two methods."""

    def sample(self, rng_key: Any) -> Any:
        """Draws one value, an array; the key is consumed. It may also be called `key` or `seed`."""
        ...

    def log_prob(self, value: Any) -> Any:
        """Returns the natural logarithm of a value's probability or density, one number."""
        ...


class Categorical(struct.PyTreeNode):
    """A distribution over 0 to v - 1, given by its logits [v], which need not be normalised."""

    logits: Float[Array, "v"]

    @property
    def num_categories(self) -> int:
        """How many values there are, v."""
        return self.logits.shape[-1]

    @property
    def probs(self) -> Float32[Array, "v"]:
        """The probabilities, [v], float32."""
        return jax.nn.softmax(self.logits.astype(jnp.float32))

    def sample(self, rng_key: Array) -> Int32[Array, ""]:
        """Draws a category; the key is consumed. It is -1 where the logits are NaN."""
        return sample(self.probs, gumbel(rng_key, self.num_categories))

    def log_prob(self, value: Int[Array, ""]) -> Float32[Array, ""]:
        """Returns the natural logarithm of a category's probability."""
        return jax.nn.log_softmax(self.logits.astype(jnp.float32))[value]


class Gaussian(struct.PyTreeNode):
    """A Gaussian of independent numbers: a mean of any shape, and scales above 0 of that shape.

    One scale for all numbers will do. Computed in float32 or wider.
    """

    mean: Float[Array, "..."] | float
    scale: Float[Array, "..."] | float

    @property
    def moments(self) -> tuple[Array, Array]:
        """The mean, [...], and the scale, of its shape or []: float32 or wider, of one type."""
        dtype = jnp.promote_types(jnp.result_type(self.mean), jnp.float32)
        mean, scale = jnp.asarray(self.mean, dtype), jnp.asarray(self.scale, dtype)
        return jnp.broadcast_to(mean, jnp.broadcast_shapes(mean.shape, scale.shape)), scale

    def sample(self, rng_key: Array) -> Float[Array, "..."]:
        """Draws a value; the key is consumed."""
        mean, scale = self.moments
        return mean + scale * jax.random.normal(rng_key, mean.shape, mean.dtype)

    def log_prob(self, value: Float[Array, "..."]) -> Float[Array, ""]:
        """Returns the logarithm of the density at a value; NaN if a scale is not above 0."""
        mean, scale = self.moments
        # That of a negative scale would be the density of its absolute value.
        scale = jnp.where(scale > 0, scale, jnp.nan)
        return jnp.sum(jax.scipy.stats.norm.logpdf(value, mean, scale))


def gumbel(rng_key: Array, count: int) -> Float32[Array, "v"]:
    """Returns standard Gumbel noise; the key is consumed."""
    # mode="high" for the reason that `sampling.noise` gives.
    return jax.random.gumbel(rng_key, [count], jnp.float32, mode="high")


def draw(distribution: Any, rng_key: Array) -> Array:
    """Draws one value; distrax and TFP call the key `seed`, and take it by name."""
    takes_seed = "seed" in inspect.signature(distribution.sample).parameters
    sampled = distribution.sample(seed=rng_key) if takes_seed else distribution.sample(rng_key)
    value = jnp.asarray(sampled)
    # A weakly typed number, as of `jnp.where(is_head, 1, 0)`, is of no other type than its equal.
    return jax.lax.convert_element_type(value, value.dtype)


def log_prob(distribution: Any, value: Array) -> Float[Array, ""]:
    """Returns the logarithm of a value's probability or density; outside the support -inf.

    There numpyro's distributions return any number, so that a guess outside g's would be kept.
    """
    answer = distribution.log_prob(value)
    support: Any = getattr(distribution, "support", None)
    if not callable(support) or inspect.ismethod(support):  # a method's arguments are not known
        return answer
    is_inside = jnp.all(jnp.asarray(support(value))) | jnp.isnan(answer)  # NaN stays an error
    return jnp.where(is_inside, answer, -jnp.inf)


def log_ratio(target: Any, draft: Any, value: Array) -> Float[Array, ""]:
    """Returns log(target(value) / draft(value))."""
    if type(target) is type(draft) is Gaussian:
        # From the difference of the means: two log-densities of many dimensions would cancel.
        (mean, scale), (draft_mean, draft_scale) = target.moments, draft.moments
        z, draft_z = (value - mean) / scale, (value - draft_mean) / draft_scale
        return jnp.sum(jnp.log(draft_scale / scale) + (draft_z - z) * (draft_z + z) / 2)
    return log_prob(target, value) - log_prob(draft, value)


def reflect(target: Gaussian, draft: Gaussian, value: Array) -> Array:
    """Returns a rejected draft, reflected half way between the means; the scales are the same."""
    (mean, scale), (draft_mean, _) = target.moments, draft.moments
    apart, z = (draft_mean - mean) / scale, (value - draft_mean) / scale
    square = jnp.sum(apart**2)  # 0 where the means are equal: nothing is rejected then
    along = jnp.sum(apart * z) / jnp.where(square > 0, square, 1)
    return mean + scale * (z - 2 * along * apart)


def draw_after(
    target: Any, draft: Any, value: Array, is_rejected: Bool[Array, ""], rng_key: Array
) -> Array:
    """Draws the value that follows the kept drafts; the key is consumed.

    It is of norm(max(target - draft, 0)) where `value`, the first draft that was not kept,
    `is_rejected`; else all drafts were kept, and it is of the target.
    """

    def attempt(index: Array) -> tuple[Array, Array]:
        draw_key, keep_key = jax.random.split(jax.random.fold_in(rng_key, index))
        candidate = draw(target, draw_key)
        # Negated, so that NaN ends the loop.
        uniform = jax.random.uniform(keep_key, [], jnp.float32)
        return candidate, ~(jnp.log(uniform) < -log_ratio(target, draft, candidate))

    def again(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        index = carry[0]
        candidate, is_kept = attempt(index)
        return index + 1, ~is_kept & (index + 1 < MOST_DRAWS), candidate

    candidate, is_kept = attempt(jnp.int32(0))
    is_reflected = jnp.bool_(False)
    if type(target) is type(draft) is Gaussian:
        is_reflected = jnp.all(target.moments[1] == draft.moments[1])
    is_searching = is_rejected & ~is_reflected & ~is_kept
    carry = (jnp.int32(1), is_searching, candidate)
    candidate = while_any(lambda carry: carry[1][None], again, carry)[2]
    if type(target) is type(draft) is Gaussian:
        return jnp.where(is_rejected & is_reflected, reflect(target, draft, value), candidate)
    return candidate
