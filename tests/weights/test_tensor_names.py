"""The table between Hugging Face tensors and parameters."""

import dataclasses

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jspec.models import PRESETS, init_params
from jspec.weights.tensor_names import parameter_table
from tests.weights.toys import CONFIGS, random_tensors

_FLOAT32 = np.dtype(np.float32)


@pytest.mark.parametrize("name", CONFIGS)
def test_unpack_inverts_pack(name):
    """Guards against a slice that overlaps or misses another."""
    tensors = random_tensors(CONFIGS[name])
    back = {}
    for entry in parameter_table(CONFIGS[name]):
        back |= entry.unpack(entry.pack(tensors, _FLOAT32))
    assert back.keys() == tensors.keys()
    for key, tensor in tensors.items():
        np.testing.assert_array_equal(back[key], tensor)


@pytest.mark.parametrize("name", CONFIGS)
def test_each_element_is_set_exactly_once(name):
    """Guards against parts that together are more or fewer than the parameter."""
    for entry in parameter_table(CONFIGS[name]):
        count = np.zeros(entry.shape, int)
        for part in entry.parts:
            count[part.index] += 1
            assert count[part.index].size == np.prod(part.shape)
        assert (count == 1).all()


def test_query_heads_belong_to_their_kv_head():
    """Guards against grouping query head n with kv head n mod K instead of n div G."""
    config = CONFIGS["grouped"]
    tensors = random_tensors(config)
    prefix, dim = "model.layers.1.self_attn", config.head_dim
    entry = next(r for r in parameter_table(config) if r.path == ("layers_1", "attention", "qkv"))
    qkv = entry.pack(tensors, _FLOAT32)
    for n in range(config.num_heads):
        rows = tensors[f"{prefix}.q_proj.weight"][n * dim : (n + 1) * dim]
        np.testing.assert_array_equal(qkv[n // config.num_groups, n % config.num_groups], rows)
    for k in range(config.num_kv_heads):
        rows = slice(k * dim, (k + 1) * dim)
        np.testing.assert_array_equal(qkv[k, -2], tensors[f"{prefix}.k_proj.weight"][rows])
        np.testing.assert_array_equal(qkv[k, -1], tensors[f"{prefix}.v_proj.weight"][rows])


def test_gate_comes_before_up():
    """Guards against the two halves of the feed-forward product changing places."""
    config = CONFIGS["grouped"]
    tensors = random_tensors(config)
    entry = next(r for r in parameter_table(config) if r.path == ("layers_0", "mlp", "gate_up"))
    gate_up = entry.pack(tensors, _FLOAT32)
    np.testing.assert_array_equal(gate_up[0], tensors["model.layers.0.mlp.gate_proj.weight"])
    np.testing.assert_array_equal(gate_up[1], tensors["model.layers.0.mlp.up_proj.weight"])


@pytest.mark.parametrize("config", [*PRESETS.values(), *CONFIGS.values()], ids=str)
def test_shapes_are_what_the_model_declares(config):
    """Guards against a forgotten bias or head, at the real sizes too."""
    config = dataclasses.replace(config, num_layers=min(config.num_layers, 3))  # all are alike
    declared = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    shapes = {path: leaf.shape for path, leaf in flatten_dict(declared).items()}
    assert shapes == {entry.path: entry.shape for entry in parameter_table(config)}
