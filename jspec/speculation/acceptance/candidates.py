"""Several candidates for one position, tried in turn: the mathematics of a tree's siblings.

Candidate i is accepted with probability min(1, p_i(x) / q_i(x)). Here q_i is the distribution from
which it was drawn, given the candidates before it; p_1 is the target's distribution; and
p_(i+1) = norm(max(p_i - q_i, 0)) is what the target still lacks after a rejection. After the last
rejection the token is drawn from what is then lacking. The emitted token follows the target's
distribution, however many candidates there are.

With replacement, candidates are independent draws: multi-step speculative sampling (SpecInfer, Miao
et al., arXiv 2305.09781). Without, each is drawn from its distribution with the earlier candidates
taken out and the rest normalised, as by the Gumbel-top-k trick: recursive rejection sampling (Jeon
et al., arXiv 2402.14160).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jspec.speculation.acceptance.chain import min_ratio, normalised_or


def candidate_probs(
    target_probs: Float32[Array, "b v"],
    tokens: Int32[Array, "b k"],
    draft_probs: Float32[Array, "b #k v"] | None,
    *,
    with_replacement: bool = True,
) -> tuple[Float32[Array, "b k"], Float32[Array, "b v"]]:
    """Returns the probabilities that decide among candidates, and the next token's distribution.

    A candidate that its own distribution could not give is rejected: once a distribution without
    replacement is used up, there is no further draw.

    Args:
      target_probs: the target's distribution.
      tokens: the candidates.
      draft_probs: their distributions, or one for all; None for deterministic candidates, whose
        distributions have all probability on the token. A distribution of zeros marks padding.
      with_replacement: whether the draws are independent.

    Returns:
      The probability that each candidate is accepted once those before it are rejected; and the
      distribution of the token after all of them are.
    """
    one_hot = jax.nn.one_hot(tokens, target_probs.shape[1], dtype=jnp.float32)
    distributions = one_hot if draft_probs is None else jnp.broadcast_to(draft_probs, one_hot.shape)
    if draft_probs is not None and not with_replacement:
        distributions = _without_earlier(one_hot, distributions)
    lacking, accepted = target_probs, []
    for i in range(tokens.shape[1]):
        target, draft = (
            jnp.take_along_axis(probs, tokens[:, i : i + 1], axis=1)[:, 0]
            for probs in (lacking, distributions[:, i])
        )
        is_possible = (draft > 0) & (tokens[:, i] >= 0)  # NO_TOKEN is never accepted
        accepted.append(jnp.where(is_possible, min_ratio(target, draft), 0.0))
        # Where rounding leaves nothing, the two distributions agree and the one before stays.
        lacking = normalised_or(jnp.maximum(lacking - distributions[:, i], 0.0), lacking)
    return jnp.stack(accepted, axis=1), lacking


def _without_earlier(
    one_hot: Float32[Array, "b k v"], distributions: Float32[Array, "b k v"]
) -> Float32[Array, "b k v"]:
    """Takes the tokens of earlier candidates out of each candidate's distribution."""
    # Padding takes no token away from the candidates after it.
    one_hot = jnp.where(jnp.sum(distributions, axis=2, keepdims=True) > 0, one_hot, 0.0)
    # Taken by an earlier candidate: the running sum without the candidate's own token.
    is_taken = jnp.cumsum(one_hot, axis=1) - one_hot > 0
    distributions = jnp.where(is_taken, 0.0, distributions)
    total = jnp.sum(distributions, axis=2, keepdims=True)
    return distributions / jnp.where(total > 0, total, 1.0)
