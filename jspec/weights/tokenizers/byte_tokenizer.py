"""The stand-in tokenizer of random models: bytes."""

from collections.abc import Mapping, Sequence
from typing import Any

from jspec.common.errors import InputError
from jspec.weights.tokenizers.text_stream import TextStream


class ByteTokenizer:
    """Ids 0 to 255 are bytes; the others have no text and print as `<id>`.

    Random weights come with a shape but without a tokenizer; this one lets them take a prompt.

    Attributes:
      vocab_size: the model's.
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
        self._silent_ids = {*self.eos_ids, bos_id}

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Returns the bytes of a text, after BOS if there is one.

        Raises:
          InputError: invalid Unicode, or a byte beyond the vocabulary.
        """
        try:
            ids = list(text.encode("utf-8"))
        except UnicodeError:
            raise InputError("the text is not valid UTF-8") from None
        if ids and max(ids) >= self.vocab_size:
            raise InputError(f"byte {max(ids)} is beyond the vocabulary of {self.vocab_size}")
        return [self.bos_id, *ids] if add_bos and self.bos_id is not None else ids

    def _bytes(self, token_id: int) -> bytes | None:
        is_byte = token_id < 256 and token_id not in self._silent_ids
        return bytes([token_id]) if is_byte else None

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids, broken UTF-8 as U+FFFD."""
        shown = (int(i) for i in ids if int(i) not in self._silent_ids)
        text = b"".join(self._bytes(i) or f"<{i}>".encode() for i in shown)
        return text.decode("utf-8", errors="replace")

    def stream(self) -> TextStream:
        """Returns an empty stream: its `push(id)` and `flush()` add up to `decode`."""
        return TextStream(self.decode)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Raises InputError: bytes have no chat template."""
        raise InputError("random weights have no chat template: give the prompt with --nochat")

    def vocabulary(self) -> dict[str, int]:
        """Returns every id under its own name."""
        return {f"<{token_id}>": token_id for token_id in range(self.vocab_size)}

    def token_bytes(self) -> list[bytes | None]:
        """Returns the bytes of every id, None where it has no text."""
        return [self._bytes(token_id) for token_id in range(self.vocab_size)]
