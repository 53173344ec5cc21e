"""Text from tokens as they come, without broken UTF-8."""

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"


class TextStream:
    """Decodes tokens one at a time; what is pushed and flushed adds up to the decoded whole.

    A character may be spread over several tokens: text that ends in U+FFFD is held back until the
    next token completes it, or `flush` gives it up. Decoders may treat a text's first token apart
    (they strip its space), so new tokens are decoded after the last ones already emitted:

    ```
      ids     … [ context | new ]       new text = decode(context + new) minus decode(context)
    ```
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
        """Returns the text that is certain with one more token, often empty."""
        self._new.append(token_id)
        text = self._pending()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._advance()
        return text

    def flush(self) -> str:
        """Returns what was held back: the text ends here. The stream is empty afterwards."""
        text = self._pending() if self._new else ""
        self._context, self._new = [], []
        return text

    def _advance(self) -> None:
        """Makes the emitted tokens the context; those that print nothing cannot stand alone."""
        if self._decode(self._new):
            self._context, self._new = self._new, []
        else:
            self._context, self._new = self._context + self._new, []
