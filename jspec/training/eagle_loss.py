"""What a head of EAGLE-3 is trained for: the target's distribution at every step of every chain."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jspec.common.typing import Params
from jspec.drafters.heads.eagle_module import EagleConfig
from jspec.training.chain_loss import StepMetrics, chain_loss, see_everywhere
from jspec.training.eagle_unroll import head_logits, unroll
from jspec.training.target_states import TargetStates


def eagle_loss(
    params: Params,
    states: TargetStates,
    *,
    config: EagleConfig,
    is_known: Bool[Array, "v"],
    num_steps: int,
    decay: float,
) -> tuple[Float32[Array, ""], StepMetrics]:
    """Returns the loss of a batch, and what it is made of (arXiv 2503.01840, section 3).

    Args:
      params: the head's.
      states: the target's.
      config: the head's.
      is_known: which of the target's tokens the head can propose, [v].
      num_steps: calls of each chain.
      decay: weight of each step relative to the one before.
    """
    outputs = unroll(config, params, states.embedded, states.features, states.places, num_steps)
    return chain_loss(
        lambda step: head_logits(params, outputs[step]),
        see_everywhere(states, is_known),
        num_steps=num_steps,
        decay=decay,
    )


def known_tokens(config: EagleConfig, ids: Int32[Array, "u"]) -> Bool[Array, "v"]:
    """Returns which of the target's tokens a head with those ids can propose."""
    return jnp.zeros([config.target_vocab_size], bool).at[ids].set(True)
