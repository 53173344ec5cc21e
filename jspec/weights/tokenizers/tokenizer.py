"""A tokenizer: text to ids and back, with the chat template and the ids that end a text."""

import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jspec.common.errors import InputError
from jspec.weights.tokenizers.byte_tokenizer import ByteTokenizer
from jspec.weights.tokenizers.chat_template import render_chat
from jspec.weights.tokenizers.text_stream import TextStream
from jspec.weights.tokenizers.token_bytes import backend_token_bytes


class TextStreamLike(Protocol):
    """What `stream()` returns: text from tokens as they come."""

    def push(self, token_id: int) -> str:
        """Returns the text that is certain with one more token, often empty."""
        ...

    def flush(self) -> str:
        """Returns what was held back."""
        ...


@runtime_checkable
class TokenizerLike(Protocol):
    """What the programs need of a tokenizer; see `Tokenizer` for the meanings."""

    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def eos_ids(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def bos_id(self) -> int | None: ...  # noqa: D102
    @property
    def has_chat_template(self) -> bool: ...  # noqa: D102
    def encode(self, text: str, add_bos: bool = True) -> list[int]: ...  # noqa: D102
    def decode(self, ids: Sequence[int]) -> str: ...  # noqa: D102
    def stream(self) -> TextStreamLike: ...  # noqa: D102
    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> str: ...  # noqa: D102
    def vocabulary(self) -> dict[str, int]: ...  # noqa: D102
    def token_bytes(self) -> list[bytes | None]: ...  # noqa: D102


class Tokenizer:
    """A `tokenizers.Tokenizer` with what a language model needs beside it.

    Attributes:
      eos_ids: the ids that end a text.
      bos_id: the id that begins one, or None.
      special_tokens: `bos_token`, `eos_token` and the like, by these names.
      chat_template: the Jinja2 source, or None.
    """

    def __init__(
        self,
        backend: Any,
        *,
        special_tokens: Mapping[str, str],
        eos_ids: Sequence[int] = (),
        chat_template: str | None = None,
    ) -> None:
        """Wraps `backend`, a `tokenizers.Tokenizer` whose post-processor adds BOS where it must.

        `eos_ids` are added to the id of `special_tokens["eos_token"]`.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        self.bos_id = self._special_id("bos_token")
        own_eos = self._special_id("eos_token")
        ids = [*eos_ids] if own_eos is None else [*eos_ids, own_eos]
        self.eos_ids = tuple(dict.fromkeys(ids))

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id in use; a model may have more rows (padding)."""
        return self._vocab_size

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat_prompt` works."""
        return self.chat_template is not None

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Returns the ids of a text.

        Args:
          text: special tokens written out in it (a rendered chat prompt) become their ids.
          add_bos: begin with BOS where the model wants one. A text that already begins with it
            gets no second.

        Raises:
          InputError: the text is no valid Unicode.
        """
        try:
            ids = self._backend.encode(text, add_special_tokens=add_bos).ids
        except (TypeError, UnicodeError):
            raise InputError("the text is not valid UTF-8") from None
        if add_bos and self.bos_id is not None and ids[:2] == [self.bos_id] * 2:
            return ids[1:]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids, special tokens left out, broken UTF-8 as U+FFFD."""
        text = self._decode(ids)
        if "\ufffd" not in text:
            return text
        # Some decoders change their mind about a broken tail; a stream cannot take text back.
        stream = self.stream()
        return "".join([stream.push(i) for i in ids]) + stream.flush()

    def _decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def stream(self) -> TextStream:
        """Returns an empty stream: its `push(id)` and `flush()` add up to `decode`."""
        return TextStream(self._decode)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Returns the text of a conversation, to be encoded with `add_bos=False`.

        Raises:
          InputError: no chat template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise InputError("this model has no chat template: give the prompt with --nochat")
        return render_chat(self.chat_template, messages, self.special_tokens)

    def vocabulary(self) -> dict[str, int]:
        """Returns the id of every token."""
        return self._backend.get_vocab(with_added_tokens=True)

    def token_bytes(self) -> list[bytes | None]:
        """Returns the bytes of every id, None where it has no text; see `backend_token_bytes`."""
        return backend_token_bytes(self._backend, self._vocab_size)

    def save(self, folder: pathlib.Path) -> None:
        """Writes tokenizer.json and the two config files that belong to it into a folder."""
        self._backend.save(str(folder / "tokenizer.json"))
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        settings |= self.special_tokens
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        generation = {"bos_token_id": self.bos_id, "eos_token_id": list(self.eos_ids)}
        for name, content in (("tokenizer", settings), ("generation", generation)):
            text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
            (folder / f"{name}_config.json").write_text(text, encoding="utf-8")


@functools.cache
def _padding_pattern() -> re.Pattern[str]:
    """Matches the names that converters give to rows which stand for no token."""
    return re.compile(r"\[PAD\d*\]|<pad_?\d*>|<\|?dummy_?\d*\|?>", re.IGNORECASE)


def vocabulary_digest(tokenizer: TokenizerLike) -> str | None:
    """Returns a checksum of what each id means; padding does not count.

    None for the byte tokenizer: it is a stand-in whose ids mean nothing to the model.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return None
    items = [
        [token_id, token]
        for token, token_id in tokenizer.vocabulary().items()
        if not _padding_pattern().fullmatch(token)
    ]
    return hashlib.sha256(json.dumps(sorted(items)).encode()).hexdigest()


def check_same_tokenizer(target: TokenizerLike, draft: TokenizerLike) -> None:
    """Checks that a draft model's ids mean what the target's mean.

    Tokens beyond the shorter vocabulary are fine where they are mere padding. The byte tokenizer is
    a stand-in whose ids mean nothing to the model: beside it only the number of tokens counts.

    Raises:
      InputError: names the first id that differs.
    """
    if isinstance(target, ByteTokenizer) or isinstance(draft, ByteTokenizer):
        if target.vocab_size != draft.vocab_size:
            raise InputError(
                f"target and draft have different tokenizers: {target.vocab_size} tokens and "
                f"{draft.vocab_size}"
            )
        return
    by_id = [
        {token_id: token for token, token_id in tokenizer.vocabulary().items()}
        for tokenizer in (target, draft)
    ]
    if by_id[0] == by_id[1]:
        return
    for token_id in sorted(by_id[0].keys() | by_id[1].keys()):
        tokens = [tokens.get(token_id) for tokens in by_id]
        is_padding = all(t is None or _padding_pattern().fullmatch(t) for t in tokens)
        if tokens[0] != tokens[1] and not is_padding:
            raise InputError(
                f"target and draft have different tokenizers: id {token_id} is {tokens[0]!r} in "
                f"the target and {tokens[1]!r} in the draft"
            )
