"""Mistral (arXiv 2310.06825): Llama with a sliding window in every layer, or none.

Mixtral (2401.04088) is a Mistral whose feed-forward layers are all made of experts.
"""

from typing import Any

from jspec.models.families.family import Family, GgufForm, read_window, write_window


def _read(raw: dict[str, Any]) -> dict[str, Any]:
    raw.setdefault("sliding_window", 4096)  # null says that there is none
    return read_window(raw)


MISTRAL = Family(
    "MistralForCausalLM",
    "mistral",
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 131_072},
    read=_read,
    write=write_window,
)

EXPERT_KEYS = {
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
}
EXPERT_COUNTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
IGNORED = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})


def _read_mixtral(raw: dict[str, Any]) -> dict[str, Any]:
    return read_window(raw) | {"expert_dim": raw["intermediate_size"]}


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
    read=_read_mixtral,
    write=write_window,
    gguf=GgufForm("llama", keys=EXPERT_COUNTS, is_permuted=True, has_experts=True),
    sparse_names=("block_sparse_moe", "w1", "w3", "w2"),
)
