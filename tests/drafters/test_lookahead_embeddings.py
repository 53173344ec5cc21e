"""Folders with look-ahead embeddings: there and back, and what is refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from jspec.common.errors import InputError
from jspec.drafters.lookahead import load_lookahead, save_lookahead
from tests import tiny, tiny_lookahead


@pytest.fixture
def folder(tmp_path):
    """Returns the folder of the tiny embeddings."""
    save_lookahead(tmp_path / "head", tiny_lookahead.CONFIG, tiny_lookahead.params(), tiny.CONFIG)
    return tmp_path / "head"


def test_embeddings_come_back_as_they_were(folder):
    """Bit for bit; the config too."""
    loaded = load_lookahead(folder, tiny.CONFIG)
    assert loaded.config == tiny_lookahead.CONFIG
    jax.tree.map(np.testing.assert_array_equal, loaded.params, tiny_lookahead.params())


def test_other_tensors_and_configs_are_refused(folder):
    """One line that names what is wrong."""
    path = folder / "config.json"
    sound = path.read_text()
    path.write_text(json.dumps(json.loads(sound) | {"lookahead_num_tokens": 2}))
    with pytest.raises(InputError, match=r"weight: expected \[2, 32\], found \[3, 32\]"):
        load_lookahead(folder, tiny.CONFIG)
    path.write_text(json.dumps(json.loads(sound) | {"lookahead_num_tokens": "many"}))
    with pytest.raises(InputError, match="num_tokens as a number of at least 1, got 'many'"):
        load_lookahead(folder, tiny.CONFIG)
    path.write_text(sound)
    safetensors.numpy.save_file({"other": np.zeros(3)}, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"expected \[3, 32\], found nothing"):
        load_lookahead(folder, tiny.CONFIG)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"embed_dim": 64}, "the target's width, 64; it has 32"),
     ({"vocab_size": 99}, "the target's vocabulary, 99; it has 61"),
     ({"num_layers": 5}, "the target's layers, 5; it has 2")],
)  # fmt: skip
def test_embeddings_of_another_target_are_refused(folder, changes, message):
    """One line that names what differs."""
    with pytest.raises(InputError, match=message):
        load_lookahead(folder, dataclasses.replace(tiny.CONFIG, **changes))
