"""The tokenizer inside a GGUF file."""

from typing import Any

from jspec.common.errors import InputError
from jspec.weights.gguf_file import GgufFile
from jspec.weights.tokenizers.tokenizer import Tokenizer, add_bos

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types
# Names of special tokens, and of the keys with their ids.
_SPECIAL_TOKENS = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding",
}  # fmt: skip
# Llama 3's pattern of words (from its tokenizer.json).
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = frozenset({"llama-bpe", "llama3", "llama-v3"})
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r"})
_GPT2 = frozenset({"gpt-2", "gpt2", "default"})


def _byte_level(own: dict[str, Any], vocab: dict[str, int]) -> Any:
    """Returns byte-level BPE with the pre-tokenizer that the file's `own` metadata name."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    kind = own.get("pre", "default")
    if kind in _LLAMA3:
        words = [pre_tokenizers.Split(Regex(_LLAMA3_WORDS), "isolated")]
    elif kind in _SINGLE_DIGITS:
        words = [pre_tokenizers.Digits(individual_digits=True)]
    elif kind in _GPT2:
        words = []
    else:
        known = ", ".join(sorted(_LLAMA3 | _SINGLE_DIGITS | _GPT2))
        raise InputError(f"expected a pre-tokenizer among {known}; got {kind!r}")
    merges = [tuple(merge.split(" ", 1)) for merge in own["merges"]]
    backend = Backend(models.BPE(vocab, merges, ignore_merges=kind in _LLAMA3))
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind not in _LLAMA3)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*words, cut])
    backend.decoder = decoders.ByteLevel()
    return backend


def _merges_from_scores(own: dict[str, Any], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Returns every pair of pieces that makes a third piece, best scores first."""
    scored = [
        (-score, token_id, piece[:cut], piece[cut:])
        for (piece, token_id), score in zip(vocab.items(), own["scores"], strict=True)
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    return [(left, right) for _, _, left, right in sorted(scored)]


def _sentencepiece(own: dict[str, Any], vocab: dict[str, int]) -> Any:
    """Returns SentencePiece's BPE: spaces as U+2581, unknown characters as bytes."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    unknown = own["tokens"][own.get("unknown_token_id", 0)]
    merges = _merges_from_scores(own, vocab)
    backend = Backend(
        models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    has_prefix = own.get("add_space_prefix", True)
    steps = [normalizers.Prepend("\u2581")] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    back = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence([*back, *strip])
    return backend


def _add_special_tokens(own: dict[str, Any], backend: Any, tokens: list[str]) -> None:
    """Adds the control tokens, which decoding skips, and the user-defined tokens."""
    from tokenizers import AddedToken

    types = own.get("token_type") or [1] * len(tokens)
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """Returns the tokenizer that a file's metadata describes.

    Raises:
      InputError: no tokenizer in the file, or a kind that jspec cannot build.
    """
    prefix = "tokenizer.ggml."
    own = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
    tokens, kind = own.get("tokens"), own.get("model")
    if not tokens:
        raise InputError(f"{file.path}: no tokenizer in the file")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise InputError(f"{file.path}: expected a gpt2 or llama tokenizer, got {kind!r}")
    try:
        backend = builders[kind](own, {token: i for i, token in enumerate(tokens)})
        _add_special_tokens(own, backend, tokens)
        special_tokens = {
            name: tokens[token_id]
            for name, key in _SPECIAL_TOKENS.items()
            if (token_id := own.get(f"{key}_token_id")) is not None
        }
        # Where the file does not say whether to begin with BOS, its kind does.
        by_default = kind == "llama" or own.get("pre") in _LLAMA3
        if own.get("add_bos_token", by_default):
            add_bos(backend, special_tokens.get("bos_token"), True)
    except InputError as error:
        raise InputError(f"{file.path}: {error}") from None
    except Exception as error:  # tokenizers raises Exception itself, damaged metadata any kind
        reason = str(error).partition("\n")[0]
        raise InputError(f"{file.path}: the tokenizer is damaged ({reason})") from None
    ends = [own.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        eos_ids=[token_id for token_id in ends if token_id is not None],
        chat_template=file.metadata.get("tokenizer.chat_template"),
    )
