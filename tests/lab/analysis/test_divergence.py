"""Where two answers part."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.generation.logits_after import make_logits_after
from jspec.lab.auditing.checks import parting_gaps
from jspec.models import init_cache, make_apply
from tests.tiny import one_program
from tests.tiny_models import CONFIG, target

_LOGITS = np.array([0.0, 2.0, 1.5, -1.0])


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([1, 2], [1, 2], []),
        ([1, 1, 3], [1, 2, 3], [0.5]),
        ([2], [3], [3.0]),  # neither is the best: the worse one counts
        ([1, 2], [1], [math.inf]),
        ([], [1], [math.inf]),
    ],
)
def test_the_first_difference_is_found(left, right, expected):
    """Guards against an excuse for a token that is far from the best, or for a lost end."""
    assert parting_gaps([[5]], [left], [right], lambda _: _LOGITS) == expected


def test_the_logits_are_those_before_the_difference():
    """Guards against a look one token early or late, with the prompt forgotten."""
    seen = []

    def logits_after(token_ids):
        seen.append(token_ids)
        return _LOGITS

    parting_gaps([[5, 6]], [[1, 2, 3]], [[1, 2, 0]], logits_after)
    assert seen == [[5, 6, 1, 2]]


@pytest.mark.parametrize("length", [1, 128, 129])
def test_padding_changes_nothing(length):
    """Guards against logits of a padding token."""
    tokens = np.random.default_rng(length).integers(1, CONFIG.vocab_size, length).tolist()
    cache = init_cache(CONFIG, batch_size=1, capacity=length, dtype=jnp.float32)
    apply = one_program(make_apply(CONFIG))
    expected = apply(target().params, jnp.array([tokens]), cache)[0][0, -1]
    np.testing.assert_allclose(make_logits_after(target())(tokens), expected, atol=1e-4)
