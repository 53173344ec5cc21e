"""Tiny random checkpoints of every family, as transformers makes and computes them.

Every field that decides the computation is off its default, and the weights have opinions.
"""

import copy

import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from jspec.models import make_apply
from jspec.models.cache import causal_mask

VOCAB = 61
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "rms_norm_eps": 3e-3, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "attn_implementation": "eager",
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 777.0}
WINDOW = 5
_CHUNK = 7  # past the window; blocks are as wide, so that one shape serves all that is checked
LOCAL = ["sliding_attention", "full_attention"] * 2
_GEMMA = {
    "head_dim": 10, "sliding_window": WINDOW, "layer_types": LOCAL, "query_pre_attn_scalar": 7,
    "attn_logit_softcapping": 3.0, "final_logit_softcapping": 9.0, "tie_word_embeddings": True,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}

# By name: the transformers class, and what differs from SHAPE.
FAMILIES = {
    "llama": ("Llama", {"head_dim": 10, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen2 with a window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3", {"head_dim": 10, "attention_bias": True}),
    "mistral": ("Mistral", {"head_dim": 10, "sliding_window": WINDOW}),
    "gemma2": ("Gemma2", _GEMMA),
    "gemma3": (
        "Gemma3Text",
        _GEMMA
        | {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "rope_parameters": {
                "sliding_attention": ROPE,
                "full_attention": {"rope_type": "linear", "rope_theta": 5555.0, "factor": 4.0},
            },
        },
    ),
    "phi3": ("Phi3", {"sliding_window": WINDOW}),
    "phi3 longrope": (
        "Phi3",
        {
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 777.0,
                "partial_rotary_factor": 1.0,
                "short_factor": [1.0, 1.5, 2.0],
                "long_factor": [2.0, 3.0, 5.0],
            },
        },
    ),
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1, 0], "attention_bias": True}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 1.7,
            "logits_scaling": 1.3,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.4,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "mixtral": ("Mixtral", _EXPERTS | {"sliding_window": WINDOW}),
    "qwen3 moe": (
        "Qwen3Moe",
        _EXPERTS | {"moe_intermediate_size": 16, "norm_topk_prob": False, "mlp_only_layers": [1]},
    ),
    "yarn": (
        "Qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 777.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "linear rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 777.0, "factor": 4.0}},
    ),
}


def make_config(name):
    kind, changes = FAMILIES[name]
    # A copy: transformers writes into what it is given.
    fields = copy.deepcopy(SHAPE | {"rope_parameters": ROPE} | changes)
    return getattr(transformers, f"{kind}Config")(**fields)


def class_name(name):
    return FAMILIES[name][0].removesuffix("Text") + "ForCausalLM"


def make_checkpoint(name, folder, seed=0, std=0.45):
    """Saves a family's checkpoint into a folder; returns the model of transformers.

    Skips the test where torch, which transformers computes with, is not installed.
    """
    torch = pytest.importorskip("torch")
    kind, config = FAMILIES[name][0], make_config(name)
    model = getattr(transformers, class_name(name))(config).eval().float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, tensor in model.named_parameters():
            noise = std * torch.randn(tensor.shape, generator=generator)
            is_scale = "norm" in parameter_name and "Gemma" not in kind
            tensor.copy_(1 + noise if is_scale else noise)
    model.save_pretrained(folder)
    return model


def oracle_logits(model, tokens, positions=None):
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        given = None if positions is None else torch.tensor(positions)
        output = model(torch.tensor(tokens), position_ids=given, use_cache=False)
    return output.logits.numpy().astype(np.float32)


def read_in_chunks(config, params, tokens, cache, cuts=()):
    """Returns jspec's logits of tokens [b t] that are read in chunks, and the cache after them."""
    apply, logits, start = make_apply(config), [], 0
    for end in (*cuts, tokens.shape[1]):
        chunk, _, cache = apply(params, jnp.asarray(tokens[:, start:end]), cache)
        cache = cache.commit(jnp.full([len(tokens)], end - start))
        logits.append(chunk)
        start = end
    return np.concatenate(logits, axis=1), cache


def check_rollback(config, params, tokens, cache, expected, atol):
    """Checks that rows go back to their own lengths and read on; returns the cache after it."""
    _, read = read_in_chunks(config, params, tokens[:, : 2 * _CHUNK], cache, (_CHUNK,))
    first, second = slice(7, 7 + _CHUNK), slice(10, 10 + _CHUNK)
    block, wanted = (np.stack([texts[0, first], texts[1, second]]) for texts in (tokens, expected))
    back = read.rollback(jnp.array([7, 10]))
    logits, _, after = make_apply(config)(params, jnp.asarray(block), back)
    np.testing.assert_allclose(logits, wanted, atol=atol)
    return after


def check_tree(config, params, tokens, cache, atol):
    """Checks that two paths of one block, each past the window, equal the two read apart."""
    paths = np.random.default_rng(4).integers(4, VOCAB, (2, _CHUNK))
    _, read = read_in_chunks(config, params, tokens[:, :_CHUNK], cache)
    block = np.broadcast_to(paths.T.reshape(1, -1), (2, 2 * _CHUNK))  # the two paths take turns
    ancestors = np.kron(np.asarray(causal_mask(_CHUNK)[0]), np.eye(2, dtype=bool))
    positions = np.broadcast_to(_CHUNK + np.repeat(np.arange(_CHUNK), 2), (2, 2 * _CHUNK))
    logits, _, _ = make_apply(config)(
        params, jnp.asarray(block), read,
        positions=jnp.asarray(positions), block_mask=jnp.asarray(ancestors[None]),
    )  # fmt: skip
    for number, path in enumerate(paths):
        alone, _ = read_in_chunks(config, params, np.broadcast_to(path, (2, _CHUNK)), read)
        np.testing.assert_allclose(logits[:, number::2], alone, atol=atol)
