"""Heads of DFlash and DSpark from files as z-lab, DeepSeek and vLLM's speculators write them.

The files are made here, with their names, shapes and config keys. What is loaded is compared with
the tensors by their published names; what such heads draft is in test_dflash.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.common.json_lines import save_json
from jspec.drafters.dflash_head import DflashConfig, load_dflash, save_dflash
from jspec.weights.safetensors_file import save_safetensors
from tests import tiny, tiny_dflash

D, V, HEADS, KV_HEADS, SIZE, INNER, DEPTH, RANK = 32, 61, 4, 2, 10, 20, 2, 5
CUT = np.arange(2, 61, 3)  # the ids of a cut vocabulary
QWEN3 = {
    "model_type": "qwen3", "hidden_size": D, "intermediate_size": INNER, "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": SIZE,
    "vocab_size": V, "rms_norm_eps": 1e-4, "rope_theta": 555.0, "max_position_embeddings": 256,
    "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
    "tie_word_embeddings": False, "layer_types": ["full_attention"] * DEPTH, "dtype": "float32",
    "use_sliding_window": False, "sliding_window": None, "max_window_layers": 2,
    "transformers_version": "4.57.1", "initializer_range": 0.02, "use_cache": True,
}  # fmt: skip
SPECULATORS = {
    "algorithm": "dflash", "default_proposal_method": "greedy",
    "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
    "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "a/target"},
}  # fmt: skip
DSPARK = {
    "markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True, "num_anchors": 512,
}  # fmt: skip
CONFIGS = {
    "z-lab": QWEN3 | {
        "architectures": ["DFlashDraftModel"], "block_size": 16, "num_target_layers": 2,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "dflash_config": {"mask_token_id": 60, "target_layer_ids": [0, 1]},
    },
    "z-lab, window": QWEN3 | {
        "architectures": ["DFlashDraftModel"], "num_target_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20,
        "use_sliding_window": True,
        "dflash_config": {"mask_token_id": 60, "target_layer_ids": [0, 1], "block_size": 8,
                          "final_logit_softcapping": 4.0, "input_embedding_scale": 1.5},
    },
    "MiMo": QWEN3 | {
        "architectures": ["DFlashDraftModel"], "block_size": 8, "is_causal": False,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1], "use_swa": False},
    },
    "DeepSeek": QWEN3 | DSPARK | {
        "architectures": ["Qwen3DSparkModel"], "block_size": 7, "num_target_layers": 2,
        "mask_token_id": 60, "target_layer_ids": [-1, 1], "eos_token_id": 2, "bos_token_id": 1,
    },
    "speculators, DFlash": {
        "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash",
        "speculators_config": SPECULATORS, "speculators_version": "0.5.0", "block_size": 8,
        "aux_hidden_state_layer_ids": [1, 2], "mask_token_id": 60, "draft_vocab_size": len(CUT),
        "transformer_layer_config": QWEN3, "target_hidden_size": None,
        "sliding_window_non_causal": False, "projector_type": "dflash", "shift_label": False,
        "has_no_defaults_at_init": False, "sample_from_anchor": False,
    },
    "speculators, DSpark": {
        "architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark",
        "speculators_config": SPECULATORS | {"algorithm": "dspark"}, "block_size": 8,
        "aux_hidden_state_layer_ids": [0, 2], "mask_token_id": 60, "draft_vocab_size": V,
        "transformer_layer_config": QWEN3, "ce_loss_alpha": 1.0, "l1_loss_alpha": 0.0,
        "confidence_head_alpha": 1.0, "loss_decay_gamma": 4.0, "sample_from_anchor": True,
    } | DSPARK,
}  # fmt: skip


PLAIN = DflashConfig(
    dataclasses.replace(
        tiny_dflash.CONFIG.layer, hidden_dim=INNER, head_dim=SIZE, norm_epsilon=1e-4,
        rope_theta=555.0,
    ),
    V, (1, 2), block_size=8, mask_id=60,
)  # fmt: skip


def like(layer=None, **fields):
    """Returns a config with other fields."""
    layer = dataclasses.replace(PLAIN.layer, **(layer or {}))
    return dataclasses.replace(PLAIN, layer=layer, **fields)


OF_DSPARK = {"says_next": True, "markov_rank": RANK, "has_confidence": True,
             "confidence_reads_markov": True, "feature_layers": (0, 2)}  # fmt: skip
EXPECTED = {
    "z-lab": like(block_size=16, target_num_layers=2),
    "z-lab, window": like(
        {"window": 20, "windowed_layers": (0,), "logits_softcap": 4.0, "embedding_scale": 1.5},
        target_num_layers=2, causal_layers=(0,),
    ),
    "MiMo": like(mask_id=None),
    "DeepSeek": like(
        {"bos_id": 1, "eos_ids": (2,)}, block_size=7, target_num_layers=2, has_head=True,
        has_embedding=True, **OF_DSPARK,
    ),
    "speculators, DFlash": like({"vocab_size": len(CUT)}, has_head=True),
    "speculators, DSpark": like(**OF_DSPARK),
}  # fmt: skip


def params_of(name):
    """Returns random parameters of a head."""
    head = jax.tree.map(np.asarray, tiny_dflash.params(EXPECTED[name]))
    return head | {"ids": CUT.astype(np.int32)} if "ids" in head else head


def published(name):
    """Returns the parameters under the published names, put together by hand."""
    head = params_of(name)
    tensors = {
        "fc.weight": head["fc"], "hidden_norm.weight": head["feature_norm"]["scale"],
        "norm.weight": head["final_norm"]["scale"],
    }  # fmt: skip
    for i in range(DEPTH):
        layer = head[f"layers_{i}"]
        attention, groups = layer["attention"], HEADS // KV_HEADS
        parts = np.split(attention["qkv"], [groups, groups + 1], axis=1)
        leaves = {
            "input_layernorm": layer["attention_norm"]["scale"],
            "post_attention_layernorm": layer["mlp_norm"]["scale"],
            "self_attn.o_proj": attention["out"],
            "self_attn.q_norm": attention["query_norm"]["scale"],
            "self_attn.k_norm": attention["key_norm"]["scale"],
            "mlp.gate_proj": layer["mlp"]["gate_up"][0],
            "mlp.up_proj": layer["mlp"]["gate_up"][1],
            "mlp.down_proj": layer["mlp"]["down"],
        }
        for letter, part in zip("qkv", parts, strict=True):
            leaves[f"self_attn.{letter}_proj"] = part.reshape(-1, D)
        tensors |= {f"layers.{i}.{leaf}.weight": tensor for leaf, tensor in leaves.items()}
    names = {"mask": "mask_embedding", "embedding": "embed_tokens.weight", "head": "lm_head.weight"}
    tensors |= {names[leaf]: head[leaf] for leaf in names if leaf in head}
    if "ids" in head:
        # In their own order, as some publish them.
        order = np.random.default_rng(1).permutation(len(CUT))
        tensors |= {"lm_head.weight": head["head"][order], "t2d": np.isin(np.arange(V), CUT)}
        tensors |= {"d2t": CUT[order] - np.arange(len(CUT)), "verifier_norm.weight": np.ones(D)}
    if "markov" in head:
        weights, markov = head["confidence"], head["markov"]
        tensors |= {
            "markov_head.markov_w1.weight": markov["embedding"],
            "markov_head.markov_w2.weight": markov["kernel"],
            "confidence_head.proj.weight": weights["kernel"],
            "confidence_head.proj.bias": weights["bias"],
        }
    return tensors


def write(folder, name, raw):
    """Writes a folder as published; returns it."""
    folder.mkdir()
    save_json(folder / "config.json", raw)
    tensors = {key: np.ascontiguousarray(tensor) for key, tensor in published(name).items()}
    save_safetensors(folder / "model.safetensors", tensors)
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_published_heads_are_read(tmp_path, name):
    """Whoever wrote them; the config's keys are handled, or ignored by name."""
    loaded = load_dflash(write(tmp_path / "head", name, CONFIGS[name]), tiny.CONFIG, jnp.float32)
    assert loaded.config == EXPECTED[name]
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params_of(name))


