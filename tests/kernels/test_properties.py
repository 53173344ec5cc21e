"""The distributions on a model whose attention and products are computed in C++, in bfloat16
too.
"""

import dataclasses
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.generation.generator import Generator
from jspec.generation.request import Request, SamplingParams
from jspec.kernels import library as native
from jspec.models import init_cache, make_apply
from tests import tiny_models
from tests.cases import slow_unless
from tests.tiny_models import peaked_params

pytestmark = pytest.mark.usefixtures("library")

CONFIG = dataclasses.replace(
    tiny_models.CONFIG, embed_dim=40, num_heads=6, head_dim=32, max_seq_len=600
)
WIDE = dataclasses.replace(
    tiny_models.CONFIG, num_layers=6, embed_dim=576, num_heads=6, head_dim=32
)
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9], list(range(1, 70))]


def make_model(dtype):
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), peaked_params(CONFIG))
    return tiny_models.make_model(CONFIG, params=params)


@pytest.fixture(scope="module", params=["bfloat16", slow_unless(False, "float32")])
def generators(request):
    """Returns Generators without drafts and with lookups, which makes every call a wide one.

    Both draw by the coupled rule, which at temperature 0 is greedy: a program serves both tests.
    """
    target = make_model(request.param)
    return (
        Generator(target, drafter="none"),
        Generator(target, drafter="prompt_lookup", num_draft_tokens=5, acceptance="coupled"),
    )


@pytest.mark.parametrize(
    "settings",
    [SamplingParams(max_new_tokens=60), SamplingParams(max_new_tokens=60, temperature=0.9, seed=3)],
    ids=["greedy", "coupled"],
)
def test_drafts_change_no_token_whatever_the_type(generators, settings):
    """Invariant 2 and invariant 5, in bfloat16 too: a token's logits are those of a call on it
    alone.
    """
    plain, drafted = (
        [generator.generate(Request(prompt, settings)) for prompt in PROMPTS]
        for generator in generators
    )
    assert [a.token_ids for a in drafted] == [a.token_ids for a in plain]
    assert sum(answer.stats.num_accepted for answer in drafted) > 5


def test_decoding_says_what_one_full_pass_says():
    """Invariant 3: after prompts of one chunk, of two, and of wide ones with a rest behind them."""
    model = make_model("float32")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 128, length).tolist() for length in (1, 64, 128, 257, 300, 400)]
    generator = Generator(model, drafter="none")
    results = generator.generate([Request(p, SamplingParams(max_new_tokens=12)) for p in prompts])
    apply = jax.jit(make_apply(CONFIG))
    for prompt, result in zip(prompts, results, strict=True):
        text = np.zeros([1, 512], np.int32)
        text[0, : len(prompt) + 12] = prompt + result.token_ids
        cache = init_cache(CONFIG, batch_size=1, capacity=512, dtype=jnp.float32)
        best = np.argmax(apply(model.params, jnp.asarray(text), cache)[0][0], axis=-1)
        assert result.token_ids == best[len(prompt) - 1 :][: len(result.token_ids)].tolist()


def test_a_call_on_many_tokens_says_what_calls_on_each_say():
    """In its own process: the tests' own XLA adds up all numbers of rows alike."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    code = "from tests.kernels.test_properties import check_widths\ncheck_widths()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def check_widths():
    """Checks bit for bit, in bfloat16; XLA's own sums change from eight rows on."""
    assert native.is_available()
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), peaked_params(WIDE))
    apply = jax.jit(make_apply(WIDE))
    text = jnp.asarray(np.random.default_rng(0).integers(1, 128, [8, 16]), jnp.int32)
    alone, cache = [], _empty(1)
    for token in text[0]:
        logits, _, cache = apply(params, token[None, None], cache)
        cache = cache.commit(jnp.array([1], jnp.int32))
        alone.append(logits[0, 0])
    for rows, width in ((1, 2), (1, 8), (1, 16), (8, 2)):
        together = apply(params, text[:rows, :width], _empty(rows))[0]
        np.testing.assert_array_equal(together[0], np.stack(alone[:width]))


def _empty(rows):
    return init_cache(WIDE, batch_size=rows, capacity=64, dtype=jnp.bfloat16)
