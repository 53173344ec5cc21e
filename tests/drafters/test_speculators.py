"""Heads in the format of vLLM's `speculators`: what is written, and what is read of it."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from jspec.common.errors import InputError
from jspec.drafters.eagle_head import (
    EagleConfig,
    init_eagle_params,
    load_eagle,
    save_eagle,
)
from jspec.drafters.eagle_layouts import save_speculators
from jspec.models import PRESETS
from tests import tiny, tiny_eagle
from tests.tiny_models import save_folder

# What vLLM's loader makes of an EAGLE-3 head, apart from d2t and t2d (llama_eagle3.py).
_NAMES = {
    "fc.weight", "norm.weight", "lm_head.weight", "layers.0.hidden_norm.weight",
    "layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight",
    *(f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """Returns the folder of the tiny head, written for vLLM."""
    save_eagle(tmp_path / "head", tiny_eagle.CONFIG, tiny_eagle.params())
    output = tmp_path / "speculators"
    save_speculators(tmp_path / "head", output, target="org/target", num_draft_tokens=3)
    return output


def change(folder, **fields):
    """Writes fields of config.json anew; None takes one away."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: one for key, one in raw.items() if one is not None}))


def test_the_config_has_what_vllm_reads(folder):
    """The fields of base.py and algos.py, and a layer that transformers takes for a Llama."""
    raw = json.loads((folder / "config.json").read_text())
    assert raw["speculators_model_type"] == "eagle3"
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert raw["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert raw["norm_before_residual"] is False
    assert raw["draft_vocab_size"] == tiny_eagle.NUM_IDS
    assert raw["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    layer = raw["transformer_layer_config"]
    assert (layer["model_type"], layer["num_hidden_layers"]) == ("llama", 1)
    assert (layer["vocab_size"], layer["hidden_size"]) == (61, 32)
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**layer)
    assert (config.num_key_value_heads, config.head_dim) == (
        tiny.CONFIG.num_kv_heads, tiny.CONFIG.head_dim,
    )  # fmt: skip


def test_the_tensors_have_the_names_and_shapes_that_vllm_loads(tmp_path):
    """Of a head for a target of other proportions: queries, keys and logits differ in size."""
    target = dataclasses.replace(
        PRESETS["llama3.1-8b"], embed_dim=64, hidden_dim=96, num_heads=8, num_kv_heads=2,
        head_dim=8, vocab_size=99,
    )  # fmt: skip
    layer = dataclasses.replace(target, num_layers=1, vocab_size=50, tie_embeddings=False)
    config = EagleConfig(layer, target.vocab_size, (2, 16, 29))
    save_eagle(tmp_path / "head", config, init_eagle_params(config, jax.random.key(0)))
    save_speculators(tmp_path / "head", tmp_path / "out", target="t", num_draft_tokens=5)
    actual = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    shapes = {name: tensor.shape for name, tensor in actual.items()}
    assert shapes.keys() == _NAMES | {"d2t", "t2d"}
    assert shapes["layers.0.self_attn.q_proj.weight"] == (64, 128)
    assert shapes["layers.0.self_attn.k_proj.weight"] == (16, 128)
    assert shapes["lm_head.weight"] == (50, 64)
    assert (shapes["fc.weight"], shapes["d2t"], shapes["t2d"]) == ((64, 192), (50,), (99,))
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    rope = raw["transformer_layer_config"]
    assert rope["rope_theta"] == target.rope_theta
    assert rope["rope_scaling"]["factor"] == target.rope_scaling.factor


def test_the_verifier_is_of_the_targets_family(tmp_path, monkeypatch):
    """Guards against a Qwen that vLLM takes for a Llama; a folder, the hub's cache, neither."""
    save_eagle(tmp_path / "head", tiny_eagle.CONFIG, tiny_eagle.params())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = tmp_path / "hub/models--org--qwen"
    folders = (tmp_path / "qwen", cached / "snapshots/c0ffee")
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("c0ffee")
    kinds = ("Qwen3", "Qwen3", "Llama")
    for target, kind in zip((str(folders[0]), "org/qwen", "org/other"), kinds, strict=True):
        output = tmp_path / "out" / target.replace("/", "-")
        output.parent.mkdir(exist_ok=True)
        save_speculators(tmp_path / "head", output, target=target, num_draft_tokens=3)
        actual = json.loads((output / "config.json").read_text())["speculators_config"]["verifier"]
        assert actual == {"architectures": [f"{kind}ForCausalLM"], "name_or_path": target}


def test_such_a_head_is_read_again(folder):
    """Bit for bit."""
    head = load_eagle(folder, tiny.CONFIG, "float32")
    assert head.config == tiny_eagle.CONFIG
    jax.tree.map(np.testing.assert_array_equal, head.params, tiny_eagle.params())


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"fc_norm": True}, "expected fc_norm false"),
     ({"norm_before_fc": True}, r"input_norm.weight: expected \[96\], found nothing"),
     ({"speculators_model_type": "dflash"}, "eagle3 or peagle, got 'dflash'"),
     ({"transformer_layer_config": []}, r"expected transformer_layer_config to be an object")],
)  # fmt: skip
def test_other_heads_are_refused(folder, fields, message):
    """One line; such a head would run, and draft badly."""
    change(folder, **fields)
    with pytest.raises(InputError, match=message):
        load_eagle(folder, tiny.CONFIG, "float32")


def test_what_is_no_head_is_refused(tmp_path):
    """An empty folder, a model of several layers, one of a single layer."""
    with pytest.raises(InputError, match="config lacks the key"):
        save_speculators(tmp_path, tmp_path / "out", target="t", num_draft_tokens=3)
    for layers, message in ((2, "a head of one layer, got 2 layers"), (1, "it has no fc.weight")):
        source = save_folder(tmp_path / str(layers), num_layers=layers)
        with pytest.raises(InputError, match=message):
            save_speculators(source, tmp_path / "out", target="t", num_draft_tokens=3)
    assert not (tmp_path / "out").exists()
