"""Tiny targets and texts on disk, as runs of training read them."""

from tokenizers import Tokenizer as Backend
from tokenizers import models

from jspec.training.texts import write_texts
from jspec.weights import Tokenizer
from jspec.weights.hf import save_hf


def save_target(folder, model):
    """Writes a model with a tokenizer of as many words; returns the folder's name."""
    words = {f"word{index}": index for index in range(model.config.vocab_size)}
    tokenizer = Tokenizer(Backend(models.WordLevel(words, unk_token="word0")), special_tokens={})
    save_hf(folder, model.config, model.params, tokenizer=tokenizer)
    return str(folder)


def save_texts(path, texts):
    """Writes texts; returns the file's name."""
    write_texts(path, texts)
    return str(path)
