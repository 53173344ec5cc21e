"""The interface of a logits processor."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jaxtyping import Array, Float32

from jspec.common.typing import RowTokens

ProcessorState = Any  # a pytree of arrays; each leaf's first axis is the row


class InitFn(Protocol):
    """Makes the state of one row that has emitted nothing."""

    def __call__(
        self, settings: Any, *, prompt: list[int], stop_ids: list[int], vocab_size: int
    ) -> ProcessorState:
        """Returns the state, arrays without the row's axis.

        Args:
          settings: the request's `Settings`; the default ones must give a neutral state.
          prompt: the request's token ids.
          stop_ids: tokens that end it.
          vocab_size: of the logits.
        """
        ...


class Processor(NamedTuple):
    """Pure functions that change logits before temperature and filters.

    The state describes everything a row has committed, the prompt included, so that the
    distribution at any position follows from the state there. Drafting and verifying apply the same
    processor, each position with the state that its own prefix leads to. The state after a rejected
    draft is dropped, so a rejected draft leaves no trace.

    Attributes:
      name: as messages call it.
      is_used: settings -> whether a request needs the processor at all; it is compiled into a
        program only if some request of the run does.
      init: makes the state of one row; see `InitFn`.
      apply: (state, logits [b v]) -> logits [b v], where -inf forbids a token.
      update: (state, token [b]) -> the state after one more token. Leaves that no token changes
        should be returned as they are.
    """

    name: str
    is_used: Callable[[Any], bool]
    init: InitFn
    apply: Callable[[ProcessorState, Float32[Array, "b v"]], Float32[Array, "b v"]]
    update: Callable[[ProcessorState, RowTokens], ProcessorState]
