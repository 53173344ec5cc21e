"""The interface of a logits processor."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Float32

from jspec.common.typing import RowTokens

ProcessorState = Any  # a pytree of arrays; each leaf's first axis is the row


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
      init: (settings, *, prompt, stop_ids, vocab_size) -> the state of a row that has emitted
        nothing, arrays without the row's axis; the default settings give a neutral one.
      apply: (state, logits [b v]) -> logits [b v], where -inf forbids a token.
      update: (state, token [b]) -> the state after one more token, by default the same. Leaves that
        no token changes should be returned as they are.
    """

    name: str
    is_used: Callable[[Any], bool]
    init: Callable[..., ProcessorState]
    apply: Callable[[ProcessorState, Float32[Array, "b v"]], Float32[Array, "b v"]]
    update: Callable[[ProcessorState, RowTokens], ProcessorState] = lambda state, token: state
