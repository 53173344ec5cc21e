"""Qwen2 and 2.5 (arXiv 2407.10671, 2412.15115): biases of queries, keys and values.

Qwen3 (arXiv 2505.09388) has none, and norms every query and key head. A Qwen3-MoE has experts in
all or some of its layers. A MiMo (arXiv 2505.07608) is a Qwen2 with a layer for multi-token
prediction, which the drafter `mtp` drafts with.
"""

from typing import Any

from jspec.models.config import DecoderConfig
from jspec.models.families.family import (
    ATTENTION_BIAS,
    Family,
    GgufForm,
    read_layer_types,
    window_fields,
    write_layer_types,
)
from jspec.models.families.llama import EXPERT_COUNTS, EXPERT_KEYS, IGNORED


def _read(raw: dict[str, Any]) -> dict[str, Any]:
    window, first = raw.pop("sliding_window", 4096), raw.pop("max_window_layers", 28)
    if not raw.pop("use_sliding_window", False):
        window = None
    layers = read_layer_types(raw, lambda layer: layer >= first)
    return window_fields(window, layers)


def _write(config: DecoderConfig) -> dict[str, Any]:
    return write_layer_types(config) | {"use_sliding_window": config.window is not None}


_DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32_768}
QWEN2 = Family(
    "Qwen2ForCausalLM",
    "qwen2",
    fixed={"qkv_bias": True},
    defaults=_DEFAULTS,
    read=_read,
    write=_write,
    gguf=GgufForm("qwen2"),
)
_MTP = "num_nextn_predict_layers"


def _read_mimo(raw: dict[str, Any]) -> dict[str, Any]:
    number = raw.pop(_MTP, None) or 0
    # Published models have one; what a second would read is not known.
    if type(number) is not int or number not in (0, 1):
        raise ValueError(f"expected {_MTP} to be 0 or 1, got {number!r}")
    return {"num_mtp_layers": number}


MIMO = Family(
    "MiMoForCausalLM",
    "mimo",
    fixed=QWEN2.fixed,
    defaults=_DEFAULTS,
    # Its biases are those of a Qwen2, which has none at attention's output.
    required={"attention_bias": (True,), "use_mrope": (False,), "use_sliding_window": (False,)},
    ignored=frozenset({"auto_map", "sliding_window", "max_window_layers", "layer_types"}),
    read=_read_mimo,
    write=lambda config: {_MTP: config.num_mtp_layers},
)
QWEN3 = Family(
    "Qwen3ForCausalLM",
    "qwen3",
    keys=ATTENTION_BIAS,
    fixed={"qk_norm": "head"},
    defaults=_DEFAULTS | {"head_dim": 128},
    gguf=GgufForm("qwen3"),
    read=_read,
    write=_write,
)


def _read_moe(raw: dict[str, Any]) -> dict[str, Any]:
    # Early files call it num_experts.
    raw.setdefault("num_local_experts", raw.pop("num_experts", 128))
    step, dense = raw.pop("decoder_sparse_step", 1), raw.pop("mlp_only_layers", None) or []
    layers = range(raw["num_hidden_layers"])
    skipped = tuple(i for i in layers if i in dense or (i + 1) % step)
    return {"dense_layers": skipped}


QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    keys={
        **QWEN3.keys,
        **EXPERT_KEYS,
        "moe_intermediate_size": "expert_dim",
        "norm_topk_prob": "normalize_expert_weights",
    },
    fixed=QWEN3.fixed,
    defaults={
        "head_dim": None, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "norm_topk_prob": False, "num_key_value_heads": 4, "max_position_embeddings": 32_768,
    },
    required={"use_sliding_window": (False,)},
    ignored=IGNORED | {"sliding_window", "max_window_layers"},
    read=_read_moe,
    write=lambda config: {"mlp_only_layers": list(config.dense_layers)},
    gguf=GgufForm(
        "qwen3moe",
        keys=EXPERT_COUNTS | {"expert_feed_forward_length": "moe_intermediate_size"},
        has_experts=True,
        # llama.cpp always divides the weights by their sum.
        complete=lambda raw: {"norm_topk_prob": True},
    ),
    sparse_names=("mlp", "gate_proj", "up_proj", "down_proj"),
)  # fmt: skip
