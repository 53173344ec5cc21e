"""Folders with heads of blockwise decoding and with look-ahead embeddings: there and back, and what
is refused in one line.
"""

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
from jspec.drafters.lookahead import load_lookahead, save_lookahead
from jspec.models import PRESETS
from tests import tiny, tiny_blockwise, tiny_lookahead

KINDS = {
    "blockwise": (tiny_blockwise, save_blockwise),
    "lookahead": (tiny_lookahead, save_lookahead),
}


@pytest.fixture
def folders(tmp_path):
    """Returns the folder of the tiny head of each kind."""
    for kind, (module, save) in KINDS.items():
        save(tmp_path / kind, module.CONFIG, module.params(), tiny.CONFIG)
    return {kind: tmp_path / kind for kind in KINDS}


def load(folder, target=tiny.CONFIG):
    if folder.name == "lookahead":
        return load_lookahead(folder, target)
    return load_blockwise(folder, target, "float32")


@pytest.mark.parametrize("kind", KINDS)
def test_heads_come_back_as_they_were(folders, kind):
    """Every parameter bit for bit; the config too."""
    module, _ = KINDS[kind]
    loaded = load(folders[kind])
    assert loaded.config == module.CONFIG
    jax.tree.map(np.testing.assert_array_equal, loaded.params, module.params())


def test_shapes_at_full_size():
    """Of heads for Llama-3.1-8B, without an array."""
    target = PRESETS["llama3.1-8b"]
    config = BlockwiseConfig(target.embed_dim, target.hidden_dim, num_heads=4)
    shapes = jax.eval_shape(lambda key: init_blockwise_params(config, key), jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    actual = {tuple(key.key for key in path): leaf.shape for path, leaf in leaves}
    assert actual == {rule.path: rule.shape for rule in blockwise_rules(config)}
    assert actual["up", "kernel"] == (57344, 4096)
    assert actual["down_3", "kernel"] == (4096, 57344)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("blockwise", lambda t: t.pop("up.bias"), r"up\.bias: expected \[48\], found nothing"),
        (
            "blockwise",
            lambda t: t.update(stray=np.zeros(1)),
            r"stray: expected nothing, found \[1\]",
        ),
        ("lookahead", lambda t: t.clear(), r"expected \[3, 32\], found nothing"),
    ],
)
def test_other_tensors_are_refused(folders, kind, change, message):
    """By the name of the tensor."""
    path = folders[kind] / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    change(tensors)
    safetensors.numpy.save_file(tensors or {"other": np.zeros(3)}, path)
    with pytest.raises(InputError, match=message):
        load(folders[kind])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("blockwise_num_heads", 0, "num_heads as a number of at least 1, got 0"),
        ("blockwise_hidden_size", "wide", "hidden_dim as a number of at least 1, got 'wide'"),
        ("lookahead_num_tokens", "many", "num_tokens as a number of at least 1, got 'many'"),
        ("lookahead_num_tokens", 2, r"weight: expected \[2, 32\], found \[3, 32\]"),
    ],
)
def test_other_configs_are_refused(folders, field, value, message):
    """By the name of the field, or of the tensor that it contradicts."""
    folder = folders[field.partition("_")[0]]
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(InputError, match=message):
        load(folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [({"embed_dim": 64}, "the target's width, 64; it has 32"),
     ({"vocab_size": 99}, "the target's vocabulary, 99; it has 61"),
     ({"num_layers": 5}, "the target's layers, 5; it has 2")],
)  # fmt: skip
def test_heads_of_another_target_are_refused(folders, kind, changes, message):
    """By what differs."""
    with pytest.raises(InputError, match=message):
        load(folders[kind], dataclasses.replace(tiny.CONFIG, **changes))
