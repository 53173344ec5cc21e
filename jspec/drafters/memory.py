"""What drafters without a cache remember: nothing, or the text."""

from jaxtyping import Array, Bool

from jspec.common.typing import Params, Tokens
from jspec.drafters.history import History


class Stateless:
    """A drafter that needs no memory."""

    def init(self, batch_size: int, capacity: int) -> tuple[()]:
        """Returns the state of rows that have seen nothing: there is none."""
        del batch_size, capacity
        return ()

    def observe(
        self,
        params: Params,
        state: tuple[()],
        tokens: Tokens,
        hidden: Array,
        valid: Bool[Array, "b t"],
    ) -> tuple[()]:
        """Takes no notice."""
        del params, tokens, hidden, valid
        return state


class Remembering:
    """A drafter whose state is the text."""

    def init(self, batch_size: int, capacity: int) -> History:
        """Returns the state of rows that have seen nothing."""
        return History.init(batch_size, capacity)

    def observe(
        self,
        params: Params,
        state: History,
        tokens: Tokens,
        hidden: Array,
        valid: Bool[Array, "b t"],
    ) -> History:
        """Remembers committed tokens."""
        del params, hidden
        return state.append(tokens, valid)
