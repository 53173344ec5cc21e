"""Heads of DFlash and DSpark from files as z-lab, DeepSeek and vLLM's speculators write them.

The files are made here, with their names, shapes and config keys. What a loaded head drafts is
compared with a reference in numpy that reads the tensors by their published names.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.common.json_lines import save_json
from jspec.drafters import DrafterOptions, DrafterSpec, make_drafter
from jspec.drafters.dflash_head import load_dflash, save_dflash
from jspec.weights.safetensors_file import save_safetensors
from tests import tiny, tiny_dflash
from tests.cases import slow_unless
from tests.drafters.rows import LENGTHS, WIDTH, observe
from tests.drafters.test_dflash import walk
from tests.speculation.drive import propose

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


def make_tensors(name, raw):
    """Returns random tensors under the published names."""
    rng = np.random.default_rng(len(name))

    def draw(*shape):
        return (0.4 * rng.normal(size=shape)).astype(np.float32)

    tensors = {"fc.weight": draw(D, 2 * D), "hidden_norm.weight": 1 + draw(D)}
    for i in range(DEPTH):
        layer = f"layers.{i}"
        tensors |= {
            f"{layer}.input_layernorm.weight": 1 + draw(D),
            f"{layer}.post_attention_layernorm.weight": 1 + draw(D),
            f"{layer}.self_attn.q_proj.weight": draw(HEADS * SIZE, D),
            f"{layer}.self_attn.k_proj.weight": draw(KV_HEADS * SIZE, D),
            f"{layer}.self_attn.v_proj.weight": draw(KV_HEADS * SIZE, D),
            f"{layer}.self_attn.o_proj.weight": draw(D, HEADS * SIZE),
            f"{layer}.self_attn.q_norm.weight": 1 + draw(SIZE),
            f"{layer}.self_attn.k_norm.weight": 1 + draw(SIZE),
            f"{layer}.mlp.gate_proj.weight": draw(INNER, D),
            f"{layer}.mlp.up_proj.weight": draw(INNER, D),
            f"{layer}.mlp.down_proj.weight": draw(D, INNER),
        }
    tensors["norm.weight"] = 1 + draw(D)
    if name == "MiMo":
        tensors["mask_embedding"] = draw(D)
    if name == "DeepSeek":
        tensors |= {"embed_tokens.weight": draw(V, D), "lm_head.weight": draw(V, D)}
    if name == "speculators, DFlash":
        # In their own order, as some publish them.
        ids = CUT[np.random.default_rng(1).permutation(len(CUT))]
        known = np.isin(np.arange(V), CUT)
        tensors |= {"lm_head.weight": draw(len(CUT), D), "d2t": ids - np.arange(len(CUT))}
        tensors |= {"t2d": known, "verifier_norm.weight": 1 + draw(D)}
    if raw.get("markov_rank"):
        tensors |= {
            "markov_head.markov_w1.weight": draw(V, RANK),
            "markov_head.markov_w2.weight": draw(V, RANK),
            "confidence_head.proj.weight": draw(1, D + RANK),
            "confidence_head.proj.bias": draw(1),
        }
    return tensors


def write(folder, name, config=None, tensors=None):
    """Writes a folder as published; returns it."""
    folder.mkdir()
    raw = CONFIGS[name] if config is None else config
    save_json(folder / "config.json", raw)
    tensors = make_tensors(name, raw) if tensors is None else tensors
    save_safetensors(folder / "model.safetensors", tensors)
    return folder


def by_hand(tensors):
    """Returns the parameters that the reference reads, put together name by name."""
    groups = HEADS // KV_HEADS
    head = {
        "fc": tensors["fc.weight"], "feature_norm": {"scale": tensors["hidden_norm.weight"]},
        "final_norm": {"scale": tensors["norm.weight"]},
    }  # fmt: skip
    for i in range(DEPTH):
        layer = {key.removeprefix(f"layers.{i}."): leaf for key, leaf in tensors.items()}
        queries, keys, values = (
            layer[f"self_attn.{part}_proj.weight"].reshape(KV_HEADS, -1, SIZE, D) for part in "qkv"
        )
        assert queries.shape[1] == groups
        head[f"layers_{i}"] = {
            "attention_norm": {"scale": layer["input_layernorm.weight"]},
            "mlp_norm": {"scale": layer["post_attention_layernorm.weight"]},
            "attention": {
                "qkv": np.concatenate([queries, keys, values], axis=1),
                "out": layer["self_attn.o_proj.weight"],
                "query_norm": {"scale": layer["self_attn.q_norm.weight"]},
                "key_norm": {"scale": layer["self_attn.k_norm.weight"]},
            },
            "mlp": {
                "gate_up": np.stack([layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"]]),
                "down": layer["mlp.down_proj.weight"],
            },
        }
    names = {"mask": "mask_embedding", "embedding": "embed_tokens.weight", "head": "lm_head.weight"}
    head |= {path: tensors[key] for path, key in names.items() if key in tensors}
    if "d2t" in tensors:
        head["ids"] = tensors["d2t"] + np.arange(len(CUT))
    if "markov_head.markov_w1.weight" in tensors:
        w1, w2 = (tensors[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
        head["markov"] = {"embedding": w1, "kernel": w2}
        kernel, bias = (tensors[f"confidence_head.proj.{key}"] for key in ("weight", "bias"))
        head["confidence"] = {"kernel": kernel, "bias": bias}
    return head


def reference_drafts(pair, name, config, tensors, text, row):
    """Returns the greedy drafts after a row's text, as numpy draws them."""
    head, length = by_hand(tensors), LENGTHS[row]
    # Outputs of the target's layers by number: 0 is the embedding.
    layers = {"DeepSeek": (0, 2), "speculators, DSpark": (0, 2)}.get(name, (1, 2))
    assert config.feature_layers == layers
    hidden = tiny_dflash.features_of(pair, text[row : row + 1, :length], config)[0]
    said, read = tiny_dflash.reference_logits(
        config, head, tiny.CONFIG, pair.target, hidden, text[row, length], WIDTH
    )
    if "markov" in head:
        return walk(config, head, said, read, text[row, length])[0]
    ids = head.get("ids", np.arange(V))
    return ids[said.argmax(axis=-1)].tolist()


