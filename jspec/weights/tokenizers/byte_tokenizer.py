"""The stand-in tokenizer of random models: bytes."""

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.common.errors import InputError


class ByteStream:
    """Decodes byte tokens as they come; see `text_stream.TextStream`."""

    def __init__(self, silent_ids: Sequence[int]) -> None:
        """Starts an empty text; `silent_ids` print nothing."""
        self._silent_ids = frozenset(silent_ids)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Returns the text that is certain with one more token: `<300>` for an id of no byte."""
        if token_id in self._silent_ids:
            return ""
        if token_id < 256:
            return self._decoder.decode(bytes([token_id]))
        return self.flush() + f"<{token_id}>"

    def flush(self) -> str:
        """Returns what was held back."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class ByteTokenizer:
    """Ids 0 to 255 are bytes; the others have no text and print as `<id>`.

    Random weights come with a shape and no tokenizer; this one lets them take a prompt.

    Attributes:
      vocab_size: of the model.
      eos_ids: the ids that end a text.
      bos_id: the id that begins one, or None.
    """

    has_chat_template = False

    def __init__(
        self, vocab_size: int, *, bos_id: int | None = None, eos_ids: Sequence[int] = ()
    ) -> None:
        self.vocab_size = vocab_size
        self.bos_id = bos_id
        self.eos_ids = tuple(eos_ids)

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Returns the bytes of a text, after BOS if there is one.

        Raises:
          InputError: no valid Unicode, or a byte beyond the vocabulary.
        """
        try:
            ids = list(text.encode("utf-8"))
        except UnicodeError:
            raise InputError("the text is not valid UTF-8") from None
        if ids and max(ids) >= self.vocab_size:
            raise InputError(f"byte {max(ids)} is beyond the vocabulary of {self.vocab_size}")
        return [self.bos_id, *ids] if add_bos and self.bos_id is not None else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids, broken UTF-8 as U+FFFD."""
        stream = self.stream()
        return "".join([stream.push(int(i)) for i in ids]) + stream.flush()

    def stream(self) -> ByteStream:
        """Returns an empty stream: its `push(id)` and `flush()` add up to `decode`."""
        bos = () if self.bos_id is None else (self.bos_id,)
        return ByteStream((*self.eos_ids, *bos))

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Raises InputError: bytes have no chat template."""
        raise InputError("random weights have no chat template: give the prompt with --nochat")

    def vocabulary(self) -> dict[str, int]:
        """Returns every id under its own name."""
        return {f"<{token_id}>": token_id for token_id in range(self.vocab_size)}

    def token_bytes(self) -> list[bytes | None]:
        """Returns the bytes of every id, None where it has no text."""
        silent = {*self.eos_ids, self.bos_id}
        return [
            None if token_id in silent or token_id > 255 else bytes([token_id])
            for token_id in range(self.vocab_size)
        ]
