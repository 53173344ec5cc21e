"""Folders with a head: there and back, the published layout, and what is refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from jspec.common.errors import InputError
from jspec.drafters.eagle_head import (
    EagleConfig,
    eagle_rules,
    init_eagle_params,
    load_eagle,
    save_eagle,
)
from jspec.models import PRESETS
from tests import tiny, tiny_eagle

# Of the public head for Llama-3.1-8B-Instruct, but for d2t [32000] and t2d [128256].
_PUBLISHED = {
    "fc.weight": (4096, 12288), "norm.weight": (4096,), "lm_head.weight": (32000, 4096),
    "midlayer.hidden_norm.weight": (4096,), "midlayer.input_layernorm.weight": (4096,),
    "midlayer.post_attention_layernorm.weight": (4096,),
    "midlayer.self_attn.q_proj.weight": (4096, 8192),
    "midlayer.self_attn.k_proj.weight": (1024, 8192),
    "midlayer.self_attn.v_proj.weight": (1024, 8192),
    "midlayer.self_attn.o_proj.weight": (4096, 4096),
    "midlayer.mlp.gate_proj.weight": (14336, 4096), "midlayer.mlp.up_proj.weight": (14336, 4096),
    "midlayer.mlp.down_proj.weight": (4096, 14336),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """Returns the folder of the tiny head."""
    save_eagle(tmp_path / "head", tiny_eagle.CONFIG, tiny_eagle.params())
    return tmp_path / "head"


def rewrite(folder, change):
    """Writes the folder's tensors again after a change."""
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    change(tensors)
    safetensors.numpy.save_file(tensors, path)


def test_a_head_comes_back_as_it_was(folder):
    """Every parameter and the ids, bit for bit; the config too."""
    head = load_eagle(folder, tiny.CONFIG, "float32")
    assert head.config == tiny_eagle.CONFIG
    jax.tree.map(np.testing.assert_array_equal, head.params, tiny_eagle.params())


def test_ids_are_sorted_with_their_rows(folder):
    """A head whose ids do not rise says the same; of equal logits the smallest id is first."""
    right = load_eagle(folder, tiny.CONFIG, "float32").params
    order = np.random.default_rng(0).permutation(len(right["ids"]))

    def shuffle(tensors):
        tensors["d2t"] = np.asarray(right["ids"], np.int64)[order] - np.arange(len(order))
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]

    rewrite(folder, shuffle)
    loaded = load_eagle(folder, tiny.CONFIG, "float32").params
    jax.tree.map(np.testing.assert_array_equal, loaded, right)


def test_the_names_and_shapes_are_those_of_published_heads():
    """At full size, without an array."""
    target = PRESETS["llama3.1-8b"]
    layer = dataclasses.replace(target, num_layers=1, vocab_size=32000)
    config = EagleConfig(layer, target.vocab_size, (2, 16, 29))
    actual = {part.name: part.shape for rule in eagle_rules(config) for part in rule.parts}
    assert actual == _PUBLISHED
    shapes = jax.eval_shape(lambda key: init_eagle_params(config, key), jax.random.key(0))
    assert {path: shape.shape for path, shape in _flat(shapes).items() if path != ("ids",)} == {
        rule.path: rule.shape for rule in eagle_rules(config)
    }


