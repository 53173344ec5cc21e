"""How many drafts a row asks for, from its own history and recorded costs alone.

A round of n drafts emits 1 + a + a·l + a·l² + ... tokens on average: a is the probability that
the first draft is kept and l that a later one is, once those before it are. Of a few numbers (those
for which a verify call is compiled) the one that maximises tokens per second is taken: Theorem 3.8
of Leviathan et al. (arXiv 2211.17192) with measured costs in the place of c. 0 is a plain step.

A drafter with a cache of its own may lag: before it drafts again it reads what it has missed, the
prompt at first. That takes a while once, and is spread over the tokens that are still to come: as
many as the answer has so far, or the room that is left where that is less. So an answer has to grow
before a dear drafter reads a long prompt for it.

Each row estimates a and l from its own rounds, for each kind of proposal apart. The past fades with
every round towards what was assumed before the first one, so that a drafter which was switched off
is tried again. No clock is read: the same history and the same costs give the same choice.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float32, Int32

from jspec.common.typing import RowCounts, RowFlags

_MEMORY = 0.97  # what is left of an observation a round later
_PRIOR_WEIGHT = 1.5  # the assumption counts like so many observed drafts


class Kind(NamedTuple):
    """A kind of proposal, whose drafts are kept about equally often.

    Attributes:
      drafter: who makes it; kinds of one drafter cost the same.
      first: how often the first draft is kept, as far as one knows before having tried.
      later: how often a draft is kept once those before it are, likewise.
      most: drafts that such a proposal can have.
    """

    drafter: str
    first: float
    later: float
    most: int = 2**31 - 1


def drafters_of(kinds: Sequence[Kind]) -> list[str]:
    """Returns the drafters that make proposals of those kinds, in order, each once."""
    return list(dict.fromkeys(kind.drafter for kind in kinds))


class Control(struct.PyTreeNode):
    """The choice of a number of drafts, for each row.

    Attributes:
      costs: seconds of a round with each of the numbers, by drafter, [b m c].
      reading: seconds that a drafter takes for each token that it has missed, [b m].
      num_emitted: tokens of the answer so far, [b].
      kept: drafts kept of each kind, first and later ones, fading, [b k 2].
      tried: drafts whose turn came, likewise.
      forced: a number for each kind where it is at least 0: no choice, [b k].
      assumed: what `kept / tried` is taken to be at first, k pairs.
      most: drafts that a proposal of each kind can have.
      drafter_of: the drafter of each kind, an index into `costs`.
      numbers: the numbers to choose from, rising from 0.
    """

    costs: Float32[Array, "b m c"]
    reading: Float32[Array, "b m"]
    num_emitted: RowCounts
    kept: Float32[Array, "b k 2"]
    tried: Float32[Array, "b k 2"]
    forced: Int32[Array, "b k"]
    assumed: tuple[tuple[float, float], ...] = struct.field(pytree_node=False)
    most: tuple[int, ...] = struct.field(pytree_node=False)
    drafter_of: tuple[int, ...] = struct.field(pytree_node=False)
    numbers: tuple[int, ...] = struct.field(pytree_node=False)

    @classmethod
    def init(cls, batch_size: int, *, kinds: Sequence[Kind], numbers: Sequence[int]) -> Self:
        """Returns rows without a history, all of whose rounds cost the same.

        Args:
          batch_size: rows.
          kinds: the drafter's.
          numbers: of drafts, rising from 0.
        """
        drafters = drafters_of(kinds)
        counts = jnp.zeros([batch_size, len(kinds), 2], jnp.float32)
        return cls(
            costs=jnp.ones([batch_size, len(drafters), len(numbers)], jnp.float32),
            reading=jnp.zeros([batch_size, len(drafters)], jnp.float32),
            num_emitted=jnp.ones([batch_size], jnp.int32),  # the prefill's
            kept=counts,
            tried=counts,
            forced=jnp.full([batch_size, len(kinds)], -1, jnp.int32),
            assumed=tuple((kind.first, kind.later) for kind in kinds),
            most=tuple(kind.most for kind in kinds),
            drafter_of=tuple(drafters.index(kind.drafter) for kind in kinds),
            numbers=tuple(numbers),
        )

    def choose(self, kind: RowCounts, lag: RowCounts, room: RowCounts) -> RowCounts:
        """Returns how many drafts each row wants, one of `numbers`, [b].

        Args:
          kind: of the proposal, [b].
          lag: tokens that its drafter has to read first, [b]; see `lag_of`.
          room: tokens that may still be emitted, [b].
        """
        rows, drafter = jnp.arange(kind.shape[0]), jnp.asarray(self.drafter_of)[kind]
        first, later = jnp.moveaxis(self._rates()[rows, kind], -1, 0)
        most = jnp.asarray(self.most, jnp.int32)[kind]
        expected, gain = [jnp.ones_like(first)], first
        for number in range(self.numbers[-1]):
            expected.append(expected[-1] + jnp.where(number < most, gain, 0.0))
            gain = gain * later
        tokens = jnp.stack([expected[number] for number in self.numbers], axis=-1)
        horizon = jnp.maximum(jnp.minimum(self.num_emitted, room), 1)
        share = lag.astype(jnp.float32) / horizon.astype(jnp.float32)
        catching_up = self.reading[rows, drafter] * share  # seconds for each token to come
        per_token = self.costs[rows, drafter] / tokens + jnp.where(
            jnp.asarray(self.numbers) > 0, catching_up[:, None], 0.0
        )
        best = jnp.asarray(self.numbers, jnp.int32)[jnp.argmin(per_token, axis=-1)]
        forced = self.forced[rows, kind]
        return jnp.where(forced >= 0, forced, best)

    def update(
        self,
        kind: RowCounts,
        num_proposed: RowCounts,
        num_accepted: RowCounts,
        is_running: RowFlags,
    ) -> Self:
        """Returns the control after a round.

        Args:
          kind: of each row's proposal, [b].
          num_proposed: drafts put forward, [b].
          num_accepted: drafts kept, [b].
          is_running: rows that had the round at all, [b].
        """
        num_tried = jnp.minimum(num_accepted + 1, num_proposed)
        is_kind = jnp.arange(self.kept.shape[1]) == kind[:, None]

        def fade(old: Float32[Array, "b k 2"], count: RowCounts) -> Float32[Array, "b k 2"]:
            first = jnp.minimum(count, 1)
            pair = jnp.stack([first, count - first], axis=-1).astype(jnp.float32)
            new = _MEMORY * old + jnp.where(is_kind[..., None], pair[:, None], 0.0)
            return jnp.where(is_running[:, None, None], new, old)

        return self.replace(
            num_emitted=self.num_emitted + jnp.where(is_running, num_accepted + 1, 0),
            kept=fade(self.kept, num_accepted),
            tried=fade(self.tried, num_tried),
        )

    def _rates(self) -> Float32[Array, "b k 2"]:
        assumed = jnp.asarray(self.assumed, jnp.float32)
        return (self.kept + _PRIOR_WEIGHT * assumed) / (self.tried + _PRIOR_WEIGHT)
