"""Folders with heads of Medusa: there and back, the published layout, and what is refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jspec.common.errors import InputError
from jspec.drafters.medusa import (
    MedusaConfig,
    init_medusa_params,
    load_medusa,
    medusa_rules,
    save_medusa,
)
from jspec.models import PRESETS
from jspec.weights.torch_file import convert_torch, find_torch_files
from tests import tiny, tiny_medusa

FILE = "medusa_lm_head.safetensors"


@pytest.fixture
def folder(tmp_path):
    """Returns the folder of the tiny heads."""
    params = tiny_medusa.params()
    save_medusa(tmp_path / "head", tiny_medusa.CONFIG, params, tiny.CONFIG, base_model="some/base")
    return tmp_path / "head"


def rewrite(folder, change):
    """Writes the folder's tensors again after a change."""
    tensors = safetensors.numpy.load_file(folder / FILE)
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / FILE)


def rewrite_config(folder, change):
    """Writes the folder's config again after a change."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def test_heads_come_back_as_they_were(folder):
    """Every parameter bit for bit; the config too."""
    heads = load_medusa(folder, tiny.CONFIG, "float32")
    assert heads.config == tiny_medusa.CONFIG
    jax.tree.map(np.testing.assert_array_equal, heads.params, tiny_medusa.params())
    raw = json.loads((folder / "config.json").read_text())
    assert raw["base_model_name_or_path"] == "some/base"


def test_a_published_file_of_torch_becomes_a_folder_that_loads(folder, tmp_path):
    """Its name stays: `medusa_lm_head.pt` beside config.json."""
    torch = pytest.importorskip("torch")
    loaded = safetensors.numpy.load_file(folder / FILE)
    tensors = {name: torch.from_numpy(value) for name, value in loaded.items()}
    (folder / FILE).unlink()
    torch.save(tensors, folder / "medusa_lm_head.pt")
    convert_torch(find_torch_files(folder), tmp_path / "new", "float32")
    heads = load_medusa(tmp_path / "new", tiny.CONFIG, "float32")
    jax.tree.map(np.testing.assert_array_equal, heads.params, tiny_medusa.params())


def test_bfloat16_comes_back_as_it_was(tmp_path):
    """The form in which trained heads are stored."""
    stored = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tiny_medusa.params())
    save_medusa(tmp_path / "head", tiny_medusa.CONFIG, stored, tiny.CONFIG)
    heads = load_medusa(tmp_path / "head", tiny.CONFIG, "bfloat16")
    jax.tree.map(np.testing.assert_array_equal, heads.params, stored)


def test_the_names_and_shapes_are_those_of_published_heads():
    """Of the public heads for Vicuna-7B, at full size, without an array."""
    target = dataclasses.replace(PRESETS["llama3.1-8b"], vocab_size=32000)
    config = MedusaConfig(target.embed_dim, target.vocab_size, num_heads=5)
    actual = {part.name: part.shape for rule in medusa_rules(config) for part in rule.parts}
    expected = {}
    for head in range(5):
        expected[f"{head}.0.linear.weight"] = (4096, 4096)
        expected[f"{head}.0.linear.bias"] = (4096,)
        expected[f"{head}.1.weight"] = (32000, 4096)
    assert actual == expected
    head = jax.ShapeDtypeStruct((32000, 4096), jnp.bfloat16)
    shapes = jax.eval_shape(lambda head: init_medusa_params(config, head), head)
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    assert {tuple(key.key for key in path): leaf.shape for path, leaf in leaves} == {
        rule.path: rule.shape for rule in medusa_rules(config)
    }


def test_a_published_folder_is_read(tmp_path):
    """Its config names the base model, and fewer heads than there are, as public ones do."""
    rng = np.random.default_rng(0)
    tensors = {}
    for head in range(3):
        tensors[f"{head}.0.linear.weight"] = rng.normal(size=(32, 32)).astype(np.float16)
        tensors[f"{head}.0.linear.bias"] = rng.normal(size=(32,)).astype(np.float16)
        tensors[f"{head}.1.weight"] = rng.normal(size=(61, 32)).astype(np.float16)
    safetensors.numpy.save_file(tensors, tmp_path / FILE)
    raw = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "a/b",
           "transformers_version": "4.31.0"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    heads = load_medusa(tmp_path, tiny.CONFIG, "float32")
    assert heads.config.num_heads == 3
    np.testing.assert_array_equal(heads.params["head_2"]["head"], tensors["2.1.weight"])
    block = heads.params["head_1"]["layer_0"]
    np.testing.assert_array_equal(block["kernel"], tensors["1.0.linear.weight"])
    np.testing.assert_array_equal(block["bias"], tensors["1.0.linear.bias"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("1.0.linear.bias"), r"1\.0\.linear\.bias: expected \[32\], found nothing"),
        (lambda t: t.pop("3.2.weight"), r"3\.2\.weight: expected \[61, 32\], found nothing"),
        (lambda t: t.update({"2.7.weight": np.zeros(1)}), r"2\.7\.weight: expected nothing, found"),
        (lambda t: t.clear(), r"0\.0\.linear\.bias: expected \[32\], found nothing"),
        (lambda t: t.update({"0.1.linear.weight": np.zeros((2, 2))}), r"expected \[32, 32\]"),
    ],
)
def test_other_tensors_are_refused(folder, change, message):
    """One line that names the tensor."""
    rewrite(folder, change)
    with pytest.raises(InputError, match=message):
        load_medusa(folder, tiny.CONFIG, "float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [(lambda raw: raw.update(medusa_num_heads="3"), "num_heads as a number of at least 1"),
     (lambda raw: raw.update(medusa_num_layers=0), "num_layers as a number of at least 1, got 0"),
     (lambda raw: raw.pop("medusa_num_heads"), "it has no medusa_num_heads")],
)  # fmt: skip
def test_other_configs_are_refused(folder, change, message):
    """One line that names the field."""
    rewrite_config(folder, change)
    with pytest.raises(InputError, match=message):
        load_medusa(folder, tiny.CONFIG, "float32")


@pytest.mark.parametrize("is_published", [False, True])
@pytest.mark.parametrize(
    ("changes", "message"),
    [({"embed_dim": 64}, "the target's width, 64; it has 32"),
     ({"vocab_size": 99}, "the target's vocabulary, 99; it has 61"),
     ({"num_layers": 5}, "the target's layers, 5; it has 2")],
)  # fmt: skip
def test_heads_of_another_target_are_refused(folder, changes, message, is_published):
    """One line that names what differs; published folders do not say how many layers there were."""
    target = dataclasses.replace(tiny.CONFIG, **changes)
    if is_published:
        for key in ("hidden_size", "vocab_size", "num_hidden_layers"):
            rewrite_config(folder, lambda raw, key=key: raw.pop(key))
    if is_published and "num_layers" in changes:
        assert load_medusa(folder, target, "float32").config == tiny_medusa.CONFIG
        return
    with pytest.raises(InputError, match=message):
        load_medusa(folder, target, "float32")


def test_a_truncated_or_missing_file_is_refused(folder):
    """One line."""
    path = folder / FILE
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="truncated or damaged safetensors"):
        load_medusa(folder, tiny.CONFIG, "float32")
    path.unlink()
    with pytest.raises(InputError, match=r"medusa_lm_head\.safetensors: missing"):
        load_medusa(folder, tiny.CONFIG, "float32")
