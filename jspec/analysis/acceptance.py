"""How often drafts are kept, in theory."""

import jax.numpy as jnp
from jaxtyping import Array, Float32


def expected_acceptance(
    target_probs: Float32[Array, "... v"], draft_probs: Float32[Array, "... v"]
) -> Float32[Array, "..."]:
    """Returns how likely speculative sampling keeps a draft drawn from a law.

        alpha = E[min(1, target(x) / draft(x))] = sum over x of min(target(x), draft(x))

    which is 1 - D(target, draft), D the total variation; its mean over contexts is the expected
    acceptance rate (Leviathan et al., arXiv 2211.17192, Cor. 3.6).

    Args:
      target_probs: laws of the target, [... v]; normalised.
      draft_probs: the laws that drafts are drawn from, [... v]; normalised. The law of a draft that
        follows from the context alone is one-hot.
    """
    return jnp.sum(jnp.minimum(target_probs, draft_probs), axis=-1)
