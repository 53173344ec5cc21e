"""A rule may name the block slots it keeps; a chain's are in order already."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jspec.drafters import ModelDrafter
from jspec.sampling.distribution import SamplingSettings
from jspec.speculation.acceptance import get_rule
from jspec.speculation.step import speculative_step
from jspec.speculation.types import ModelParams, SpecState
from tests.tiny import CONFIG, empty_cache


def _with_path(rule):
    def accept(target_probs, proposal, noise):
        path = jnp.arange(proposal.width + 1, dtype=jnp.int32)
        path = jnp.broadcast_to(path, (proposal.tokens.shape[0], proposal.width + 1))
        return rule.accept(target_probs, proposal, noise).replace(path=path)

    return rule._replace(accept=accept)


def test_the_path_of_a_chain_changes_nothing(tiny_pair):
    """Guards against tokens, hidden states and cache slots that follow a path differently."""
    size = CONFIG.vocab_size
    drafter = ModelDrafter(tiny_pair.apply, empty_cache, 3, size, size)
    zeros, ones = jnp.zeros([4], jnp.int32), jnp.ones([4], jnp.float32)
    settings = SamplingSettings(ones, zeros, ones, 0 * ones)
    seed = jnp.arange(4, dtype=jnp.uint32)
    outcomes = []
    for rule in (get_rule("rejection"), _with_path(get_rule("rejection"))):
        state = SpecState(
            empty_cache(4, 40), drafter.init(4, 40), zeros, seed, settings, ones,
            zeros[:, None] - 1, zeros + 30, zeros > 0,
        )  # fmt: skip
        step = functools.partial(
            speculative_step, target=tiny_pair.apply, drafter=drafter, rule=rule
        )
        params = ModelParams(tiny_pair.target, tiny_pair.draft)
        for _ in range(3):
            state, info = jax.jit(step)(params, state)
        outcomes.append((state.replace(draft=None), info))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *outcomes)
    assert outcomes[0][1].num_tokens.max() > 1, "nothing was accepted: nothing is shown"
