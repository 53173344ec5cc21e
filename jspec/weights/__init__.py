"""Weights and tokenizers: every checkpoint format in, one parameter tree out."""

from jspec.common.user_cache import cache_dir
from jspec.weights.resolver import LoadedModel, load_model
from jspec.weights.tokenizers.learn_bpe import NUM_BYTES, learn_bpe
from jspec.weights.tokenizers.tokenizer import Tokenizer, TokenizerLike
from jspec.weights.vocabulary import check_same_tokenizer, vocabulary_digest

__all__ = [
    "NUM_BYTES",
    "LoadedModel",
    "Tokenizer",
    "TokenizerLike",
    "cache_dir",
    "check_same_tokenizer",
    "learn_bpe",
    "load_model",
    "vocabulary_digest",
]
