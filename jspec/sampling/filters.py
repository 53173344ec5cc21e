"""The filters top-k, top-p and min-p, as masks over the vocabulary.

None of them sorts the vocabulary. Each keeps the tokens whose logits are at or above a threshold,
and tokens that tie with the last one kept are kept too. So a mask depends on the logits alone, and
never on the order in which equal ones are met.

Of split logits top-k marks a device's own part. The threshold comes from the largest of each part,
which are enough unless a row keeps more than `MOST_OF_A_PART`; then it comes from all.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jspec.common.typing import AnyLogits, Logits
from jspec.kernels import SplitLogits, own_part, smallest_rank, whole

MOST_OF_A_PART = 64
_ABOVE_ZERO = float(jnp.finfo(jnp.float32).tiny)


def top_k_mask(logits: AnyLogits, top_k: Int32[Array, "b 1 1"]) -> Bool[Array, "b t u"]:
    """Marks the `top_k` largest logits and their ties; all of them where `top_k` is 0."""

    def threshold(logits: Logits) -> Int32[Array, "b t 1"]:
        counts = jnp.ones_like(logits)  # float32 counts exactly up to 2^24, beyond any vocabulary
        return smallest_rank(_rank(logits), counts, top_k.astype(jnp.float32))

    if isinstance(logits, SplitLogits):
        count = min(MOST_OF_A_PART, logits.own.shape[-1])

        def of_largest(logits: SplitLogits) -> Int32[Array, "b t 1"]:
            return threshold(whole(logits.replace(own=jax.lax.top_k(logits.own, count)[0])))

        def of_all(logits: SplitLogits) -> Int32[Array, "b t 1"]:
            return threshold(whole(logits))

        last = jax.lax.cond((top_k <= count).all(), of_largest, of_all, logits)
    else:
        last = threshold(logits)
    return (_rank(own_part(logits)) <= last) | (top_k <= 0)


def top_p_mask(logits: Logits, top_p: Float32[Array, "b 1 1"]) -> Bool[Array, "b t v"]:
    """Marks the fewest most likely tokens that together reach `top_p`, and their ties."""
    rank = _rank(logits)
    reached = jnp.maximum(top_p, _ABOVE_ZERO)  # the empty set is never enough
    return (rank <= smallest_rank(rank, jax.nn.softmax(logits), reached)) | (top_p >= 1)


def min_p_mask(logits: Logits, min_p: Float32[Array, "b 1 1"]) -> Bool[Array, "b t v"]:
    """Marks the tokens at least `min_p` times as likely as the best one, whose logit is 0."""
    return logits >= jnp.log(min_p)


def _rank(logits: Logits) -> Int32[Array, "b t v"]:
    """Returns integers that fall as the logits grow, one for each float."""
    # From the bits, not from a difference or a softmax: XLA computes those anew wherever they are
    # used, may fuse a multiplication into them in one place and not in another, and a token on the
    # threshold would be cut off.
    bits = jax.lax.bitcast_convert_type(jnp.where(logits == 0, 0.0, logits), jnp.int32)
    # Floats compare like integers of sign and magnitude; this makes two's complement of them.
    return ~jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
