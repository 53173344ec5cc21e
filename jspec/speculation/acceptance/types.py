"""What passes between a drafter, an acceptance rule and the round."""

import enum
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float32, Int32

from jspec.common.typing import DraftProbs, DraftTokens, Logits, RowCounts, RowTokens, TargetProbs
from jspec.sampling.distribution import SamplingSettings, sampling_probs
from jspec.sampling.noise import AcceptanceNoise, RoundNoise


class Proposal(struct.PyTreeNode):
    """What a drafter puts forward.

    Attributes:
      tokens: the drafts, [b w].
      num_tokens: how many of each row's are meant, 0 to w, [b]; the rest is padding.
      probs: the distribution each token was really drawn from, [b w v], zeros where a drafter means
        none; None when the tokens follow from the context alone, which is a distribution with all
        probability on the token.
      kind: which of the drafter's kinds of proposal each row's is, [b]; None for the first.
      prefix: where the drafter has begun the target's call on [last token, drafts].
      parents: each draft's parent (-1 is the last committed token); None for a chain.
    """

    tokens: DraftTokens
    num_tokens: RowCounts
    probs: DraftProbs | None = None
    kind: RowCounts | None = None
    prefix: "TargetPrefix | None" = None
    parents: tuple[int, ...] | None = struct.field(pytree_node=False, default=None)

    @property
    def width(self) -> int:
        """Drafts a round, padding included."""
        return self.tokens.shape[1]

    def narrow(self, width: int) -> Self:
        """Returns the proposal of a chain with only the first `width` columns."""
        return self.replace(
            tokens=self.tokens[:, :width],
            num_tokens=jnp.minimum(self.num_tokens, width),
            probs=None if self.probs is None else self.probs[:, :width],
            prefix=None if self.prefix is None else self.prefix.narrow(width + 1),
        )


class TargetPrefix(struct.PyTreeNode):
    """The first layers of the target's call on [last token, drafts], which a drafter has run.

    Attributes:
      hidden: their output at each token of the block, [b w+1 d].
      cache: the target's, with their keys and values of the block written, not committed.
      num_layers: how many they are.
    """

    hidden: Float32[Array, "b t d"]
    cache: Any
    num_layers: int = struct.field(pytree_node=False)

    def narrow(self, num_tokens: int) -> Self:
        """Returns the prefix at the first tokens of the block only."""
        return self.replace(hidden=self.hidden[:, :num_tokens])


class Temperatures(enum.Enum):
    """Temperatures that an acceptance rule is meant for."""

    ANY = "of at least 0"
    ZERO = "0"
    POSITIVE = "above 0"


class Verdict(struct.PyTreeNode):
    """What an acceptance rule decided.

    Attributes:
      num_accepted: drafts kept, [b].
      next_token: the residual or bonus token that follows them, [b].
      path: for a tree, the block slots kept, [b w+1]; None for a chain.
    """

    num_accepted: RowCounts
    next_token: RowTokens
    path: Int32[Array, "b w+1"] | None = None


class AcceptanceRule(NamedTuple):
    """A rule that decides which drafts stay, as pure functions of arrays.

    Attributes:
      acceptance_probs: (target_probs, proposal) -> [b w], the probability that each draft is kept
        once those before it are.
      next_token_probs: (target_probs, proposal, num_accepted [b]) -> [b v], the distribution of the
        token after that many kept drafts.
      accept: (target_probs, proposal, noise) -> Verdict, the two with noise applied.
      noise: where the noise comes from.
      distribution: (logits, settings) -> target_probs, what the rule is told of the target.
      temperatures: those that the rule is meant for, of `Temperatures`.
      is_lossless: whether the emitted tokens follow the target's distribution at those
        temperatures.
    """

    acceptance_probs: Callable[[TargetProbs, Proposal], Float32[Array, "b w"]]
    next_token_probs: Callable[[TargetProbs, Proposal, RowCounts], Float32[Array, "b v"]]
    accept: Callable[[TargetProbs, Proposal, AcceptanceNoise], Verdict]
    noise: RoundNoise
    distribution: Callable[[Logits, SamplingSettings], TargetProbs] = sampling_probs
    temperatures: Temperatures = Temperatures.ANY
    is_lossless: bool = True
