"""Folders with heads of blockwise decoding: there and back, and what is refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from jspec.common.errors import InputError
from jspec.drafters.blockwise import (
    BlockwiseConfig,
    blockwise_rules,
    init_blockwise_params,
    load_blockwise,
    save_blockwise,
)
from jspec.models import get_preset
from tests import tiny, tiny_blockwise


@pytest.fixture
def folder(tmp_path):
    """Returns the folder of the tiny heads."""
    save_blockwise(tmp_path / "head", tiny_blockwise.CONFIG, tiny_blockwise.params(), tiny.CONFIG)
    return tmp_path / "head"


def test_heads_come_back_as_they_were(folder):
    """Every parameter bit for bit; the config too."""
    heads = load_blockwise(folder, tiny.CONFIG, "float32")
    assert heads.config == tiny_blockwise.CONFIG
    jax.tree.map(np.testing.assert_array_equal, heads.params, tiny_blockwise.params())


def test_shapes_at_full_size():
    """Of heads for Llama-3.1-8B, without an array."""
    target = get_preset("llama3.1-8b")
    config = BlockwiseConfig(target.embed_dim, target.hidden_dim, num_heads=4)
    shapes = jax.eval_shape(lambda key: init_blockwise_params(config, key), jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    actual = {tuple(key.key for key in path): leaf.shape for path, leaf in leaves}
    assert actual == {rule.path: rule.shape for rule in blockwise_rules(config)}
    assert actual["up", "kernel"] == (57344, 4096)
    assert actual["down_3", "kernel"] == (4096, 57344)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("up.bias"), r"up\.bias: expected \[48\], found nothing"),
        (lambda t: t.update(stray=np.zeros(1)), r"stray: expected nothing, found \[1\]"),
    ],
)
def test_other_tensors_are_refused(folder, change, message):
    """One line that names the tensor."""
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    change(tensors)
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(InputError, match=message):
        load_blockwise(folder, tiny.CONFIG, "float32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"blockwise_num_heads": 0}, "num_heads as a number of at least 1, got 0"),
     ({"blockwise_hidden_size": "wide"}, "hidden_dim as a number of at least 1, got 'wide'")],
)  # fmt: skip
def test_other_configs_are_refused(folder, changes, message):
    """One line that names the field."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(InputError, match=message):
        load_blockwise(folder, tiny.CONFIG, "float32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"embed_dim": 64}, "the target's width, 64; it has 32"),
     ({"vocab_size": 99}, "the target's vocabulary, 99; it has 61"),
     ({"num_layers": 5}, "the target's layers, 5; it has 2")],
)  # fmt: skip
def test_heads_of_another_target_are_refused(folder, changes, message):
    """One line that names what differs."""
    target = dataclasses.replace(tiny.CONFIG, **changes)
    with pytest.raises(InputError, match=message):
        load_blockwise(folder, target, "float32")
