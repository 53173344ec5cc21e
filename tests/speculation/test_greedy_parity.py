"""Invariant 2: at temperature 0 speculation says what plain decoding says, token for token
(float32).
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.model import ModelDrafter
from tests.cases import slow_unless
from tests.speculation.drive import Engine
from tests.speculation.toys import VOCAB, toy_apply, toy_cache
from tests.tiny import full_logits

MAX_LENGTHS = [30, 41, 44, 38]


@pytest.fixture(scope="module")
def plain(make_engine, prompts):
    return make_engine("plain").generate(prompts, max_length=MAX_LENGTHS)


def test_plain_decoding_equals_the_argmax_of_full_passes(plain, tiny_pair, prompts):
    """Anchors everything below in the model itself."""
    for prompt, emitted, length in zip(prompts, plain.tokens, MAX_LENGTHS, strict=True):
        text = prompt + emitted
        assert len(text) == length
        padded = np.pad(text, (0, max(MAX_LENGTHS) - length))  # of one size: one program
        logits = full_logits(tiny_pair, tiny_pair.target, jnp.array([padded], jnp.int32))
        expected = np.argmax(logits[0, len(prompt) - 1 : length - 1], axis=-1)
        assert emitted == expected.tolist()


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("model", 4),
        *itertools.product(["prompt_lookup"], [1, 4]),
        *itertools.product(["suffix", "recycle"], [4]),
        *(
            slow_unless(False, *one)
            for one in (
                ("model", 1),
                *itertools.product(["model", "prompt_lookup"], [2, 3, 5]),
                *itertools.product(["hierarchical"], [1, 2, 4, 5]),
            )
        ),
    ],
)
def test_greedy_output_equals_plain_decoding(make_engine, prompts, plain, name, width):
    """Any slip in cache, positions, acceptance or ends changes a token sooner or later."""
    result = make_engine(name, width).generate(prompts, max_length=MAX_LENGTHS)
    assert result.tokens == plain.tokens
    proposed, accepted = result.infos.num_proposed.sum(), result.num_accepted.sum()
    assert 0 < accepted < proposed, "drafts must be both kept and refused to prove anything"


@pytest.mark.parametrize(
    "drafter",
    [None, ModelDrafter(2, VOCAB, VOCAB, apply=toy_apply, init_cache=toy_cache)],
    ids=["plain", "model"],
)
def test_a_small_lead_decides(drafter):
    """Guards against logits rounded on their way to a distribution: 8 and 8.001 are one
    bfloat16.
    """
    table = jnp.zeros([VOCAB] * 3).at[..., 0].set(8.0).at[..., 1].set(8.001)
    engine = Engine(toy_apply, toy_cache, (table, table), drafter, capacity=40, max_rounds=20)
    result = engine.generate([[2, 0, 3]], max_length=20)
    assert result.tokens == [[1] * 17]
    if drafter is not None:
        np.testing.assert_array_equal(result.num_accepted, result.infos.num_proposed)
