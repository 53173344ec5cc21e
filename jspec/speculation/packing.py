"""Blocks of different widths side by side in one call of the target.

    row 0   last  d1  d2         call    last  d1  d2  last  last  d1  (padding)
    row 1   last                 row      0    0   0    1     2    2
    row 2   last  d1             place    0    1   2    0     0    1

Where products compute, a call costs by its tokens. Blocks as wide as the widest row's are padded;
side by side there is no padding but at the end of the call, whose size is one of a few. Rows that
are done have no token in it.

To the model each token is its own row, whose earlier tokens are in the cache already; see
`PackedKVCache`. In the C++ kernels no row of a product or of attention depends on the rows beside
it, so a token's logits are the same, bit for bit, in any batch and at any place.
"""

from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int32

from jspec.common.typing import AnyLogits, Params, RowCounts, RowSeeds, TargetProbs
from jspec.kernels import whole
from jspec.sampling.distribution import best_token, draw_next
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.acceptance.chain import match_tokens
from jspec.speculation.types import AcceptanceRule, Proposal, Verdict


class Packing(struct.PyTreeNode):
    """Where the tokens of blocks [b t] are in a call on n tokens.

    Attributes:
      row: of each token of the call, [n]; padding has the row of the last token before it.
      place: of each token in its row's block, [n]; padding's is after the block.
      index: where the tokens of the blocks are in the call, [b t]. A token that is not in it has
        the place of one that is.
    """

    row: Int32[Array, "n"]
    place: Int32[Array, "n"]
    index: Int32[Array, "b t"]

    @classmethod
    def of(cls, counts: RowCounts, size: int, width: int) -> Self:
        """Returns the packing of blocks of `width` tokens, of which `counts` are in the call.

        All of them together are at most `size`, the tokens of the call.
        """
        ends = jnp.cumsum(counts)
        starts, total = ends - counts, ends[-1]
        token = jnp.arange(size)
        # The row of a token is the number of rows that end before it or where it is.
        last = jnp.minimum(token, jnp.maximum(total - 1, 0))
        row = jnp.sum(ends <= last[:, None], axis=1, dtype=jnp.int32)
        row = jnp.minimum(row, counts.shape[0] - 1)
        place = jnp.where(token < total, token - starts[row], width).astype(jnp.int32)
        within = jnp.clip(jnp.arange(width), 0, jnp.maximum(counts - 1, 0)[:, None])
        return cls(row, place, jnp.minimum(starts[:, None] + within, size - 1).astype(jnp.int32))

    def pack(self, values: Array) -> Array:
        """Returns of values of blocks [b t ...] those of the call's tokens, [n 1 ...]."""
        place = jnp.minimum(self.place, values.shape[1] - 1)
        return values[self.row, place][:, None]

    def pack_rows(self, tree: Any) -> Any:
        """Returns of leaves [b ...] those of each token's row, [n ...]."""
        return jax.tree.map(lambda leaf: leaf[self.row], tree)

    def unpack(self, values: Any) -> Any:
        """Returns of leaves [n 1 ...] those of blocks, [b t ...].

        A token that is not in the call has the values of another, which mean nothing.
        """
        return jax.tree.map(lambda leaf: leaf[self.index, 0], values)

    def call(
        self, target: Any, params: Params, inputs: Array, cache: Any, **options: Any
    ) -> tuple[AnyLogits, Array, Any]:
        """Calls the target on the tokens or hidden states [b t ...] of blocks that are in the call.

        Returns its logits [n 1 v], hidden states of blocks [b t d] or [b t l d], and the cache.
        """
        packed = cache.side_by_side(self.row, self.place)
        logits, hidden, packed = target(params, self.pack(inputs), packed, **options)
        return logits, self.unpack(hidden), cache.joined(packed)


def judge_packed(
    rule: AcceptanceRule,
    packing: Packing,
    logits: AnyLogits,
    settings: SamplingSettings,
    proposal: Proposal,
    seed: RowSeeds,
    position: RowCounts,
) -> Verdict:
    """Decides as `round.judge` does for chains, from logits [n 1 v] that no processor is to see.

    Work over the vocabulary is done for the tokens of the call only.
    """
    rows = packing.pack_rows(settings)

    def by_draws() -> Verdict:
        at = packing.pack_rows((seed, position))
        tokens, _ = draw_next(logits[:, 0], rows, at[0], at[1] + packing.place)
        return match_tokens(packing.unpack(tokens[:, None]), proposal)

    def by_distribution() -> Verdict:
        probs: TargetProbs = packing.unpack(rule.distribution(whole(logits), rows))
        width, is_random = proposal.width, settings.is_random
        noise = rule.noise.acceptance(seed, position, width, probs.shape[-1], is_random)
        return rule.accept(probs, proposal.as_judged(), noise)

    def by_match() -> Verdict:
        return match_tokens(packing.unpack(best_token(logits)), proposal)

    if rule.draws_only:  # with plain decoding's noise, which each position has for itself
        return by_draws()
    if not rule.matches_at_zero:
        return by_distribution()
    return jax.lax.cond(settings.is_random, by_distribution, by_match)
