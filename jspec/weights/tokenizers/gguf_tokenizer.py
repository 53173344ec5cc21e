"""The tokenizer inside a GGUF file."""

import dataclasses
from typing import Any

from jspec.common.errors import InputError
from jspec.weights.gguf import GgufFile
from jspec.weights.tokenizers.tokenizer import Tokenizer, add_bos

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # llama.cpp's token types
# Names of special tokens, and of the keys with their ids.
_SPECIAL_TOKENS = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding",
}  # fmt: skip
# What ends an assistant's turn, by name: a file's keys often leave it out, as llama.cpp does.
_TURN_ENDS = frozenset({"<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>"})
# What ends a document, in models that pad with it: a prompt without a chat template ends so.
_DOCUMENT_END = "<|endoftext|>"

# The patterns of words are those of the models' own tokenizer.json. `{}` is how digits are cut.
_LLAMA_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True)
class _PreTokenizer:
    """How a text is cut before byte-level BPE.

    Attributes:
      words: the pattern of a word; None: GPT-2's.
      single_digits: whether digits are cut one by one before that.
      takes_whole_words: whether a word that is a token is taken as it is, whatever the merges say.
      has_bos: whether a text begins with BOS where the file does not say.
      composes: whether letters with their accents become one character first (Unicode's NFC).
    """

    words: str | None = None
    single_digits: bool = False
    takes_whole_words: bool = False
    has_bos: bool = False
    composes: bool = False


_GPT2 = _PreTokenizer()
_DIGITS = _PreTokenizer(single_digits=True)
_CL100K = _PreTokenizer(_LLAMA_WORDS.format(r"\p{N}{1,3}"))
_LLAMA3 = dataclasses.replace(_CL100K, takes_whole_words=True, has_bos=True)
_QWEN2 = _PreTokenizer(_LLAMA_WORDS.format(r"\p{N}"), composes=True)
_TEKKEN = _PreTokenizer(_TEKKEN_WORDS, takes_whole_words=True, has_bos=True)
# By llama.cpp's names: SmolLM3 is a llama-bpe, Granite a refact, OLMo-2 a dbrx, Mistral Nemo a
# tekken.
_PRE_TOKENIZERS = {
    "default": _GPT2, "gpt-2": _GPT2, "gpt2": _GPT2, "olmo": _GPT2, "granite-docling": _GPT2,
    "smollm": _DIGITS, "starcoder": _DIGITS, "refact": _DIGITS, "command-r": _DIGITS,
    "dbrx": _CL100K, "smaug-bpe": _CL100K,
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}  # fmt: skip


def _pre_tokenizer(metadata: dict[str, Any]) -> _PreTokenizer:
    kind = metadata.get("pre", "default")
    if kind not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise InputError(f"expected a pre-tokenizer among {known}; got {kind!r}")
    return _PRE_TOKENIZERS[kind]


def _byte_level(metadata: dict[str, Any], vocab: dict[str, int]) -> Any:
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    kind = _pre_tokenizer(metadata)
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["merges"]]
    backend = Backend(models.BPE(vocab, merges, ignore_merges=kind.takes_whole_words))
    digits = [pre_tokenizers.Digits(individual_digits=True)] if kind.single_digits else []
    words = [pre_tokenizers.Split(Regex(kind.words), "isolated")] if kind.words else []
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind.words is None)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*digits, *words, cut])
    if kind.composes:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _merges_from_scores(metadata: dict[str, Any], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Returns every pair of pieces that makes a third piece, best scores first.

    For one piece the pair with the longer left half comes first, as in transformers.
    """
    scores, types = metadata["scores"], metadata.get("token_type") or [1] * len(vocab)
    # These are found in a text before any merge.
    is_added = [kind in (_CONTROL, _USER_DEFINED) for kind in types]
    # Half a million pairs for Gemma: in this order they need no further sorting.
    ranked = sorted(vocab.items(), key=lambda item: scores[item[1]], reverse=True)
    return [
        (left, right)
        for piece, token_id in ranked
        if not is_added[token_id]
        for cut in range(len(piece) - 1, 0, -1)
        if (left := piece[:cut]) in vocab and (right := piece[cut:]) in vocab
    ]


def _sentencepiece(metadata: dict[str, Any], vocab: dict[str, int]) -> Any:
    """Returns SentencePiece's BPE: spaces as U+2581, unknown characters as bytes."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    unknown = metadata["tokens"][metadata.get("unknown_token_id", 0)]
    merges = _merges_from_scores(metadata, vocab)
    backend = Backend(
        models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    has_prefix = metadata.get("add_space_prefix", True)
    steps = [normalizers.Prepend("\u2581")] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    back = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence([*back, *strip])
    return backend


def _eos_ids(metadata: dict[str, Any], types: list[int]) -> list[int]:
    """Returns the ids that end a text: those that the file names, then those known by name."""
    named = [metadata.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    known = [
        token_id
        for token_id, (token, kind) in enumerate(zip(metadata["tokens"], types, strict=True))
        if kind == _CONTROL
        and (
            token in _TURN_ENDS
            or (token == _DOCUMENT_END and token_id == metadata.get("padding_token_id"))
        )
    ]
    return [token_id for token_id in [*named, *known] if token_id is not None]


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """Returns the tokenizer that a file's metadata describes.

    Unused tokens at the end, which pad the vocabulary, are left out.

    Raises:
      InputError: no tokenizer in the file, or a kind that jspec cannot build.
    """
    from tokenizers import AddedToken

    prefix = "tokenizer.ggml."
    metadata = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
    tokens, kind = metadata.get("tokens"), metadata.get("model")
    if not tokens:
        raise InputError(f"{file.path}: no tokenizer in the file")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise InputError(f"{file.path}: expected a gpt2 or llama tokenizer, got {kind!r}")
    try:
        types = metadata.get("token_type") or [1] * len(tokens)
        eos_ids = _eos_ids(metadata, types)
        # llama.cpp fills the embedding's untrained rows with unused tokens, [PAD151665] and so on.
        used = next((i + 1 for i in reversed(range(len(types))) if types[i] != _UNUSED), 0)
        vocab = {token: i for i, token in enumerate(tokens[:used])}
        backend = builders[kind](metadata, vocab)
        # Decoding skips the control tokens, but not those that users define.
        backend.add_tokens(
            [
                AddedToken(token, special=kind == _CONTROL, normalized=False)
                for token, kind in zip(tokens, types, strict=True)
                if kind in (_CONTROL, _USER_DEFINED)
            ]
        )
        special_tokens = {
            name: tokens[token_id]
            for name, key in _SPECIAL_TOKENS.items()
            if (token_id := metadata.get(f"{key}_token_id")) is not None
        }
        # Where the file does not say whether to begin with BOS, its kind does.
        by_default = kind == "llama" or _pre_tokenizer(metadata).has_bos
        if metadata.get("add_bos_token", by_default):
            add_bos(backend, special_tokens.get("bos_token"), True)
    except InputError as error:
        raise InputError(f"{file.path}: {error}") from None
    except Exception as error:  # tokenizers raises Exception itself, damaged metadata any kind
        reason = str(error).partition("\n")[0]
        raise InputError(f"{file.path}: the tokenizer is damaged ({reason})") from None
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        eos_ids=eos_ids,
        chat_template=file.metadata.get("tokenizer.chat_template"),
    )
