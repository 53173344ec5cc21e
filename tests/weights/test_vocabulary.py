"""Vocabularies padded to different sizes, and different ones."""

import dataclasses

import jax.numpy as jnp
import pytest

from jspec.common.errors import InputError
from jspec.generation.generator import Generator
from jspec.generation.request import Request, SamplingParams
from jspec.weights.resolver import load_model
from jspec.weights.tokenizers.tokenizer import ByteTokenizer
from jspec.weights.vocabulary import shared_vocab_size, used_vocab_size
from tests import tiny_models
from tests.tiny_models import CONFIG, make_model
from tests.weights.toys import GGUF_CONFIG, random_tensors, write_gguf

_REAL = 100


def pad(params, num_rows):
    """Returns parameters with rows added that would win every draw, were they not masked."""
    padding = 9 * params["head"][:num_rows]
    head = jnp.concatenate([params["head"], padding, -padding])
    embedding = jnp.concatenate([params["embedding"], padding, padding])
    return {**params, "head": head, "embedding": embedding}


def padded_model(num_rows, disturbance=0.0, is_random=False):
    """Returns a model of 100 real ids and twice so many rows of padding."""
    real = dataclasses.replace(CONFIG, vocab_size=_REAL, num_layers=1)
    params = tiny_models.peaked_params(real, disturbance=disturbance)
    config = dataclasses.replace(real, vocab_size=_REAL + 2 * num_rows)
    tokenizer = ByteTokenizer(_REAL, eos_ids=CONFIG.eos_ids)
    params = pad(params, num_rows)
    return make_model(config, params=params, tokenizer=tokenizer, is_random=is_random)


def test_padding_is_neither_emitted_nor_proposed():
    """Guards against trained-looking padding in the target, and a draft distribution of another
    width.
    """
    generator = Generator(padded_model(6), padded_model(3, 0.03), num_draft_tokens=4)
    for temperature in (0.0, 1.2):
        settings = SamplingParams(max_new_tokens=60, temperature=temperature)
        result = generator.generate(Request([7, 8, 9], settings))
        assert max(result.token_ids) < _REAL
        assert 0 < result.stats.num_accepted < result.stats.num_proposed


def _padded_file(path, num_padding, seed):
    """Writes a GGUF model of 64 tokens, letters but for the first four, and rows of padding."""
    letters = [chr(ord("A") + i) for i in range(60)]
    padding = [f"[PAD{64 + i}]" for i in range(num_padding)]
    tokens = {
        "ggml.model": "gpt2", "ggml.pre": "qwen2", "ggml.merges": ["A B"],
        "ggml.tokens": ["<|x|>", "<s>", "</s>", "<end>", *letters[:-1], "AB", *padding],
        "ggml.token_type": [3] * 4 + [1] * 60 + [5] * num_padding,
    }  # fmt: skip
    config = dataclasses.replace(GGUF_CONFIG, vocab_size=64 + num_padding, num_layers=1)
    write_gguf(path, config, random_tensors(config, seed), tokens=tokens)
    return load_model(path, dtype="float32")


def test_two_paddings_in_files_work_without_a_word(tmp_path, capfd):
    """Guards against a refusal, a warning, or padding counted: 64 tokens in 72 rows and in 80."""
    target = _padded_file(tmp_path / "t.gguf", 8, 0)
    draft = _padded_file(tmp_path / "d.gguf", 16, 1)
    assert (target.config.vocab_size, draft.config.vocab_size) == (72, 80)
    assert (
        used_vocab_size(target) == used_vocab_size(draft) == shared_vocab_size(target, draft) == 64
    )
    assert Generator(target, draft).drafter == "prompt_lookup+model"
    assert capfd.readouterr() == ("", "")


def test_sizes():
    """Guards against padding counted as vocabulary, or random weights cut to bytes."""
    target, draft = padded_model(6), padded_model(3)
    assert used_vocab_size(target) == _REAL
    assert shared_vocab_size(target, draft) == _REAL
    assert shared_vocab_size(target, None) == _REAL
    assert used_vocab_size(padded_model(6, is_random=True)) == _REAL + 12
    config, tokenizer = dataclasses.replace(CONFIG, vocab_size=_REAL), ByteTokenizer(500)
    large, small = (make_model(c, tokenizer=tokenizer) for c in (CONFIG, config))
    assert used_vocab_size(large) == CONFIG.vocab_size  # a tokenizer may know more
    assert shared_vocab_size(large, small) == shared_vocab_size(small, large) == _REAL


def test_different_vocabularies_are_refused():
    """By a drafter that does not translate: lossless, and useless."""
    stranger = make_model(tokenizer=ByteTokenizer(120))
    with pytest.raises(
        InputError, match="different tokenizers: id 120 is '<120>' in the target and no token"
    ):
        shared_vocab_size(tiny_models.target(), stranger)
    with pytest.raises(InputError, match="one vocabulary, got 112 ids"):
        shared_vocab_size(tiny_models.target(), padded_model(6, is_random=True))
