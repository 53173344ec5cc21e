"""Bytes and operations of a call, against real arrays and traced programs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.kernels import library as native
from jspec.lab.analysis.call_cost import CallCost
from jspec.models import DecoderConfig, decoder, init_cache, init_params, make_apply
from jspec.models.cache import TAIL
from tests.weights.toys import quantize_params

CONFIG = DecoderConfig(
    vocab_size=96, embed_dim=64, hidden_dim=160, num_layers=2, num_heads=6, num_kv_heads=2,
    head_dim=16, max_seq_len=64, qkv_bias=True, out_bias=True, mlp_bias=True,
)  # fmt: skip
TIED = dataclasses.replace(
    CONFIG, tie_embeddings=True, qkv_bias=False, out_bias=False, mlp_bias=False
)


def num_bytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("config", "kind"),
    [(CONFIG, None), (TIED, None), (CONFIG, "int8"), (TIED, "int4"), (CONFIG, "q4_0")],
    ids=["untied", "tied", "int8", "tied int4", "q4_0"],
)
def test_weight_bytes_are_those_of_the_arrays(config, kind):
    """To the byte, scales and multipliers included; an untied input embedding is not streamed."""
    params = jax.jit(functools.partial(init_params, config))(jax.random.key(0))
    if kind is not None:
        params = quantize_params(params, config, kind)
    expected = num_bytes(params)
    if not config.tie_embeddings:
        expected -= num_bytes(params["embedding"])
    assert CallCost(config, quantization=kind, float_bytes=4).weight_bytes == expected


def test_cache_bytes_are_those_of_the_arrays():
    """Keys and values of all layers, of the kv heads only."""
    cache = init_cache(CONFIG, batch_size=3, capacity=40, dtype=jnp.bfloat16)
    slots = 3 * (40 + TAIL)
    assert CallCost(CONFIG).slot_bytes * slots == num_bytes((cache.keys, cache.values))


def test_a_call_reads_weights_once_and_each_rows_cache():
    """Whatever the width."""
    cost = CallCost(CONFIG, bytes_per_weight=1.0)
    head = CONFIG.vocab_size * CONFIG.embed_dim
    params = jax.eval_shape(lambda key: init_params(CONFIG, key), jax.random.key(0))
    assert cost.weight_bytes == sum(leaf.size for leaf in jax.tree.leaves(params)) - head
    more = cost.call_bytes(5, context=40, batch_size=3) - cost.weight_bytes
    assert more == 3 * 45 * 2 * 2 * 2 * 16 * 2


def test_a_windowed_layer_reads_its_window():
    """By hand: one layer of two reads 8 slots instead of 40, beside the call's own 5."""
    local = dataclasses.replace(CONFIG, window=8, windowed_layers=(1,))
    cost = CallCost(local, bytes_per_weight=1.0)
    a_slot = 2 * 2 * 16 * 2  # of one layer
    read = cost.call_bytes(5, context=40, batch_size=3) - cost.weight_bytes
    assert read == 3 * (45 + 13) * a_slot
    saved = CallCost(CONFIG).call_operations(5, context=40) - cost.call_operations(5, context=40)
    assert saved == 5 * 4 * 6 * 16 * (40 - 8)
    short = CallCost(local).call_bytes(5, context=6)
    assert short == CallCost(CONFIG).call_bytes(5, context=6)


def test_what_cannot_be_counted_is_refused():
    """Guards against the bytes of all experts counted for every call."""
    sparse = {"num_experts": 2, "num_experts_per_token": 1, "expert_dim": 8}
    with pytest.raises(InputError, match="a model without experts"):
        CallCost(dataclasses.replace(CONFIG, family="mixtral", **sparse))
    for options in (
        {"config": TIED, "quantization": "int3"},
        {"config": dataclasses.replace(TIED, hidden_dim=100), "quantization": "int4"},
    ):
        with pytest.raises(InputError, match="expect"):
            CallCost(**options)


def count_products(jaxpr):
    """Returns the operations of all dot_generals: 2 for each output and contracted index."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            lengths = [eqn.invars[0].aval.shape[axis] for axis in contracted]
            total += 2 * int(np.prod(eqn.outvars[0].aval.shape)) * int(np.prod(lengths))
        for inner in eqn.params.values():  # of jitted functions and loops
            inner = getattr(inner, "jaxpr", inner)
            total += count_products(inner) if hasattr(inner, "eqns") else 0
    return total


@pytest.mark.parametrize(
    ("config", "width", "batch_size"), [(CONFIG, 1, 1), (TIED, 3, 4)], ids=["untied", "tied"]
)
def test_operations_are_those_of_the_traced_products(config, width, batch_size, monkeypatch):
    """Exactly: every dot product in XLA's program, those of attention over all slots included."""
    monkeypatch.setattr(native, "is_available", lambda: False)
    monkeypatch.setattr(decoder, "_apply_block", decoder._apply_block.__wrapped__)
    params = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
    cache = init_cache(config, batch_size=batch_size, capacity=32, dtype=jnp.float32)
    tokens = jnp.zeros([batch_size, width], jnp.int32)
    traced = jax.make_jaxpr(make_apply(config))(params, tokens, cache)
    cost = CallCost(config)
    actual = cost.call_operations(width, context=32 + TAIL - width, batch_size=batch_size)
    assert actual == count_products(traced.jaxpr) > 0
