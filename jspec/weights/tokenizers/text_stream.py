"""The text of token ids: the one place where tokens become characters.

    text of an answer = decode(prompt + answer) without decode(prompt)

A token alone may lose its space (decoders of SentencePiece strip the first one of a text), its
half character (a character may be spread over several tokens) or its name (special tokens print
nothing). So each token stands for bytes, which depend on whether it begins the text, and the bytes
of all tokens together are read as UTF-8. Whole texts, streams and offsets follow from that alone.
"""

import codecs
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ANCHOR = "x"  # a token before or after another token: every decoder lets it stand
_LONGEST = 4  # bytes of a character

Pieces = Callable[[int, bool], bytes]


class TextStream:
    """Text from tokens as they come; what `push` and `flush` return adds up to the whole text."""

    def __init__(self, piece_of: Pieces, prompt: Sequence[int] = ()) -> None:
        """Begins after a prompt, whose text is not returned.

        `piece_of` gives the bytes of a token id, and takes whether it is the first one that prints.
        """
        self._piece_of = piece_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_begun, tail = False, b""
        for token_id in reversed(prompt):
            # Of a text before only an unfinished character at its end matters.
            tail = piece_of(token_id, False) + tail
            if len(tail) >= _LONGEST:
                break
        self._is_begun = bool(tail)
        self._decoder.decode(tail)

    @property
    def is_begun(self) -> bool:
        """Whether any token so far prints."""
        return self._is_begun

    @property
    def is_inside_character(self) -> bool:
        """Whether the text ends with a part of a character."""
        return bool(self._decoder.getstate()[0])

    def push(self, token_id: int) -> str:
        """Returns the text that one more token makes certain, often empty."""
        piece = self._piece_of(token_id, not self._is_begun)
        # A space that is stripped prints nothing, and yet it was the first token.
        self._is_begun = self._is_begun or bool(piece) or bool(self._piece_of(token_id, False))
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """Returns what was held back, an unfinished character, as U+FFFD: the text ends here."""
        return self._decoder.decode(b"", final=True)


class TokenTexts:
    """What every tokenizer can do once it knows for which bytes each of its tokens stands.

    Attributes:
      vocab_size: one more than the highest id in use; a model may have more rows (padding).
    """

    vocab_size: int

    def piece(self, token_id: int, is_first: bool) -> bytes:
        """Returns the bytes of a token, which `is_first` in its text or not; b"" for special ones.

        A space that a decoder strips from the beginning of a whole text is missing there only.
        """
        raise NotImplementedError

    def vocabulary(self) -> dict[str, int]:
        """Returns the id of every token."""
        raise NotImplementedError

    def stream(self, prompt: Sequence[int] = ()) -> TextStream:
        """Returns the stream of what comes after a prompt: its `push(id)` and `flush()`."""
        return TextStream(self.piece, prompt)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids, special tokens left out, broken UTF-8 as U+FFFD."""
        stream = self.stream()
        return "".join([stream.push(int(token_id)) for token_id in ids]) + stream.flush()

    def token_bytes(self) -> list[bytes]:
        """Returns the bytes of every id inside a text; b"" where it has none."""
        return [self.piece(token_id, False) for token_id in range(self.vocab_size)]

    @functools.cached_property
    def strips(self) -> bool:
        """Whether a token may lose its space where it begins a text."""
        ids = range(self.vocab_size)
        return any(self.piece(i, True) != self.piece(i, False) for i in ids)

    def label(self, token_id: int) -> tuple[str, bytes]:
        """Returns a token's name, no two alike, and its bytes, those of its name if it has none."""
        names = self._names
        name = names[token_id] if token_id < len(names) else f"token_id:{token_id}"
        return name, self.piece(token_id, False) or name.encode()

    @functools.cached_property
    def _names(self) -> list[str]:
        vocabulary: list[str | None] = [None] * self.vocab_size
        for name, token_id in self.vocabulary().items():
            vocabulary[token_id] = name
        return _unique_names(self.token_bytes(), vocabulary)


class PieceReader:
    """Finds out by the decoder of a `tokenizers.Tokenizer` for which bytes its tokens stand."""

    def __init__(self, backend: Any) -> None:
        """Reads from the decoder's own JSON of which kinds its parts are."""
        decoder = backend.decoder
        kinds = set(re.findall(rb'"type":"(\w+)"', decoder.__getstate__() if decoder else b""))
        self._is_byte_level, self._has_bytes = b"ByteLevel" in kinds, b"ByteFallback" in kinds
        self._decode: Callable[[list[str]], str] = decoder.decode if decoder else " ".join
        self._before = self._decode([_ANCHOR])
        self._after = self._decode([_ANCHOR, _ANCHOR])[len(self._before) :]

    def piece(self, name: str, *, is_added: bool, is_first: bool) -> bytes:
        """Returns the bytes for which a token of the vocabulary stands in a text."""
        if self._is_byte_level:
            letters = _letters()
            is_plain = is_added or not all(letter in letters for letter in name)
            return name.encode() if is_plain else bytes(letters[letter] for letter in name)
        # The decoder shows half a character as U+FFFD.
        match = _BYTE.fullmatch(name) if self._has_bytes else None
        if match and int(match[1], 16) >= 0x80:
            return bytes([int(match[1], 16)])
        text = self._decode([name, _ANCHOR] if is_first else [_ANCHOR, name, _ANCHOR])
        begin = 0 if is_first else len(self._before)
        return text[begin : len(text) - len(self._after)].encode()


@functools.cache
def _letters() -> dict[str, int]:
    """Returns the byte of each letter of byte-level vocabularies (GPT-2's table).

    A printable byte is its own letter; the others take the letters from U+0100 on, in order.
    """
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [ord(letter) for letter in letters if ord(letter) < 0x100]
    others = sorted(set(range(0x100)) - set(printable))
    return dict(zip(letters, printable + others, strict=True))


def _unique_names(texts: Sequence[bytes], vocabulary: Sequence[str | None]) -> list[str]:
    """Returns a name of each token id, no two alike.

    That is the token's text, as OpenAI does `bytes:\\xf0` for what is no whole character; the
    vocabulary's own name of special tokens, and where two tokens stand for one text; else
    `token_id:7`, as vLLM has it.
    """
    names: dict[str, int] = {}

    def name_all(token_ids: Sequence[int], name_of: Callable[[int], str | None]) -> list[int]:
        """Names those whose name is free; returns the others."""
        return [i for i in token_ids if not (name := name_of(i)) or names.setdefault(name, i) != i]

    everything = range(len(texts))
    is_spelt = [bool(vocabulary[i] and _BYTE.fullmatch(vocabulary[i] or "")) for i in everything]
    # A byte's token gives way to that of the character.
    rest = name_all(sorted(everything, key=is_spelt.__getitem__), lambda i: _shown(texts[i]))
    rest = name_all(rest, lambda i: vocabulary[i])
    name_all(rest, lambda i: f"token_id:{i}")
    name_by_id = {token_id: name for name, token_id in names.items()}
    return [name_by_id[i] for i in everything]


def _shown(text: bytes) -> str | None:
    if not text:
        return None
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)
