"""Tiny decoders of all kinds of layers, in bfloat16 or with compact kernels, and random trees."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models import DecoderConfig
from jspec.weights.quantize import quantize
from tests.tiny import random_params

CONFIG = DecoderConfig(
    vocab_size=40, embed_dim=64, hidden_dim=96, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=32, max_seq_len=200,
)  # fmt: skip
FAMILIES = {
    "llama": {},
    "biased": {
        "qkv_bias": True, "out_bias": True, "mlp_bias": True, "qk_norm": "head",
        "residual_scale": 0.4, "attention_scale": 0.3, "unrotated_layers": (1,),
    },
    "gemma": {
        "norms": "both", "activation": "gelu_tanh", "attention_softcap": 2.0, "head_dim": 64,
        "num_kv_heads": 1, "window": 7, "windowed_layers": (0,), "local_rope_theta": 100.0,
    },
    "post": {"norms": "post", "num_kv_heads": 4},
}  # fmt: skip
KERNELS = "qkv", "out", "gate_up", "down"


def make_model(name, kind=None):
    """Returns a config, and bfloat16 parameters or such whose layers' kernels are integers."""
    # Kernels take the multipliers of int4 for 128 inputs together.
    sizes = {"embed_dim": 128, "hidden_dim": 128} if kind == "int4" else {}
    config = dataclasses.replace(CONFIG, **sizes, **FAMILIES[name])

    def round_leaf(path, leaf):
        names = tuple(key.key for key in path)
        if names[-1].endswith("bias"):  # these stay float32
            return leaf
        if kind is not None and names[-1] in KERNELS:
            leaf = quantize(leaf, path=names, kind=kind, dtype=jnp.bfloat16)
            # XLA's inputs are rounded to bfloat16 before they are rounded to bytes, so some come
            # to another byte than a kernel's.
            return leaf.replace(takes_bytes=False) if kind == "q4_0" else leaf
        return leaf.astype(jnp.bfloat16)

    params = random_params(config, seed=3, std=0.15)
    return config, jax.tree_util.tree_map_with_path(round_leaf, params)


def random_tree(rng, size):
    """Returns which slots each token of a random tree sees: its path, itself included."""
    mask = np.eye(size, dtype=bool)
    for token in range(1, size):
        mask[token] |= mask[rng.integers(token)]
    return mask


def assert_close(results, expected):
    """Checks that all vectors of two trees of arrays differ by at most 3 % of their length."""
    for result, reference in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        vectors, references = (np.asarray(leaf, np.float32) for leaf in (result, reference))
        distance = np.linalg.norm(vectors - references, axis=-1)
        assert (distance <= 0.03 * np.linalg.norm(references, axis=-1)).all()