@pytest.mark.parametrize("is_dspark", [False, True])
def test_a_saved_head_is_read_back(tmp_path, is_dspark):
    """Every parameter and every field, with a cut vocabulary."""
    extra = {"markov_rank": 3, "has_confidence": True, "says_next": True} if is_dspark else {}
    config = tiny_dflash.make_config(
        tiny.CONFIG, has_head=True, feature_layers=(0, 1), block_size=5, **extra
    )
    layer = dataclasses.replace(config.layer, vocab_size=40, logits_softcap=5.0)
    config = dataclasses.replace(config, layer=layer)
    params = tiny_dflash.params(config)
    save_dflash(tmp_path / "head", config, params)
    loaded = load_dflash(tmp_path / "head", tiny.CONFIG, jnp.float32)
    assert loaded.config == config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)


def changed(name, **keys):
    """Returns a config with other keys; None leaves one out."""
    raw = CONFIGS[name] | keys
    return {key: value for key, value in raw.items() if value is not None}


BAD = {
    "another method": (changed("z-lab", architectures=["LlamaForCausalLM"]),
                       "expected a head of DFlash or DSpark, with architectures among"),
    "another kind": (changed("speculators, DFlash", speculators_model_type="eagle3"),
                     "expected speculators_model_type dflash or dspark, got 'eagle3'"),
    "another width": (changed("z-lab", hidden_size=40),
                      "expected a head of the target's width, 32; it has 40"),
    "another vocabulary": (changed("z-lab", vocab_size=99),
                           "expected a head of the target's vocabulary, 61; it has 99"),
    "another depth": (changed("z-lab", num_target_layers=9),
                      "expected a head of the target's layers, 2; it has 9"),
    "layers that are not there": (changed("z-lab", target_layer_ids=[0, 7]),
                                  r"it reads layers \[1, 8\], of 2"),
    "no layers": (changed("DeepSeek", target_layer_ids=None),
                  "expected target_layer_ids as a list of layers, got None"),
    "no block": (changed("DeepSeek", block_size=None),
                 "expected block_size as a whole number of at least 2, got None"),
    "a block of one": (changed("DeepSeek", block_size=1),
                       "expected block_size as a whole number of at least 2, got 1"),
    "no mask": (changed("DeepSeek", mask_token_id=None),
                "expected mask_token_id, or a tensor mask_embedding, found neither"),
    "a mask beyond": (changed("DeepSeek", mask_token_id=61),
                      "expected mask_token_id from 0 to 60, got 61"),
    "an unknown key": (changed("z-lab", zebra=1), "unknown config keys: zebra"),
    "another Markov head": (changed("DeepSeek", markov_head_type="gated"),
                            "expected markov_head_type to be 'vanilla', got 'gated'"),
    "another projector": (changed("speculators, DFlash", projector_type="domino"),
                          "expected projector_type to be 'dflash', got 'domino'"),
    "a missing tensor": (changed("DeepSeek", markov_rank=6),
                         r"expected \[1, 38\], found \[1, 37\]"),
    "a tensor too many": (changed("DeepSeek", enable_confidence_head=False),
                          "confidence_head.proj.bias: expected nothing, found"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_heads_are_refused_in_one_line(tmp_path, name):
    """What was expected, and what came."""
    raw, message = BAD[name]
    published_as = next((key for key, value in CONFIGS.items() if value["architectures"] ==
                         raw["architectures"]), "z-lab")  # fmt: skip
    folder = write(tmp_path / "head", published_as, raw)
    with pytest.raises(InputError, match=message) as caught:
        load_dflash(folder, tiny.CONFIG, jnp.float32)
    assert "\n" not in str(caught.value)
