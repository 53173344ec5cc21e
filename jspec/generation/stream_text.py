"""The text of an answer as its tokens come, with stop strings."""

from jspec.weights import TokenizerLike


class AnswerText:
    """The growing text of one answer.

    Attributes:
      text: the text decoded so far, cut before a stop string.
      is_stopped: whether the text has reached a stop string.
    """

    def __init__(self, tokenizer: TokenizerLike, stop: tuple[str, ...]) -> None:
        self._decoder = tokenizer.stream()
        self._stop = stop
        self._num_shown = 0
        self.text = ""
        self.is_stopped = False

    def push(self, token_id: int) -> None:
        """Adds a token."""
        self._append(self._decoder.push(token_id))

    def finish(self) -> None:
        """Adds what the decoder held back: the bytes of an unfinished character."""
        if not self.is_stopped:
            self._append(self._decoder.flush())

    def take(self, *, is_last: bool) -> str:
        """Returns the new text, without an end that may begin a stop string unless it is the
        last.
        """
        end = len(self.text) if is_last else len(self.text) - self._num_doubtful()
        new = self.text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        return new

    def _append(self, new: str) -> None:
        longest = max((len(stop) for stop in self._stop), default=1)
        begin = max(len(self.text) - longest + 1, 0)
        self.text += new
        found = [at for stop in self._stop if (at := self.text.find(stop, begin)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.is_stopped = True

    def _num_doubtful(self) -> int:
        """Returns the length of the longest end of the text that may begin a stop string."""
        return max(
            (
                size
                for stop in self._stop
                for size in range(1, len(stop))
                if self.text.endswith(stop[:size])
            ),
            default=0,
        )
