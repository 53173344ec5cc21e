"""Weights and tokenizers: every format in, one parameter tree out."""

from jspec.user_cache import cache_dir
from jspec.weights.resolver import LoadedModel, load_model
from jspec.weights.tokenizer import Tokenizer, TokenizerLike, check_same_tokenizer

__all__ = [
    "LoadedModel",
    "Tokenizer",
    "TokenizerLike",
    "cache_dir",
    "check_same_tokenizer",
    "load_model",
]
