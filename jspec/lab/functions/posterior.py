"""Two chains on a posterior whose likelihood is costly: Metropolis, and Langevin steps.

The posterior is that of a logistic regression in which few of the 20,000 outcomes are 1, so that it
is skewed. The guess puts a quadratic in the place of the log-likelihood, that of Laplace's
approximation, and never reads the data. Positions are in units in which it is -|z|^2 / 2.

A Metropolis step decides: 1 moves to a proposal, whose noise follows from the state, 0 stays. So a
surrogate speculates which decisions come, and all likelihoods that they lead to are computed side
by side; compare predictive prefetching (Angelino et al., arXiv 1403.7265). An unadjusted Langevin
step is a Gaussian around z plus the gradient, and shows the residual by reflection.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float32, Int32

from jspec.speculation.distributions import Categorical, Gaussian

_NUM_OUTCOMES, _NUM_FEATURES, _INTERCEPT = 20_000, 10, -6.0
_LANGEVIN_STEP = 0.1
_NEWTON_STEPS = 30


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
