"""Weights and tokenizers: every checkpoint format in, one parameter tree out."""

from jspec.weights.resolver import LoadedModel, load_model
from jspec.weights.tokenizers.tokenizer import NUM_BYTES, Tokenizer, TokenizerLike, learn_bpe
from jspec.weights.vocabulary import vocabulary_digest

__all__ = [
    "NUM_BYTES",
    "LoadedModel",
    "Tokenizer",
    "TokenizerLike",
    "learn_bpe",
    "load_model",
    "vocabulary_digest",
]
