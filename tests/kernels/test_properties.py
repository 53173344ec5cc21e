"""The distributions on a model whose attention and products are computed in C++, in bfloat16
too.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.generation.generator import Generator
from jspec.generation.request import Request, Settings
from jspec.models import init_cache, make_apply
from tests import tiny_models
from tests.cases import slow_unless
from tests.tiny_models import peaked_params

pytestmark = pytest.mark.usefixtures("library")

CONFIG = dataclasses.replace(
    tiny_models.CONFIG, embed_dim=40, num_heads=6, head_dim=32, max_seq_len=600
)
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9], list(range(1, 70))]


def make_model(dtype, disturbance=0.0):
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), peaked_params(CONFIG, 0, disturbance))
    return tiny_models.make_model(CONFIG, params=params)


@pytest.fixture(scope="module", params=["bfloat16", slow_unless(False, "float32")])
def models(request):
    """Returns a target and a draft that often agrees."""
    return make_model(request.param), make_model(request.param, disturbance=0.03)


def answers(models, drafter, settings, **options):
    target, draft = models
    generator = Generator(target, draft if drafter == "model" else None, drafter=drafter, **options)
    return [generator.generate(Request(prompt, settings)) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        (Settings(max_new_tokens=60), {}),
        (Settings(max_new_tokens=60, temperature=0.9, seed=3), {"acceptance": "coupled"}),
    ],
    ids=["greedy", "coupled"],
)
def test_drafts_change_no_token_whatever_the_type(models, settings, options):
    """Invariant 2 and invariant 5, in bfloat16 too: a token's logits are those of a call on it
    alone.
    """
    plain = answers(models, "none", settings)
    for drafter, number in (("prompt_lookup", 5), ("model", 3)):
        drafted = answers(models, drafter, settings, num_draft_tokens=number, **options)
        assert [a.token_ids for a in drafted] == [a.token_ids for a in plain]
        assert sum(answer.stats.num_accepted for answer in drafted) > 5


def test_decoding_says_what_one_full_pass_says():
    """Invariant 3: after prompts of one chunk, of two, and of wide ones with a rest behind them."""
    model = make_model("float32")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 128, length).tolist() for length in (1, 64, 128, 257, 300, 400)]
    generator = Generator(model, drafter="none")
    results = generator.generate([Request(p, Settings(max_new_tokens=12)) for p in prompts])
    apply = jax.jit(make_apply(CONFIG))
    for prompt, result in zip(prompts, results, strict=True):
        text = np.zeros([1, 512], np.int32)
        text[0, : len(prompt) + 12] = prompt + result.token_ids
        cache = init_cache(CONFIG, batch_size=1, capacity=512, dtype=jnp.float32)
        best = np.argmax(apply(model.params, jnp.asarray(text), cache)[0][0], axis=-1)
        assert result.token_ids == best[len(prompt) - 1 :][: len(result.token_ids)].tolist()
