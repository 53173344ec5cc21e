"""Several candidates for one position, tried in turn: the mathematics of a tree's siblings.

Candidate i is accepted with probability min(1, p_i(x) / q_i(x)). Here q_i is the distribution from
which it was drawn, given the candidates before it; p_1 is the target's distribution; and
p_(i+1) = norm(max(p_i - q_i, 0)) is what the target still lacks after a rejection. After the last
rejection the token is drawn from what is then lacking. The emitted token follows the target's
distribution, however many candidates there are.

With replacement, candidates are independent draws: multi-step speculative sampling (SpecInfer, Miao
et al., arXiv 2305.09781). Without, each is drawn from its distribution with the earlier candidates
taken out and the rest normalised, as by the Gumbel-top-k trick: recursive rejection sampling (Jeon
et al., arXiv 2402.14160). Deterministic candidates are distributions with all probability on the
token.
"""

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jspec.speculation.acceptance.chain import min_ratio, normalised_or

Distribution: TypeAlias = Float32[Array, "b v"]
Candidates: TypeAlias = Int32[Array, "b k"]
CandidateDistributions: TypeAlias = Float32[Array, "b #k v"] | None


def conditional_distributions(
    tokens: Candidates, draft_probs: CandidateDistributions, vocab_size: int, with_replacement: bool
) -> Float32[Array, "b k v"]:
    """Returns the distribution of each candidate given those before it.

    Args:
      tokens: the candidates.
      draft_probs: their distributions, or one for all; None for deterministic candidates. A
        distribution of zeros marks padding.
      vocab_size: of the distributions.
      with_replacement: whether the draws are independent.
    """
    one_hot = jax.nn.one_hot(tokens, vocab_size, dtype=jnp.float32)
    if draft_probs is None:
        return one_hot
    distributions = jnp.broadcast_to(draft_probs, one_hot.shape)
    if with_replacement:
        return distributions
    # Padding takes no token away from the candidates after it.
    one_hot = jnp.where(jnp.sum(distributions, axis=2, keepdims=True) > 0, one_hot, 0.0)
    # Taken by an earlier candidate: the running sum without the candidate's own token.
    is_taken = jnp.cumsum(one_hot, axis=1) - one_hot > 0
    distributions = jnp.where(is_taken, 0.0, distributions)
    total = jnp.sum(distributions, axis=2, keepdims=True)
    return distributions / jnp.where(total > 0, total, 1.0)


def lacking_distributions(
    target_probs: Distribution, distributions: Float32[Array, "b k v"]
) -> Float32[Array, "b k+1 v"]:
    """Returns p_1 to p_(k+1), what the target lacks before each candidate and after the last.

    Where rounding leaves nothing, the two distributions agree and the one before stays.

    Args:
      target_probs: the target's distribution.
      distributions: of the candidates, given those before.
    """
    lacking = [target_probs]
    for i in range(distributions.shape[1]):
        lacking.append(
            normalised_or(jnp.maximum(lacking[i] - distributions[:, i], 0.0), lacking[i])
        )
    return jnp.stack(lacking, axis=1)


def _probs_of_tokens(probs: Float32[Array, "b k v"], tokens: Candidates) -> Float32[Array, "b k"]:
    found = jnp.take_along_axis(probs, tokens[..., None], axis=2)[..., 0]
    return jnp.where(tokens >= 0, found, 0.0)  # NO_TOKEN is never accepted


def acceptance_probs(
    target_probs: Distribution,
    tokens: Candidates,
    draft_probs: CandidateDistributions,
    *,
    with_replacement: bool = True,
) -> Float32[Array, "b k"]:
    """Returns the probability that each candidate is accepted once those before it are rejected.

    A candidate that its own distribution could not give is rejected: once a distribution without
    replacement is used up, there is no further draw.

    Args:
      target_probs: the target's distribution.
      tokens: the candidates.
      draft_probs: see `conditional_distributions`.
      with_replacement: likewise.
    """
    distributions = conditional_distributions(
        tokens, draft_probs, target_probs.shape[1], with_replacement
    )
    target = _probs_of_tokens(lacking_distributions(target_probs, distributions)[:, :-1], tokens)
    draft = _probs_of_tokens(distributions, tokens)
    return jnp.where(draft > 0, min_ratio(target, draft), 0.0)


def next_token_probs(
    target_probs: Distribution,
    tokens: Candidates,
    draft_probs: CandidateDistributions,
    *,
    with_replacement: bool = True,
) -> Distribution:
    """Returns the distribution of the token after every candidate is rejected.

    Args:
      target_probs: the target's distribution.
      tokens: the candidates.
      draft_probs: see `conditional_distributions`.
      with_replacement: likewise.
    """
    distributions = conditional_distributions(
        tokens, draft_probs, target_probs.shape[1], with_replacement
    )
    return lacking_distributions(target_probs, distributions)[:, -1]
