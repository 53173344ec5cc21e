"""What passes between a drafter, an acceptance rule and a round."""

import enum
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32

from jspec.common.typing import DraftProbs, DraftTokens, Logits, RowCounts, RowTokens, TargetProbs
from jspec.sampling.distribution import sampling_probs
from jspec.sampling.noise import AcceptanceNoise, RoundNoise
from jspec.sampling.settings import SamplingSettings


class Proposal(struct.PyTreeNode):
    """The drafts of one round, for each row a chain, or a tree: see `acceptance.tree`.

    Attributes:
      tokens: the drafts, [b w].
      num_tokens: how many drafts each row has, 0 to w, [b]; the rest is padding, which counts
        neither as proposed nor as rejected.
      probs: the distribution from which each draft was really drawn, after temperature and filters,
        [b w v], and zeros for padding; anything where no rule reads it. None for drafts that follow
        from the context alone: theirs have all probability on the draft. In a tree a distribution
        is that given the earlier siblings: without replacement, they are taken out of it.
      kind: which of the drafter's kinds of proposal each row has, [b]; None for the first kind.
      prefix: the target's call on [last token, drafts], if the drafter has begun it.
      parents: of the drafts in a tree, [b w], each before its children; -1 is the last committed
        token. None for a chain.
      max_depth: of a tree: no draft is deeper, and its children of -1 have depth 1.
      scores: of drafts without a distribution, [b w], where the drafter has an estimate: the
        logarithm of the probability that the draft is kept. No rule reads it.
      silent: where several drafters make one proposal, the kinds [b k] of those that had nothing to
        add, though it was their turn. None where `kind` says who was silent.
    """

    tokens: DraftTokens
    num_tokens: RowCounts
    probs: DraftProbs | None = None
    kind: RowCounts | None = None
    prefix: "TargetPrefix | None" = None
    parents: Int32[Array, "b w"] | None = None
    max_depth: int = struct.field(pytree_node=False, default=0)
    scores: Float32[Array, "b w"] | None = None
    silent: Bool[Array, "b k"] | None = None

    @property
    def width(self) -> int:
        """Drafts of each row, padding included."""
        return self.tokens.shape[1]

    def narrow(self, width: int) -> Self:
        """Returns the proposal with only the first `width` drafts of each row."""
        prefix = self.prefix
        if prefix is not None:
            prefix = prefix.replace(hidden=prefix.hidden[:, : width + 1])
        return self.replace(
            tokens=self.tokens[:, :width],
            num_tokens=jnp.minimum(self.num_tokens, width),
            probs=None if self.probs is None else self.probs[:, :width],
            prefix=prefix,
            parents=None if self.parents is None else self.parents[:, :width],
            max_depth=min(self.max_depth, width),
            scores=None if self.scores is None else self.scores[:, :width],
        )


def as_tree(proposal: Proposal) -> Proposal:
    """Returns the proposal as a tree; a chain is a tree of one branch."""
    if proposal.parents is not None:
        return proposal
    chain = jnp.arange(proposal.width, dtype=jnp.int32) - 1
    parents = jnp.broadcast_to(chain, proposal.tokens.shape)
    return proposal.replace(parents=parents, max_depth=proposal.width)


class TargetPrefix(struct.PyTreeNode):
    """The first layers of the target's call on [last token, drafts], run by the drafter.

    It has the last of these layers' output at each token of the block, and the target's cache with
    their keys and values of the block written, not committed.
    """

    hidden: Float32[Array, "b t d"]
    cache: Any
    num_layers: int = struct.field(pytree_node=False)


class Temperatures(enum.Enum):
    """The temperatures for which an acceptance rule is made."""

    ANY = "of at least 0"
    ZERO = "0"
    POSITIVE = "above 0"


class Verdict(struct.PyTreeNode):
    """What an acceptance rule decided.

    Attributes:
      num_accepted: drafts accepted, [b].
      next_token: the token that follows them, [b]: a residual token after a rejection, a bonus
        token after the last draft.
      path: in a tree, the slots of the block that are kept, [b max_depth+1]: the last committed
        token, which is slot 0, and the accepted drafts. None for a chain.
    """

    num_accepted: RowCounts
    next_token: RowTokens
    path: Int32[Array, "b p"] | None = None


class AcceptanceRule(NamedTuple):
    """A rule that decides which drafts are accepted, as pure functions of arrays.

    The two probabilities stand apart from the noise, so that a test can enumerate all outcomes of a
    rule and compare their sum with the target's distribution.

    Attributes:
      acceptance_probs: (target_probs, proposal) -> [b w], the probability that each draft is
        accepted once those before it are.
      next_token_probs: (target_probs, proposal, num_accepted [b]) -> [b v], the distribution of the
        token after this many accepted drafts.
      accept: (target_probs, proposal, noise) -> Verdict: the same with noise applied.
      noise: where the noise comes from.
      distribution: (logits, settings) -> target_probs, what the rule is told of the target.
      temperatures: those for which the rule is made.
      is_lossless: whether the emitted tokens follow the target's distribution at those
        temperatures.
      matches_at_zero: whether at temperature 0 it decides what `chain.match` decides, which needs
        no distribution over the vocabulary.
      draws_only: whether it does nothing with distributions but draw, a token at each position with
        that position's shared noise, to which it compares the draft: parts of them will do.
      tree: the rule for trees, a `TreeRule`; None where it knows chains only.
    """

    acceptance_probs: Callable[[TargetProbs, Proposal], Float32[Array, "b w"]]
    next_token_probs: Callable[[TargetProbs, Proposal, RowCounts], Float32[Array, "b v"]]
    accept: Callable[[TargetProbs, Proposal, AcceptanceNoise], Verdict]
    noise: RoundNoise
    distribution: Callable[[Logits, SamplingSettings], TargetProbs] = sampling_probs
    temperatures: Temperatures = Temperatures.ANY
    is_lossless: bool = True
    matches_at_zero: bool = False
    draws_only: bool = False
    tree: Any = None
