"""Orbax folders, written and read."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from jspec.common.errors import InputError
from jspec.models.families.hf_config import to_hf_config
from jspec.weights import orbax_checkpoint
from jspec.weights.orbax_checkpoint import load_orbax, save_orbax
from jspec.weights.random_weights import random_params
from tests.weights.tokenizers.test_tokenizer import make_tokenizer
from tests.weights.toys import CONFIGS

_CONFIG = CONFIGS["grouped"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("orbax") / "m"
    save_orbax(folder, _CONFIG, random_params(_CONFIG, 3, "float32"), tokenizer=make_tokenizer())
    return folder


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loading_what_was_saved_is_identity(saved, dtype):
    """Guards against parameters restored in the dtype of the file, or in another structure."""
    config, params = load_orbax(saved, dtype)
    assert config == _CONFIG
    expected = random_params(_CONFIG, 3, "float32")
    jax.tree.map(
        lambda loaded, leaf: np.testing.assert_array_equal(loaded, leaf.astype(jnp.dtype(dtype))),
        params,
        expected,
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 4}, "layers_3/attention"),
        ({"intermediate_size": 41}, r"mlp/down: expected shape \[24, 41\], found \[24, 40\]"),
    ],
)
def test_restoring_is_strict(saved, tmp_path, changes, message):
    """Guards against arrays left out, padded or cut to fit another config."""
    shutil.copytree(saved, tmp_path / "m")
    raw = to_hf_config(_CONFIG) | changes
    (tmp_path / "m" / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match=message) as error:
        load_orbax(tmp_path / "m", "float32")
    assert "\n" not in str(error.value)


def test_damage_is_refused(saved, tmp_path):
    """Guards against tracebacks of the storage library."""
    shutil.copytree(saved, tmp_path / "m")
    for path in (tmp_path / "m" / "params").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match="cannot be read as an Orbax checkpoint"):
        load_orbax(tmp_path / "m", "float32")
    with pytest.raises(InputError, match="no such folder"):
        load_orbax(tmp_path / "absent", "float32")


def test_chunks_are_smaller_than_parameters(tmp_path, monkeypatch):
    """Guards against processes that each read all of a parameter for their part of it."""
    monkeypatch.setattr(orbax_checkpoint, "_CHUNK_BYTES", 2048)
    save_orbax(tmp_path / "m", _CONFIG, random_params(_CONFIG, 3, "float32"))
    stored = ocp.metadata(tmp_path / "m" / "params").metadata
    layer = stored["layers_0"]
    for array, axis in (
        (layer["attention"]["qkv"], 0),
        (layer["mlp"]["gate_up"], 1),
        (layer["mlp"]["down"], 1),
        (stored["embedding"], 0),
    ):
        assert array.storage_metadata.chunk_shape[axis] <= array.shape[axis] // 2
    load_orbax(tmp_path / "m", "float32")


def test_failed_save_leaves_nothing(tmp_path):
    """Guards against half-written folders and against overwriting."""
    params = random_params(_CONFIG, 0, "float32")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    with pytest.raises(InputError, match="not overwritten"):
        save_orbax(tmp_path / "full", _CONFIG, params)
    del params["final_norm"]
    with pytest.raises(ValueError, match="final_norm"):
        save_orbax(tmp_path / "m", _CONFIG, params)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
