"""transformers' LlamaForCausalLM as an oracle, and its weights in jspec's layout.

The converter is written apart from jspec/weights, so that the two cannot share a mistake.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from jspec.models import DecoderConfig
from jspec.models.families.hf_config import from_hf_config


def peaked_llama(seed: int = 0, std: float = 0.45, **overrides) -> transformers.LlamaForCausalLM:
    """Returns a tiny random Llama with opinions, no field of its config at its default.

    Skips the test where torch, which transformers computes with, is not installed.
    """
    torch = pytest.importorskip("torch")
    fields = {
        "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10,
        "max_position_embeddings": 512, "rms_norm_eps": 3e-3, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 777.0},
        "attn_implementation": "eager", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    config = transformers.LlamaConfig(**(fields | overrides))
    model = transformers.LlamaForCausalLM(config).eval().float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1 + std * noise if "norm" in name else std * noise)
    return model


def config_of(model: transformers.LlamaForCausalLM) -> DecoderConfig:
    return from_hf_config(model.config.to_dict())


def params_of(model: transformers.LlamaForCausalLM) -> dict:
    weights = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    config = model.config
    k, h, d = config.num_key_value_heads, config.head_dim, config.hidden_size
    params = {
        "embedding": weights["model.embed_tokens.weight"],
        "final_norm": {"scale": weights["model.norm.weight"]},
    }
    if not config.tie_word_embeddings:
        params["head"] = weights["lm_head.weight"]
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}."
        heads = [
            weights[f"{layer}self_attn.{name}_proj.weight"].reshape(k, -1, h, d) for name in "qkv"
        ]
        out = weights[f"{layer}self_attn.o_proj.weight"]
        gates = [weights[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        attention = {"qkv": np.concatenate(heads, axis=1), "out": out}
        mlp = {"gate_up": np.stack(gates), "down": weights[f"{layer}mlp.down_proj.weight"]}
        if config.attention_bias:
            biases = [
                weights[f"{layer}self_attn.{name}_proj.bias"].reshape(k, -1, h) for name in "qkv"
            ]
            attention["qkv_bias"] = np.concatenate(biases, axis=1)
            attention["out_bias"] = weights[f"{layer}self_attn.o_proj.bias"]
        if config.mlp_bias:
            mlp["gate_up_bias"] = np.stack(
                [weights[f"{layer}mlp.{name}_proj.bias"] for name in ("gate", "up")]
            )
            mlp["down_bias"] = weights[f"{layer}mlp.down_proj.bias"]
        params[f"layers_{i}"] = {
            "attention": attention,
            "mlp": mlp,
            "attention_norm": {"scale": weights[f"{layer}input_layernorm.weight"]},
            "mlp_norm": {"scale": weights[f"{layer}post_attention_layernorm.weight"]},
        }
    return _as_jax(params)


def _as_jax(tree: dict) -> dict:
    return {k: _as_jax(v) if isinstance(v, dict) else jnp.asarray(v) for k, v in tree.items()}


def oracle_outputs(
    model: transformers.LlamaForCausalLM, tokens: np.ndarray, positions: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns the oracle's logits [b t v] and its hidden states, embeddings first."""
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        outputs = model(
            input_ids=torch.tensor(np.asarray(tokens)),
            position_ids=torch.tensor(np.asarray(positions)),
            output_hidden_states=True,
        )
    return outputs.logits.numpy(), [state.numpy() for state in outputs.hidden_states]
