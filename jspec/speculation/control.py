"""How many drafts a row asks for: a function of its own history and of recorded costs.

A round of n drafts emits 1 + a + a·l + a·l² + ... tokens on average, where a is the probability
that the first draft is accepted, and l that a later one is once those before it are. Among the few
numbers of drafts for which a verify call is compiled, each row takes the one that gives the most
tokens per second. This is Theorem 3.8 of Leviathan et al. (arXiv 2211.17192) with measured costs
instead of the ratio c. A round of 0 drafts is a plain step.

A drafter with a cache of its own may lag. Before it drafts again it must read the tokens that it
has missed, at first the whole prompt. This cost comes once, and is spread over the tokens still to
come. They are taken to be as many as the answer has so far, or the room that is left where that is
less. So an answer has to grow before an expensive drafter reads a long prompt for it.

Each row estimates a and l from its own rounds, separately for each kind of proposal. With every
round the past fades towards what was assumed at first, so a drafter that was switched off is tried
again. No clock is read: the same history and the same costs give the same choice.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float32, Int32

from jspec.common.typing import RowCounts, RowFlags

_MEMORY = 0.97  # what is left of an observation a round later
_PRIOR_WEIGHT = 1.5  # the assumption counts like this many observed drafts


class Kind(NamedTuple):
    """A kind of proposal, whose drafts are accepted about equally often.

    Attributes:
      drafter: the name of the drafter; kinds of one drafter cost the same.
      first: assumed probability, before any round, that the first draft is accepted.
      later: likewise for a later draft once those before it are accepted.
      most: the most drafts that such a proposal can have.
    """

    drafter: str
    first: float
    later: float
    most: int = 2**31 - 1


def drafters_of(kinds: Sequence[Kind]) -> list[str]:
    """Returns the names of the drafters that make these kinds of proposals, each once, in order."""
    return list(dict.fromkeys(kind.drafter for kind in kinds))


class Control(struct.PyTreeNode):
    """The choice of a number of drafts, for each row.

    Attributes:
      costs: seconds of a round of each drafter with each number of drafts, [b m c].
      reading: seconds that each drafter takes for a token that it has missed, [b m].
      num_emitted: tokens of the answer so far, [b].
      kept: accepted drafts of each kind, first and later ones, with fading weights, [b k 2].
      tried: drafts of each kind whose acceptance was decided, likewise.
      forced: for each kind, the number of drafts where it is not to be chosen; -1 elsewhere, [b k].
      kinds: the drafter's.
      numbers: the numbers of drafts to choose from, rising from 0.
    """

    costs: Float32[Array, "b m c"]
    reading: Float32[Array, "b m"]
    num_emitted: RowCounts
    kept: Float32[Array, "b k 2"]
    tried: Float32[Array, "b k 2"]
    forced: Int32[Array, "b k"]
    kinds: tuple[Kind, ...] = struct.field(pytree_node=False)
    numbers: tuple[int, ...] = struct.field(pytree_node=False)

    @classmethod
    def init(cls, batch_size: int, *, kinds: Sequence[Kind], numbers: Sequence[int]) -> Self:
        """Returns rows without a history, all of whose rounds cost the same."""
        drafters = drafters_of(kinds)
        counts = jnp.zeros([batch_size, len(kinds), 2], jnp.float32)
        return cls(
            costs=jnp.ones([batch_size, len(drafters), len(numbers)], jnp.float32),
            reading=jnp.zeros([batch_size, len(drafters)], jnp.float32),
            num_emitted=jnp.ones([batch_size], jnp.int32),  # the token that the prefill drew
            kept=counts,
            tried=counts,
            forced=jnp.full([batch_size, len(kinds)], -1, jnp.int32),
            kinds=tuple(kinds),
            numbers=tuple(numbers),
        )

    def choose(self, kind: RowCounts, lag: RowCounts, room: RowCounts) -> RowCounts:
        """Returns how many drafts each row wants, one of `numbers`, [b].

        Args:
          kind: of the proposal.
          lag: tokens that its drafter has to read first; see `lag_of`.
          room: tokens that may still be emitted.
        """
        # The expected tokens of a round for every number of drafts up to the largest.
        drafters = drafters_of(self.kinds)
        drafter = jnp.array([drafters.index(each.drafter) for each in self.kinds])[kind]
        rows = jnp.arange(kind.shape[0])
        first, later = jnp.moveaxis(self._rates()[rows, kind], -1, 0)
        most = jnp.array([each.most for each in self.kinds], jnp.int32)[kind]
        expected, gain = [jnp.ones_like(first)], first
        for number in range(self.numbers[-1]):
            expected.append(expected[-1] + jnp.where(number < most, gain, 0.0))
            gain = gain * later
        tokens = jnp.stack([expected[number] for number in self.numbers], axis=-1)
        # Catching up is paid once, and shared by the tokens that are expected to follow.
        horizon = jnp.maximum(jnp.minimum(self.num_emitted, room), 1)
        share = lag.astype(jnp.float32) / horizon.astype(jnp.float32)
        catching_up = self.reading[rows, drafter] * share  # seconds for each token to come
        # A round without drafts needs no catching up.
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
        """Returns the control after a round in which the running rows took part."""
        # Drafts after the first rejected one were never decided, and say nothing of the rate.
        num_tried = jnp.minimum(num_accepted + 1, num_proposed)
        is_kind = jnp.arange(self.kept.shape[1]) == kind[:, None]

        # The weights of all kinds fade in every round of the row, those that are not tried, too.
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
        """Returns the estimates of a and l for each kind."""
        assumed = jnp.array([(kind.first, kind.later) for kind in self.kinds], jnp.float32)
        return (self.kept + _PRIOR_WEIGHT * assumed) / (self.tried + _PRIOR_WEIGHT)
