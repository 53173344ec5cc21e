"""What a drafter proposes along a given text: the types."""

from typing import Any, NamedTuple, Protocol

from jaxtyping import Array, Bool, Float32, Int32

from jspec.sampling.distribution import SamplingSettings


class FirstDrafts(NamedTuple):
    """What a drafter proposes first after each token of a chunk.

    Attributes:
      probs: the distribution that the draft is drawn from, [t v]; one-hot where it follows from the
        text; 0 everywhere where there is none.
      is_proposed: whether there is one, [t].
    """

    probs: Float32[Array, "t v"]
    is_proposed: Bool[Array, "t"]


class DraftDistribution(Protocol):
    """A drafter's distributions along a text, which is read a chunk at a time."""

    @property
    def is_sampled(self) -> bool:
        """Whether drafts are drawn at random; else they follow from the text."""
        ...

    def start(self, capacity: int) -> Any:
        """Returns the state before a text of at most so many tokens."""
        ...

    def read(
        self, state: Any, tokens: Int32[Array, "t"], settings: SamplingSettings
    ) -> tuple[FirstDrafts, Any]:
        """Returns what is proposed after each of the next tokens, and the state behind them.

        Args:
          state: before them; consumed.
          tokens: the next chunk.
          settings: of one row; the temperature is the drafter's own.
        """
        ...
