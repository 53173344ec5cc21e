"""Llama (arXiv 2307.09288, 2407.21783) and SmolLM2, and what differs from them in a line or two.

OLMo 2 (2501.00656) norms after attention and feed-forward, and all query heads together. Granite 3
(2408.13359) has four multipliers. Every fourth layer of SmolLM3 has no rotary embeddings
(2501.18795). Phi-3 (2404.14219) fuses tensors. Mistral (2310.06825) has a sliding window in every
layer, or none; Mixtral (2401.04088) is a Mistral whose feed-forward layers are made of experts.
"""

from collections.abc import Mapping
from typing import Any

from jspec.models.config import DecoderConfig
from jspec.models.families.family import (
    ATTENTION_BIAS,
    BIASES,
    Family,
    GgufForm,
    read_window,
    write_window,
)

LLAMA = Family(
    "LlamaForCausalLM",
    "llama",
    keys=BIASES,
    gguf=GgufForm("llama", is_permuted=True),
    required={
        "pretraining_tp": (1, None),
        "rope_interleaved": (False,),
        "is_llama_config": (True,),
    },
)
OLMO2 = Family(
    "Olmo2ForCausalLM",
    "olmo2",
    keys=ATTENTION_BIAS,
    gguf=GgufForm("olmo2"),
    defaults={"rms_norm_eps": 1e-5},
    fixed={"norms": "post", "qk_norm": "full"},
)


GRANITE = Family(
    "GraniteForCausalLM",
    "granite",
    keys=BIASES
    | {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention_scale",
    },
    defaults={
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    },
    gguf=GgufForm(
        "granite",
        keys={
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "attention.scale": "attention_multiplier",
            "logit_scale": "logits_scaling",
        },
        is_permuted=True,
    ),
    read=lambda raw: {"logits_scale": 1 / raw.pop("logits_scaling", 1.0)},
    write=lambda config: {"logits_scaling": round(1 / config.logits_scale, 9)},
)


def _read_smollm3(raw: dict[str, Any]) -> dict[str, Any]:
    num_layers, interval = raw["num_hidden_layers"], raw.pop("no_rope_layer_interval", 4)
    # 1 in a list of that name means that the layer has rotary embeddings.
    by_default = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    has_rope = raw.pop("no_rope_layers", None) or by_default
    if len(has_rope) != num_layers:
        raise ValueError(f"expected {num_layers} no_rope_layers, got {has_rope}")
    return {"unrotated_layers": tuple(i for i in range(num_layers) if not has_rope[i])}


def _write_smollm3(config: DecoderConfig) -> dict[str, Any]:
    layers = range(config.num_layers)
    return {"no_rope_layers": [int(layer not in config.unrotated_layers) for layer in layers]}


SMOLLM3 = Family(
    "SmolLM3ForCausalLM",
    "smollm3",
    keys=BIASES,
    gguf=GgufForm("smollm3", is_permuted=True),
    defaults={
        "tie_word_embeddings": True, "rope_theta": 2_000_000.0, "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
    },
    required={"use_sliding_window": (False,)},
    # Without the switch above, the window and its layers say nothing.
    ignored=frozenset({"sliding_window", "max_window_layers", "layer_types", "pretraining_tp"}),
    read=_read_smollm3,
    write=_write_smollm3,
)  # fmt: skip


def _read_phi3(raw: dict[str, Any]) -> dict[str, Any]:
    original = raw.pop("original_max_position_embeddings", 4096)
    for key in ("rope_parameters", "rope_scaling"):
        rope = raw.get(key)
        if isinstance(rope, dict) and "short_factor" in rope and original is not None:
            raw[key] = {"original_max_position_embeddings": original} | rope
    return read_window(raw)


def _complete_phi3(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "sliding_window": raw.get("sliding_window") or None,  # 0 means that there is none
        "original_max_position_embeddings": raw["max_position_embeddings"],  # without the key
    }


PHI3 = Family(
    "Phi3ForCausalLM",
    "phi3",
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    required={"partial_rotary_factor": (1.0,)},
    ignored=frozenset({"auto_map", "embd_pdrop", "resid_pdrop"}),
    read=_read_phi3,
    write=write_window,
    is_fused=True,
    gguf=GgufForm(
        "phi3", keys={"attention.sliding_window": "sliding_window"}, complete=_complete_phi3
    ),
)


MISTRAL = Family(
    "MistralForCausalLM",
    "mistral",
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 131_072},
    read=lambda raw: read_window(raw, 4096),  # null says that there is none
    write=write_window,
)

EXPERT_KEYS = {
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
}
EXPERT_COUNTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
IGNORED = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})


MIXTRAL = Family(
    "MixtralForCausalLM",
    "mixtral",
    keys=EXPERT_KEYS,
    defaults={
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
    },
    ignored=IGNORED,
    read=lambda raw: read_window(raw) | {"expert_dim": raw["intermediate_size"]},
    write=write_window,
    gguf=GgufForm("llama", keys=EXPERT_COUNTS, is_permuted=True, has_experts=True),
    sparse_names=("block_sparse_moe", "w1", "w3", "w2"),
)
