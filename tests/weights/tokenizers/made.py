"""Tokenizers of every family: small ones that are trained here, and real ones where they are.

`JSPEC_TOKENIZERS` names a folder with a folder for each of `REAL`, which holds its tokenizer.json,
or a GGUF file of that model.
"""

import functools
import json
import os
import pathlib

import pytest
from tokenizers import (
    AddedToken,
    ByteLevelBPETokenizer,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from jspec.weights import Tokenizer as OwnTokenizer
from jspec.weights.gguf import GgufFile
from jspec.weights.tokenizers.gguf_tokenizer import build_tokenizer
from jspec.weights.tokenizers.tokenizer import ByteTokenizer, add_bos

MADE = ("byte level", "strips", "keeps", "unigram", "wordpiece", "words", "suffixes", "bytes")
REAL = ("llama2", "gemma3", "qwen3", "llama3_1", "smollm2")
_CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "Once upon a time there was a café in 東京; it's said that 12345 people went there 😀.",
    "def add(a, b):\n    return a + b  # the sum\n",
]
_SPECIAL = ["<unk>", "<s>", "</s>"]


def learn_bpe(texts, vocab_size, *, bos, eos):
    """Returns a tokenizer of `vocab_size` ids, all bytes, `bos` and `eos` included."""
    learnt = ByteLevelBPETokenizer()
    learnt.train_from_iterator(
        texts, vocab_size, min_frequency=0, special_tokens=[bos, eos], show_progress=False
    )
    backend = Tokenizer.from_str(learnt.to_str())
    add_bos(backend, bos, True)
    return OwnTokenizer(backend, special_tokens={"bos_token": bos, "eos_token": eos})


def _rewritten(backend, change):
    raw = json.loads(backend.to_str())
    change(raw["model"])
    return Tokenizer.from_str(json.dumps(raw))


def _with_bytes(model):
    model["byte_fallback"], model["unk_token"], model["fuse_unk"] = True, "<unk>", True
    for byte in range(256):
        model["vocab"].setdefault(f"<0x{byte:02X}>", len(model["vocab"]))


def sentencepiece(*, strips, num_tokens=200):
    """Returns BPE with spaces as U+2581 and fallback to bytes, as Llama 2 has it, or Gemma."""
    backend = Tokenizer(models.BPE())
    spaces = [normalizers.Replace(" ", "\u2581")]
    begin = [normalizers.Prepend("\u2581")] if strips else []
    backend.normalizer = normalizers.Sequence([*begin, *spaces])
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens, special_tokens=_SPECIAL, show_progress=False, limit_alphabet=60
    )
    backend.train_from_iterator(_CORPUS, trainer)
    backend = _rewritten(backend, _with_bytes)
    strip = [decoders.Strip(" ", 1, 0)] if strips else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _unigram():
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=_SPECIAL, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(_CORPUS, trainer)
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return backend


def _trained(model, trainer, decoder):
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(_CORPUS, trainer)
    if decoder is not None:
        backend.decoder = decoder
    return backend


def _backend(name):
    about = {"special_tokens": _SPECIAL, "show_progress": False}
    if name == "strips":
        return sentencepiece(strips=True)
    if name == "keeps":
        return sentencepiece(strips=False)
    if name == "unigram":
        return _unigram()
    if name == "wordpiece":
        trainer = trainers.WordPieceTrainer(vocab_size=150, **about)
        return _trained(models.WordPiece(unk_token="<unk>"), trainer, decoders.WordPiece())
    if name == "words":
        trainer = trainers.WordLevelTrainer(vocab_size=60, **about)
        return _trained(models.WordLevel(unk_token="<unk>"), trainer, None)
    trainer = trainers.BpeTrainer(vocab_size=150, end_of_word_suffix="</w>", **about)
    model = models.BPE(end_of_word_suffix="</w>", unk_token="<unk>")
    return _trained(model, trainer, decoders.BPEDecoder())


@functools.cache
def make(name):
    """Returns the tokenizer of that name of `MADE`, and the library's behind it, or None."""
    if name == "bytes":
        return ByteTokenizer(300, bos_id=298, eos_ids=(299,)), None
    if name == "byte level":
        learnt = learn_bpe(_CORPUS, 320, bos="<s>", eos="</s>")
        backend = learnt._backend
    else:
        backend = _backend(name)
    backend.add_tokens(["<think>", "\u2581\u2581\u2581", "é"])
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return OwnTokenizer(backend, special_tokens=tokens), backend


@functools.cache
def load(name):
    """Returns the same of `REAL`; without it the test is skipped."""
    folder = pathlib.Path(os.environ.get("JSPEC_TOKENIZERS", "none"), name)
    if path := next(folder.glob("*.gguf"), None):
        tokenizer = build_tokenizer(GgufFile(path))
        return tokenizer, tokenizer._backend
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"the tokenizer of {name}: expected its folder in $JSPEC_TOKENIZERS")
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return OwnTokenizer(backend, special_tokens={}), backend
