"""Weights and tokenizers: every checkpoint format in, one parameter tree out."""

from jspec.weights.resolver import LoadedModel, load_model
from jspec.weights.tokenizers.tokenizer import Tokenizer, TokenizerLike
from jspec.weights.vocabulary import vocabulary_digest

__all__ = [
    "LoadedModel",
    "Tokenizer",
    "TokenizerLike",
    "load_model",
    "vocabulary_digest",
]