def _flat(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {tuple(key.key for key in path): leaf for path, leaf in leaves}


def test_a_head_that_names_no_layers_reads_a_low_a_middle_and_a_high_one(folder):
    """As published ones do."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    del raw["eagle_aux_hidden_state_layer_ids"]
    path.write_text(json.dumps(raw))
    target = dataclasses.replace(tiny.CONFIG, num_layers=12)
    assert load_eagle(folder, target, "float32").config.feature_layers == (2, 6, 9)


@pytest.mark.parametrize(
    ("config", "layers"),
    [({}, (2, 6, 9)),
     ({"eagle_config": {"use_aux_hidden_state": True,
                        "eagle_aux_hidden_state_layer_ids": [1, 5, 8]}}, (1, 5, 8)),
     ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, (0, 1, 2))],
)  # fmt: skip
def test_configs_as_published_are_read(folder, config, layers):
    """The keys of the public heads' config.json, with and without what names the layers."""
    layer = tiny_eagle.CONFIG.layer
    sizes = {
        "hidden_size": layer.embed_dim, "intermediate_size": layer.hidden_dim,
        "num_attention_heads": layer.num_heads, "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim, "vocab_size": tiny.CONFIG.vocab_size,
        "draft_vocab_size": tiny_eagle.NUM_IDS,
    }  # fmt: skip
    published = {
        "architectures": ["LlamaForCausalLMEagle3"], "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 2048,
        "model_type": "llama", "num_hidden_layers": 1, "pad_token_id": 0, "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.28.1",
        "use_cache": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(published | sizes | config))
    head = load_eagle(folder, dataclasses.replace(tiny.CONFIG, num_layers=12), "float32")
    assert head.config.feature_layers == layers
    assert head.config.layer.rope_theta == 10_000
    jax.tree.map(np.testing.assert_array_equal, head.params, tiny_eagle.params())


def test_a_head_of_one_layers_features_is_refused(folder):
    """Else it would be given three layers' features."""
    path = folder / "config.json"
    group = {"eagle_config": {"use_aux_hidden_state": False}}
    path.write_text(json.dumps(json.loads(path.read_text()) | group))
    with pytest.raises(InputError, match="reads hidden states of several layers"):
        load_eagle(folder, tiny.CONFIG, "float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), r"fc\.weight: expected \[32, 96\], found nothing"),
        (lambda t: t.update(stray=np.zeros(1)), r"stray: expected nothing, found \[1\]"),
        (lambda t: t.update(d2t=t["d2t"] * 0 - 1), "d2t: expected different ids of the target"),
        (lambda t: t.update(t2d=~t["t2d"]), "d2t and t2d disagree"),
        (lambda t: t.pop("d2t"), "d2t: missing"),
    ],
)
def test_other_tensors_are_refused(folder, change, message):
    """One line that names the tensor."""
    rewrite(folder, change)
    with pytest.raises(InputError, match=message):
        load_eagle(folder, tiny.CONFIG, "float32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"embed_dim": 64}, "the target's width, 64; it has 32"),
     ({"vocab_size": 99}, "the target's vocabulary, 99; it has 61"),
     ({"num_layers": 1}, r"it reads layers \[0, 1, 2\], of 1")],
)  # fmt: skip
def test_a_head_of_another_target_is_refused(folder, changes, message):
    """One line that names what differs."""
    with pytest.raises(InputError, match=message):
        load_eagle(folder, dataclasses.replace(tiny.CONFIG, **changes), "float32")


def test_a_head_of_a_target_of_other_depth_is_refused(tmp_path):
    """Though it has layers of those numbers too."""
    config = dataclasses.replace(tiny_eagle.CONFIG, target_num_layers=tiny.CONFIG.num_layers)
    save_eagle(tmp_path / "head", config, tiny_eagle.params())
    assert load_eagle(tmp_path / "head", tiny.CONFIG, "float32").config == config
    deeper = dataclasses.replace(tiny.CONFIG, num_layers=12)
    with pytest.raises(InputError, match="the target's layers, 12; it has"):
        load_eagle(tmp_path / "head", deeper, "float32")


def test_biases_come_back(tmp_path):
    """Of heads for targets that have some; else drafting would end for want of a parameter."""
    layer = dataclasses.replace(
        tiny_eagle.CONFIG.layer, qkv_bias=True, out_bias=True, mlp_bias=True
    )
    config = dataclasses.replace(tiny_eagle.CONFIG, layer=layer)
    params = tiny_eagle.params(config=config)
    assert {"qkv_bias", "out_bias"} <= set(params["head"]["attention"])
    save_eagle(tmp_path / "head", config, params)
    head = load_eagle(tmp_path / "head", tiny.CONFIG, "float32")
    assert head.config == config
    jax.tree.map(np.testing.assert_array_equal, head.params, params)


def test_integers_without_a_scale_are_refused(folder):
    """Else they would be weights of up to 127."""
    rewrite(folder, lambda t: t.update({"fc.weight": t["fc.weight"].astype(np.int8)}))
    with pytest.raises(InputError, match=r"fc.weight: expected fc.weight_scale with a scale for"):
        load_eagle(folder, tiny.CONFIG, "float32")


def test_a_truncated_file_is_refused(folder):
    """One line."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="truncated or damaged safetensors"):
        load_eagle(folder, tiny.CONFIG, "float32")
