"""A decoder block by CUDA C++ says what the model's own says in float32, family by family."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.eagle_head import EagleConfig, EagleLayer, init_eagle_params
from jspec.kernels import PackedKernel, QuantizedKernel, cuda_block, library
from jspec.models import init_cache
from jspec.models.cache import TAIL, KVCache
from jspec.models.decoder import Block
from jspec.models.layers import rope_cos_sin
from tests.cases import slow_unless
from tests.kernels.cuda.test_attention import in_pages
from tests.kernels.families import CONFIG, assert_close, make_model, random_tree
from tests.tiny import random_params

CANDIDATES = {candidate.name: candidate for candidate in cuda_block.CANDIDATES}
SLOTS = 128


class Call(NamedTuple):
    """What a block takes besides its parameters."""

    x: jax.Array
    rope: tuple[jax.Array, jax.Array]
    visible: jax.Array
    cache: KVCache


@pytest.fixture(autouse=True)
def _is_available(monkeypatch):
    monkeypatch.setattr(library, "is_cuda_available", lambda: True)


def make_layer(name, kind):
    config, params = make_model(name, kind)
    return config, params["layers_0"]


def make_call(config, rows, width, offset, has_pages=False, seed=0):
    """Returns a call on random trees after texts of different lengths; other slots are NaN."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, width, config.embed_dim)).astype(np.float32)
    num_slots = SLOTS if has_pages else SLOTS + TAIL
    shape = rows, config.num_kv_heads, num_slots, config.head_dim
    keys, values = (rng.normal(size=shape).astype(jnp.bfloat16) for _ in range(2))
    length = rng.integers(5, SLOTS - width - offset, rows).astype(np.int32)
    trees = [random_tree(rng, offset + width)[offset:] for _ in range(rows)]
    cache = KVCache((keys,), (values,), length)
    rope, visible = jax.jit(functools.partial(look, config))(cache, np.stack(trees))
    is_dead = np.arange(num_slots) >= length[:, None] + offset
    for layer in (keys, values):
        layer[np.broadcast_to(is_dead[:, None, :, None], layer.shape)] = np.nan
    if has_pages:
        cache = in_pages((keys, values), length, rng)
    return Call(x, rope, visible, cache)


def look(config, cache, mask):
    positions = cache.length[:, None] + jnp.sum(mask, axis=2, dtype=jnp.int32) - 1
    return rope_cos_sin(config, positions), cache.visible(mask, config.window_of(0))


def precise_layer(leaf):
    return leaf if leaf.dtype == jnp.int32 else np.nan_to_num(leaf.astype(np.float32))


def by_reference(module, params, offset, call, *inputs):
    precise = jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32),
        params,
        is_leaf=lambda leaf: isinstance(leaf, (QuantizedKernel, PackedKernel)),
    )
    cache = jax.tree.map(precise_layer, call.cache)
    apply = jax.jit(functools.partial(module.apply, block_offset=offset))
    return apply({"params": precise}, *call[:3], cache, *inputs)


def by_candidate(name, config, params, offset, call, *inputs):
    run = jax.jit(functools.partial(CANDIDATES[name].run, config, offset))
    x, cache = run(params, *call, *inputs)
    return x, jax.tree.map(jnp.nan_to_num, cache)


@pytest.mark.parametrize(
    ("candidates", "family", "kind", "rows", "width", "offset", "has_pages"),
    [
        ("attention cuda layer layer-pdl", "llama", None, 3, 5, 0, False),
        ("attention cuda layer", "biased", "int8", 1, 1, 0, True),
        ("attention cuda", "gemma", None, 2, 5, 3, False),
        ("cuda", "post", None, 2, 2, 0, True),
        ("layer", "llama", "q4_0", 1, 5, 0, False),
        ("layer", "biased", None, 2, 3, 1, False),
        slow_unless(False, "attention cuda layer", "llama", "int4", 4, 16, 0, False),
        slow_unless(False, "attention cuda layer-pdl", "llama", "int8", 3, 16, 2, True),
        slow_unless(False, "attention cuda", "gemma", "int8", 2, 16, 0, True),
        slow_unless(False, "attention cuda layer", "biased", "q4_0", 2, 7, 1, True),
        slow_unless(False, "attention cuda", "post", "int4", 2, 2, 0, False),
    ],
)
def test_a_block_says_what_the_models_own_says(
    emulator, candidates, family, kind, rows, width, offset, has_pages
):
    """The stream and the cache. Slots not committed hold NaN, and so does unwritten memory."""
    config, params = make_layer(family, kind)
    call = make_call(config, rows, width, offset, has_pages)
    expected = by_reference(Block(config), params, offset, call)
    for name in candidates.split():
        assert CANDIDATES[name].takes(config, params, jnp.asarray(call.x), call.cache)
        x, cache = by_candidate(name, config, params, offset, call)
        assert_close((x - call.x, cache), (expected[0] - call.x, expected[1]))


