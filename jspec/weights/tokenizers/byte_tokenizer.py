"""The stand-in tokenizer of random models: bytes."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.common.errors import InputError
from jspec.weights.tokenizers.text_stream import TokenTexts
from jspec.weights.tokenizers.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class ByteTokenizer(TokenTexts):
    """Ids 0 to 255 are bytes; the others have no text and print as `<id>`.

    Random weights come with a shape but without a tokenizer; this one lets them take a prompt. See
    `Tokenizer` for the attributes and methods.
    """

    vocab_size: int
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    chat_template = None

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

    def piece(self, token_id: int, is_first: bool) -> bytes:
        """See `TokenTexts`."""
        del is_first
        if token_id in (*self.eos_ids, self.bos_id):
            return b""
        return bytes([token_id]) if token_id < 256 else f"<{token_id}>".encode()

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Raises InputError: bytes have no chat template."""
        raise InputError("random weights have no chat template: give the prompt with --nochat")

    def vocabulary(self) -> dict[str, int]:
        """Returns every id under its own name."""
        return {f"<{token_id}>": token_id for token_id in range(self.vocab_size)}


TokenizerLike = Tokenizer | ByteTokenizer  # what the programs take
