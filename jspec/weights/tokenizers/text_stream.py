"""Text from tokens as they come, without broken UTF-8."""

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"


class TextStream:
    """Decodes tokens one at a time; the pieces that `push` and `flush` return add up to the text.

    A character may be spread over several tokens, so text that ends in U+FFFD is held back until
    the next token completes it, or `flush` releases it. Some decoders treat the first token of a
    text in another way (they strip its space), so new tokens are decoded after the last ones
    already returned, their context: the new text is decode(context + new) minus decode(context).
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """Starts an empty text; `decode` maps token ids to text."""
        self._decode = decode
        self._context: list[int] = []
        self._new: list[int] = []

    def _pending(self) -> str:
        """Returns the text of the new tokens."""
        emitted = self._decode(self._context) if self._context else ""
        return self._decode(self._context + self._new)[len(emitted) :]

    def push(self, token_id: int) -> str:
        """Returns the text that one more token makes certain, often empty."""
        self._new.append(token_id)
        text = self._pending()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        # The returned tokens become the context. Tokens that print nothing cannot be one alone.
        before = [] if self._decode(self._new) else self._context
        self._context, self._new = before + self._new, []
        return text

    def flush(self) -> str:
        """Returns the text held back, as the text ends here, and empties the stream."""
        text = self._pending() if self._new else ""
        self._context, self._new = [], []
        return text
