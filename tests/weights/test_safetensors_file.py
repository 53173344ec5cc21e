"""int8 in safetensors: rounded by rows, and floats again only when they are asked for."""

import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.weights.safetensors_file import FloatTensors, to_int8


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    return {
        "matrix": rng.normal(size=(5, 70)).astype(np.float32),
        "norm": np.ones(70, np.float32),
        "ids": np.arange(5),
    }


def test_rounding_is_within_half_a_step_of_each_row(tensors):
    rounded = FloatTensors(to_int8(tensors))
    steps = np.abs(tensors["matrix"]).max(axis=1, keepdims=True) / 127
    assert (np.abs(rounded["matrix"] - tensors["matrix"]) <= 0.5001 * steps).all()
    np.testing.assert_array_equal(rounded["norm"], tensors["norm"])
    np.testing.assert_array_equal(rounded["ids"], tensors["ids"])


def test_names_and_shapes_make_no_floats(tensors, monkeypatch):
    """Guards against a whole head in float32 beside its integers; scales have no name."""
    rounded = FloatTensors(to_int8(tensors))
    monkeypatch.setattr(FloatTensors, "__getitem__", None)  # an error where it is called
    assert set(rounded) == set(tensors)
    assert "matrix_scale" not in rounded
    assert rounded.shape("matrix") == (5, 70)


def test_integers_without_scales_are_refused(tensors):
    stored = to_int8(tensors)
    del stored["matrix_scale"]
    with pytest.raises(InputError, match="expected matrix_scale with a scale for each row"):
        FloatTensors(stored)["matrix"]
