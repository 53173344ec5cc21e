"""The table between Hugging Face tensors and parameters, and random parameters by it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jspec.models import PRESETS, init_params
from jspec.weights.random_weights import random_params
from jspec.weights.tensor_names import parameter_table
from tests.weights.toys import CONFIGS, random_tensors


@pytest.mark.parametrize("name", CONFIGS)
def test_unpack_inverts_pack_and_each_element_is_set_once(name):
    """Guards against a slice that overlaps or misses another; `test_families` has the order."""
    tensors, back = random_tensors(CONFIGS[name]), {}
    for entry in parameter_table(CONFIGS[name]):
        back |= entry.unpack(entry.pack(tensors, np.dtype(np.float32)))
        count = np.zeros(entry.shape, int)
        for part in entry.parts:
            count[part.index] += 1
        assert (count == 1).all()
    assert back.keys() == tensors.keys()
    for key, tensor in tensors.items():
        np.testing.assert_array_equal(back[key], tensor)


@pytest.mark.parametrize("config", [*PRESETS.values(), *CONFIGS.values()], ids=str)
def test_shapes_are_what_the_model_declares(config):
    """Guards against a forgotten bias or head, at the real sizes too."""
    config = dataclasses.replace(config, num_layers=min(config.num_layers, 3))  # all are alike
    declared = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    shapes = {path: leaf.shape for path, leaf in flatten_dict(declared).items()}
    assert shapes == {entry.path: entry.shape for entry in parameter_table(config)}


def test_random_parameters_are_the_models():
    """Guards against a parameter that the model would not find, or in another precision."""
    config = CONFIGS["grouped"]
    params = random_params(config, 0, "bfloat16")
    shapes = {path: leaf.shape for path, leaf in flatten_dict(params).items()}
    assert shapes == {entry.path: entry.shape for entry in parameter_table(config)}
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    assert np.all(np.asarray(params["layers_0"]["mlp_norm"]["scale"], np.float32) == 1)


def test_values_are_bell_shaped_and_unrelated():
    """Guards against tensors that are equal, or rows that repeat their neighbours.

    Correlations of a million independent pairs are below 0.005 but for one case in 10^6.
    """
    config = dataclasses.replace(PRESETS["smollm2-135m"], num_layers=3, vocab_size=8)
    params = random_params(config, 5, "float32")
    values = [np.asarray(params[f"layers_{i}"]["mlp"]["down"]).ravel() for i in range(3)]
    other_seed = np.asarray(random_params(config, 6, "float32")["layers_0"]["mlp"]["down"]).ravel()
    for value in values:
        assert abs(value.mean()) < 1e-4
        assert abs(value.std() - 0.02) < 1e-4
        assert abs((np.abs(value) < 0.02).mean() - 0.683) < 0.02
    pairs = [(values[0], values[1]), (values[1], values[2]), (values[0], other_seed)]
    pairs += [(values[0][shift:], values[0][:-shift]) for shift in (1, 2, 576, 1536)]
    for left, right in pairs:
        assert abs(np.corrcoef(left, right)[0, 1]) < 5e-3
