"""Weights and tokenizers: every format in, one parameter tree out."""

from jspec.common.user_cache import cache_dir
from jspec.weights.resolver import LoadedModel, load_model
from jspec.weights.tokenizers.tokenizer import (
    Tokenizer,
    TokenizerLike,
    check_same_tokenizer,
    vocabulary_digest,
)

__all__ = [
    "LoadedModel",
    "Tokenizer",
    "TokenizerLike",
    "cache_dir",
    "check_same_tokenizer",
    "load_model",
    "vocabulary_digest",
]
