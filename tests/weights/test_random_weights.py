"""Random weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from jspec.models.config import PRESETS
from jspec.weights.random_weights import random_params
from jspec.weights.tensor_names import parameter_table
from tests.weights.toys import CONFIGS


def test_shapes_and_dtypes_are_the_models():
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
