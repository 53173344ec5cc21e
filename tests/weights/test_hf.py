"""Hugging Face folders, read and written."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jspec.common.errors import InputError
from jspec.models.families.hf_config import to_hf_config
from jspec.weights import hf
from jspec.weights.hf import load_hf, save_hf
from jspec.weights.random_weights import random_params
from tests.weights.toys import CONFIGS, random_tensors, unpack

_CONFIG = CONFIGS["grouped"]
_TIED = CONFIGS["multi-query"]


def _write(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(to_hf_config(config)))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("dtype", "max_file_bytes"), [("bfloat16", 5_000_000_000), ("float32", 3_000)]
)
def test_loading_what_was_saved_is_identity(tmp_path, monkeypatch, name, dtype, max_file_bytes):
    """Guards against a tensor lost between shards and against silent changes of dtype."""
    config = CONFIGS[name]
    params = random_params(config, 7, dtype)
    monkeypatch.setattr(hf, "_MAX_FILE_BYTES", max_file_bytes)
    save_hf(tmp_path / "m", config, params)
    num_files = len(list((tmp_path / "m").glob("*.safetensors")))
    assert (num_files > 1) == (max_file_bytes < 5_000)
    loaded_config, loaded = load_hf(tmp_path / "m", dtype)
    assert loaded_config == config
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {jnp.dtype(dtype)}
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("stored", [np.float32, np.float16, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_stored_dtype_is_rounded_once(tmp_path, stored, dtype):
    """Guards against float16 checkpoints read as bfloat16 bits."""
    tensors = {k: v.astype(stored) for k, v in random_tensors(_CONFIG).items()}
    _write(tmp_path / "m", _CONFIG, tensors)
    loaded = unpack(*load_hf(tmp_path / "m", dtype))
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(loaded[name], tensor.astype(jnp.dtype(dtype)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["grouped", "multi-query"])  # the latter's head is its embedding
def test_transformers_own_files_load_and_ours_load_there(tmp_path, monkeypatch, name):
    """Guards against names, layouts or config keys that only jspec itself would accept."""
    torch = pytest.importorskip("torch")
    import transformers

    config = CONFIGS[name]
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**to_hf_config(config)))
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    theirs.save_pretrained(tmp_path / "theirs")
    loaded_config, params = load_hf(tmp_path / "theirs", "float32")
    assert loaded_config == config
    state = theirs.state_dict()
    tensors = unpack(config, params)
    assert state.keys() - tensors.keys() <= {"lm_head.weight"}
    for key, tensor in tensors.items():
        np.testing.assert_array_equal(tensor, state[key].numpy())

    monkeypatch.setattr(hf, "_MAX_FILE_BYTES", 3_000)
    save_hf(tmp_path / "ours", config, params)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours")
    for key, tensor in again.state_dict().items():
        assert torch.equal(tensor, state[key])


def test_tied_checkpoint_may_ship_its_head_and_buffers(tmp_path):
    """Guards against refusing what old converters write; a head that differs is refused."""
    tensors = random_tensors(_TIED)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    _write(tmp_path / "m", _TIED, tensors)
    assert "head" not in load_hf(tmp_path / "m", "float32")[1]
    tensors["lm_head.weight"][3, 4] += 1
    _write(tmp_path / "m", _TIED, tensors)
    with pytest.raises(InputError, match="ties head and embedding"):
        load_hf(tmp_path / "m", "float32")


def _truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def _garble(folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 300)


def _change(folder, edit):
    tensors = random_tensors(_CONFIG)
    edit(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


def _config(folder, **changes):
    raw = to_hf_config(_CONFIG) | changes
    (folder / "config.json").write_text(json.dumps(raw))


_NORM = "model.norm.weight"
_DAMAGE = {
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "damaged JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "expected a JSON object"),
    "nonsense value": (lambda f: _config(f, num_attention_heads="many"), "config.json"),
    "a base past floats": (
        lambda f: _config(f, rope_parameters={"rope_theta": 10**400}),
        "rope_theta to be a finite"),
    "width of Gemma": (
        lambda f: _config(f, architectures=["Gemma2ForCausalLM"], model_type="gemma2",
                          hidden_act="gelu_pytorch_tanh", hidden_size=10**400),
        "config.json: expected hidden_size to be a whole number from 1 to 16777216"),
    "no tensors": (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors"),
    "empty file": (lambda f: (f / "model.safetensors").write_bytes(b""), "truncated or damaged"),
    "truncated": (_truncate, "truncated or damaged"),
    "garbled": (_garble, "truncated or damaged"),
    "missing tensor": (lambda f: _change(f, lambda t: t.pop(_NORM)), f"missing tensors: {_NORM}"),
    "unknown tensor": (
        lambda f: _change(f, lambda t: t.update(extra=t[_NORM])), "unknown tensors: extra"),
    "wrong shape": (
        lambda f: _change(f, lambda t: t.update({_NORM: np.ones(7, np.float32)})),
        r"model.norm.weight: expected shape \[24\], found \[7\]"),
    "wrong shapes": (
        lambda f: _change(f, lambda t: t.update(dict.fromkeys(t, np.ones(7, np.float32)))),
        r"expected shape \[37, 24\], found \[7\], .* and [0-9]+ more$"),
    "quantised": (
        lambda f: _change(f, lambda t: t.update({_NORM: np.ones(24, np.int8)})),
        "expected model.norm.weight as F32, F16, BF16; got I8"),
}  # fmt: skip


@pytest.mark.parametrize("damage", _DAMAGE)
def test_damage_is_named_in_one_line(tmp_path, damage):
    """Guards against tracebacks, and against weights that load although they do not fit."""
    _write(tmp_path / "m", _CONFIG, random_tensors(_CONFIG))
    apply, message = _DAMAGE[damage]
    apply(tmp_path / "m")
    with pytest.raises(InputError, match=message) as error:
        load_hf(tmp_path / "m", "float32")
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_shards_must_keep_what_the_index_promises(tmp_path, monkeypatch):
    """Guards against loading with one shard of several downloaded."""
    folder = tmp_path / "m"
    monkeypatch.setattr(hf, "_MAX_FILE_BYTES", 9_000)
    save_hf(folder, _CONFIG, random_params(_CONFIG, 0, "float32"))
    index = folder / "model.safetensors.index.json"
    shard = min(folder.glob("*.safetensors"))
    content = shard.read_bytes()
    shard.unlink()
    with pytest.raises(InputError, match=r"00001-of-.*missing"):
        load_hf(folder, "float32")
    shard.write_bytes(content)
    raw = json.loads(index.read_text())
    raw["weight_map"]["model.other.weight"] = shard.name
    index.write_text(json.dumps(raw))
    with pytest.raises(InputError, match=r"lacks model\.other\.weight"):
        load_hf(folder, "float32")
    index.write_text("{}")
    with pytest.raises(InputError, match="no weight_map"):
        load_hf(folder, "float32")


def test_failed_save_leaves_nothing(tmp_path):
    """Guards against half-written folders and against overwriting."""
    params = random_params(_CONFIG, 0, "float32")
    del params["layers_1"]["mlp"]["down"]
    with pytest.raises(ValueError, match="layers_1/mlp/down"):
        save_hf(tmp_path / "m", _CONFIG, params)
    assert not list(tmp_path.iterdir())
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "mine").write_text("")
    with pytest.raises(InputError, match="not overwritten"):
        save_hf(tmp_path / "m", _CONFIG, params)
