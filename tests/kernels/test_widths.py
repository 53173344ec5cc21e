"""A token's logits, alone and in wider calls, as XLA compiles them for users."""

import dataclasses
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.kernels import library as native
from jspec.models import init_cache, make_apply
from tests import tiny_models
from tests.tiny_models import peaked_params

CONFIG = dataclasses.replace(
    tiny_models.CONFIG, num_layers=6, embed_dim=576, num_heads=6, head_dim=32
)


@pytest.mark.usefixtures("library")
def test_a_call_on_many_tokens_says_what_calls_on_each_say():
    """In its own process: the tests' own XLA adds up all numbers of rows alike."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    code = "from tests.kernels.test_widths import check_widths\ncheck_widths()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def check_widths():
    """Checks bit for bit, in bfloat16; XLA's own sums change from eight rows on."""
    assert native.is_available()
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), peaked_params(CONFIG))
    apply = jax.jit(make_apply(CONFIG))
    text = jnp.asarray(np.random.default_rng(0).integers(1, 128, [8, 16]), jnp.int32)
    alone, cache = [], _empty(1)
    for token in text[0]:
        logits, _, cache = apply(params, token[None, None], cache)
        cache = cache.commit(jnp.array([1], jnp.int32))
        alone.append(logits[0, 0])
    for rows, width in ((1, 2), (1, 8), (1, 9), (1, 16), (8, 2)):
        together = apply(params, text[:rows, :width], _empty(rows))[0]
        np.testing.assert_array_equal(together[0], np.stack(alone[:width]))


def _empty(rows):
    return init_cache(CONFIG, batch_size=rows, capacity=64, dtype=jnp.bfloat16)
