"""The bytes that each token of a vocabulary stands for."""

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from jspec.common.errors import InputError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def backend_token_bytes(backend: Any, vocab_size: int) -> list[bytes | None]:
    """Returns the bytes of every id; None where it has no text, like a special token.

    A space that a decoder strips from the beginning of a whole text is counted.

    Raises:
      InputError: `backend` is neither byte-level nor SentencePiece's.
    """
    kinds = _decoder_kinds(json.loads(backend.decoder.__getstate__()) if backend.decoder else {})
    if "ByteLevel" in kinds:
        to_bytes = _byte_level
    elif kinds & {"ByteFallback", "Metaspace"}:
        to_bytes = _sentencepiece
    else:
        names = ", ".join(sorted(kinds)) or "no decoder"
        raise InputError(f"expected a byte-level or SentencePiece tokenizer, got one with {names}")
    found: list[bytes | None] = [None] * vocab_size
    for token, token_id in backend.get_vocab(with_added_tokens=True).items():
        found[token_id] = to_bytes(token)
    for token_id, token in backend.get_added_tokens_decoder().items():
        found[token_id] = None if token.special else token.content.encode()
    return found


def _decoder_kinds(decoder: Mapping[str, Any]) -> set[str]:
    kinds = {decoder["type"]} if decoder else set()
    return kinds.union(*(_decoder_kinds(inner) for inner in decoder.get("decoders", ())))


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


def _byte_level(token: str) -> bytes:
    letters = _letters()
    if all(letter in letters for letter in token):
        return bytes(letters[letter] for letter in token)
    return token.encode()


def _sentencepiece(token: str) -> bytes:
    match = _BYTE.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("\u2581", " ").encode()
