"""Qwen3-MoE (arXiv 2505.09388): a Qwen3 with experts in all or some of its layers."""

from typing import Any

from jspec.models.config import DecoderConfig
from jspec.models.families.family import Family, GgufForm
from jspec.models.families.mixtral import EXPERT_COUNTS, EXPERT_KEYS, IGNORED
from jspec.models.families.qwen import QWEN3


def _read(raw: dict[str, Any]) -> dict[str, Any]:
    # Early files call it num_experts.
    raw.setdefault("num_local_experts", raw.pop("num_experts", 128))
    step, dense = raw.pop("decoder_sparse_step", 1), raw.pop("mlp_only_layers", None) or []
    layers = range(raw["num_hidden_layers"])
    skipped = tuple(i for i in layers if i in dense or (i + 1) % step)
    return {"dense_layers": skipped}


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {"mlp_only_layers": list(config.dense_layers)}


def _complete(_: Any) -> dict[str, Any]:
    return {"norm_topk_prob": True}  # llama.cpp always divides the weights by their sum


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
    read=_read,
    write=_write,
    gguf=GgufForm(
        "qwen3moe",
        keys=EXPERT_COUNTS | {"expert_feed_forward_length": "moe_intermediate_size"},
        has_experts=True,
        complete=_complete,
    ),
    sparse_names=("mlp", "gate_proj", "up_proj", "down_proj"),
)  # fmt: skip
