"""Single tokens as texts: one may be half a character, which only its bytes can tell."""

import functools

from jspec.common.errors import InputError
from jspec.weights import TokenizerLike


@functools.lru_cache(maxsize=1)
def _token_bytes(tokenizer: TokenizerLike) -> list[bytes | None]:
    try:
        return tokenizer.token_bytes()
    except InputError:  # neither byte-level nor SentencePiece's
        return []


def text_and_bytes(tokenizer: TokenizerLike, token_id: int) -> tuple[str, bytes | None]:
    """Returns a token's text, and its bytes; None where they are not known."""
    text = tokenizer.decode([token_id])
    if "\ufffd" not in text:
        return text, text.encode()
    known = _token_bytes(tokenizer)
    return text, known[token_id] if token_id < len(known) else None


def text_or_bytes(tokenizer: TokenizerLike, token_id: int) -> str:
    """Returns a token's text, or as OpenAI does `bytes:\\xf0` for what is no whole character."""
    text, known = text_and_bytes(tokenizer, token_id)
    if "\ufffd" not in text or known is None:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in known)
