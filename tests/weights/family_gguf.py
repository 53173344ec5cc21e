"""Tiny GGUF files of every family, written as llama.cpp's converter writes them."""

import json
import re

import gguf
import numpy as np
import safetensors.numpy

from tests.weights.toys import interleave, stored_as, write_gguf_file

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe", "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3",
    "olmo2": "olmo2", "smollm3": "smollm3", "granite": "granite",
}  # fmt: skip
_PERMUTED = ("llama", "smollm3", "granite")
_FIELDS = {
    "num_hidden_layers": "block_count", "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "head_dim": "attention.key_length",
    "num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale", "logits_scaling": "logit_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip


def write_family(path, folder, kind=None):
    """Writes a Hugging Face folder as a GGUF file, in float32 or with matrices of that kind."""
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    keys = {
        gguf_key: config[name] for name, gguf_key in _FIELDS.items() if config.get(name) is not None
    }
    keys |= _rope_keys(config) | _window_keys(config)
    fields = {f"{architecture}.{key}": value for key, value in keys.items()}
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    stored = {
        name: tensor if tensor.ndim == 1 or "ffn_gate_inp" in name else stored_as(tensor, kind)
        for name, tensor in _own_tensors(config, architecture, tensors).items()
    }
    write_gguf_file(path, architecture, fields | {"tokenizer.ggml.bos_token_id": 1}, stored)


def _head_dim(config):
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _window_keys(config):
    if config["model_type"] not in ("gemma2", "gemma3_text", "phi3"):
        return {}  # the converter drops it
    return {"attention.sliding_window": config["sliding_window"] or 0}


def _rope_keys(config):
    """Returns the keys of rotary embeddings; factors of each frequency are tensors."""
    rope = config["rope_parameters"]
    keys = {}
    if ARCHITECTURES[config["model_type"]] in (*_PERMUTED, "phi3"):
        keys["rope.dimension_count"] = _head_dim(config)
    if config.get("head_dim"):
        keys["attention.value_length"] = config["head_dim"]
    if "sliding_attention" in rope:
        keys["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    keys["rope.freq_base"] = rope["rope_theta"]
    if rope["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    original = rope.get("original_max_position_embeddings")
    if config["model_type"] == "phi3":  # always
        original = original or config["original_max_position_embeddings"]
    if original:
        keys["rope.scaling.original_context_length"] = original
    if rope["rope_type"] == "longrope":
        scale = config["max_position_embeddings"] / original
        factor = float(np.sqrt(1 + np.log(scale) / np.log(original)))
        keys["rope.scaling.attn_factor"] = factor
    return keys


def _own_tensors(config, architecture, tensors):
    """Returns the tensors as llama.cpp has them."""
    kind = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    table = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    tensors_in_file, experts = {}, {}
    for name, tensor in tensors.items():
        if "norm.weight" in name and architecture.startswith("gemma"):
            tensor = tensor + 1
        if architecture in _PERMUTED and re.search(r"\.[qk]_proj\.", name):
            tensor = interleave(tensor, _head_dim(config))
        if match := re.fullmatch(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight", name):
            layer, number, product = match.groups()
            experts.setdefault((layer, product), {})[int(number)] = tensor
            continue
        stem, _, end = name.rpartition(".")
        tensors_in_file[f"{table.get_name(stem)}.{end}"] = tensor
    places = {"w1": "gate", "w2": "down", "w3": "up"}
    for (layer, product), parts in experts.items():
        place = places.get(product, product.removesuffix("_proj"))
        stacked = np.stack([parts[number] for number in sorted(parts)])
        tensors_in_file[f"blk.{layer}.ffn_{place}_exps.weight"] = stacked
    rope = config["rope_parameters"]
    for end in ("long", "short"):
        if rope.get(f"{end}_factor"):
            tensors_in_file[f"rope_factors_{end}.weight"] = np.float32(rope[f"{end}_factor"])
    return tensors_in_file
