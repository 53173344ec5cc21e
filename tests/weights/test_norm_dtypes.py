"""Gemma's norms are float32 in a model of bfloat16, whatever its checkpoint."""

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax.traverse_util import flatten_dict

from jspec.weights import hf
from jspec.weights.gguf import load_gguf
from jspec.weights.hf import load_hf, save_hf
from jspec.weights.orbax_checkpoint import load_orbax, save_orbax
from tests.models.family_checkpoints import make_checkpoint
from tests.weights.family_gguf import write_family


def _norms(params):
    return {path: leaf for path, leaf in flatten_dict(params).items() if path[-1] == "scale"}


def test_norms_are_the_same_from_every_kind_of_checkpoint(tmp_path, monkeypatch):
    """Guards against a 1 that is added in bfloat16 in some of them."""
    make_checkpoint("gemma2", tmp_path)
    write_family(tmp_path / "m.gguf", tmp_path)
    config, params = load_hf(tmp_path, "bfloat16")
    save_orbax(tmp_path / "orbax", config, params)
    monkeypatch.setattr(hf, "_MAX_FILE_BYTES", 3_000)
    save_hf(tmp_path / "copy", config, params)
    expected = _norms(params)
    others = {
        "copy": load_hf(tmp_path / "copy", "bfloat16")[1],
        "gguf": load_gguf(tmp_path / "m.gguf", "bfloat16")[1],
        "packed": load_gguf(tmp_path / "m.gguf", "bfloat16", "packed")[1],
        "orbax": load_orbax(tmp_path / "orbax", "bfloat16")[1],
    }
    for kind, other in others.items():
        assert {leaf.dtype for leaf in _norms(other).values()} == {jnp.dtype("float32")}, kind
        for path, leaf in _norms(other).items():
            np.testing.assert_array_equal(leaf, expected[path], err_msg=kind)
    # Files are cut where they are full, by the bytes that each tensor takes.
    for path in (tmp_path / "copy").glob("*.safetensors"):
        tensors = safetensors.numpy.load_file(path).values()
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors) <= 3_000