@pytest.mark.parametrize("name", [slow_unless(name != "z-lab", name) for name in CONFIGS])
def test_published_heads_draft_what_numpy_says(tiny_pair, tmp_path, text, last, name):
    """Whoever wrote them; the config's keys are handled, or ignored by name."""
    folder = write(tmp_path / "head", name)
    options = DrafterOptions(draft_head=str(folder))
    spec = DrafterSpec(WIDTH, tiny.CONFIG, V, None, jnp.float32, options=options)
    built = make_drafter("dflash", spec)
    config, tensors = built.drafter.config, make_tensors(name, CONFIGS[name])
    assert config.block_size == {"z-lab": 16, "DeepSeek": 7}.get(name, 8)
    assert config.says_next == ("DSpark" in name or name == "DeepSeek")
    state = observe(tiny_pair, built.drafter, built.params)
    limits = [WIDTH] * len(LENGTHS)
    proposal, _ = propose(tiny_pair, built.drafter, built.params, state, last, limits)
    for row in range(len(LENGTHS)):
        expected = reference_drafts(tiny_pair, name, config, tensors, text, row)
        assert proposal.tokens[row].tolist() == expected


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
    like = next(key for key, value in CONFIGS.items() if value.get("architectures") ==
                raw.get("architectures")) if name != "another method" else "z-lab"  # fmt: skip
    tensors = make_tensors(like, CONFIGS[like])
    folder = write(tmp_path / "head", like, json.loads(json.dumps(raw)), tensors)
    with pytest.raises(InputError, match=message) as caught:
        load_dflash(folder, tiny.CONFIG, jnp.float32)
    assert "\n" not in str(caught.value)