@pytest.mark.parametrize("name", ["attention", "cuda"])
def test_attention_may_read_something_else_than_the_stream(emulator, name):
    """As an EAGLE head's layer, which reads embedding and feature side by side."""
    config = dataclasses.replace(CONFIG, num_layers=1, qkv_bias=True)
    eagle = EagleConfig(config, 40, (0, 1, 2))
    shapes = jax.eval_shape(lambda key: init_eagle_params(eagle, key), jax.random.key(0))["head"]
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(0.2 * rng.normal(size=leaf.shape), jnp.bfloat16),
        {part: shapes[part] for part in EagleLayer.PARTS},
    )
    call = make_call(config, 2, 3, 0)
    inputs = rng.normal(size=(2, 3, 2 * config.embed_dim)).astype(np.float32)
    assert CANDIDATES[name].takes(config, params, jnp.asarray(call.x), call.cache)
    assert not CANDIDATES["layer"].takes(config, params, jnp.asarray(call.x), call.cache)
    expected = by_reference(EagleLayer(config), params, 0, call, inputs)
    x, cache = by_candidate(name, config, params, 0, call, inputs)
    assert_close((x - call.x, cache), (expected[0] - call.x, expected[1]))


@pytest.mark.parametrize("name", ["cuda", "layer"])
def test_a_token_gives_the_same_bits_at_every_width(emulator, name):
    """The first token of a chain, alone and with those after it; widths of one tile and of two."""
    config, params = make_layer("llama", None)
    call = make_call(config, 2, 16, 0)

    def first(width):
        cut = jax.tree.map(lambda leaf: leaf[:, :width], call[:3])
        chain = np.broadcast_to(np.tril(np.ones([width, width], bool)), (2, width, width))
        visible = jax.jit(lambda cache, mask: cache.visible(mask))(call.cache, chain)
        x, _ = by_candidate(name, config, params, 0, Call(*cut[:2], visible, call.cache))
        return np.asarray(x[:, 0])

    expected = first(16)
    for width in (1, 5):
        np.testing.assert_array_equal(first(width), expected)


@pytest.fixture
def cache():
    return init_cache(CONFIG, batch_size=1, capacity=40, dtype=jnp.bfloat16).layer(0)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({}, "attention cuda layer layer-pdl"),
        ({"norms": "post"}, "attention cuda"),
        ({"norms": "both"}, "attention cuda"),
        ({"num_experts": 2, "num_experts_per_token": 1, "expert_dim": 32}, ""),
        ({"qk_norm": "full"}, ""),
        ({"qk_norm": "head"}, "attention cuda layer layer-pdl"),
        ({"head_dim": 48}, ""),
        ({"head_dim": 288}, ""),
        ({"embed_dim": 72}, "attention"),
        ({"hidden_dim": 100}, "attention"),
    ],
    ids=str,
)
def test_other_layers_are_left_to_xla(change, names):
    config = dataclasses.replace(CONFIG, num_layers=1, **change)
    shapes = jax.eval_shape(lambda: random_params(config, seed=3, std=0.15))["layers_0"]
    params = jax.tree.map(lambda leaf: jnp.asarray(np.zeros(leaf.shape), jnp.bfloat16), shapes)
    cache = init_cache(config, batch_size=1, capacity=40, dtype=jnp.bfloat16).layer(0)
    assert taking(config, params, jnp.zeros([1, 5, config.embed_dim]), cache) == names


def test_other_calls_and_types_are_left_to_xla(cache):
    config, params = make_layer("llama", None)
    every = " ".join(CANDIDATES)
    for rows, width, names in ((1, 16, every), (4, 16, every), (1, 17, ""), (65, 1, "")):
        assert taking(config, params, jnp.zeros([rows, width, 64]), cache) == names
    x = jnp.zeros([1, 1, 64])
    floats = init_cache(config, batch_size=1, capacity=40, dtype=jnp.float32).layer(0)
    assert taking(config, params, x, floats) == ""
    assert taking(config, params, x, cache.replace(is_split=True)) == ""
    precise = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    assert taking(config, precise, x, cache) == "attention"


def test_without_the_library_xla_computes(monkeypatch, cache):
    monkeypatch.setattr(library, "is_cuda_available", lambda: False)
    assert taking(*make_layer("llama", None), jnp.zeros([1, 1, 64]), cache) == ""


def taking(config, params, x, cache):
    return " ".join(c.name for c in CANDIDATES.values() if c.takes(config, params, x, cache))
