"""The table between Hugging Face tensors and parameters."""

import dataclasses

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jspec.models import PRESETS, init_params
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
