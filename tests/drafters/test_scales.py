"""Drafters that feed the target themselves, on one with scales, caps and a window."""

import dataclasses
import functools

import pytest

from jspec.drafters.layer_skip import FirstLayersDrafter
from jspec.models import make_apply
from tests import tiny, tiny_lookahead
from tests.speculation.drive import Engine

WIDTH = 3
CONFIG = dataclasses.replace(
    tiny.CONFIG, embedding_scale=7.0, residual_scale=0.7, logits_scale=0.6, logits_softcap=9.0,
    attention_softcap=6.0, window=6, windowed_layers=(0,),
)  # fmt: skip
APPLY = make_apply(CONFIG)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [9], [2, 6, 5, 2, 6, 5]]
SIZES = WIDTH, 61, CONFIG.vocab_size
MAKE = {
    "lookahead": lambda: (tiny_lookahead.drafter(WIDTH), tiny_lookahead.params()),
    "layer_skip": lambda: (
        FirstLayersDrafter(
            *SIZES, apply=make_apply(CONFIG, (0,)), num_layers=1, embed_dim=CONFIG.embed_dim
        ),
        None,
    ),
}


@functools.cache
def tokens_of(name):
    """Returns the greedy tokens of the prompts."""
    drafter, params = MAKE[name]() if name else (None, None)
    target = tiny.random_params(CONFIG, seed=0, std=0.4)
    engine = Engine(APPLY, tiny.empty_cache, (target, params), drafter)
    return engine.generate(PROMPTS, max_length=40).tokens


@pytest.mark.parametrize("name", MAKE)
def test_greedy_output_is_plain_output(name):
    """Every call of the target sees the same scales, whoever embeds its block."""
    assert tokens_of(name) == tokens_of(None)
