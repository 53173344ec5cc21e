"""The sparse feed-forward layer, against transformers' blocks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import kernels
from jspec.models.config import DecoderConfig
from jspec.models.layers import Experts

_CONFIG = DecoderConfig(
    vocab_size=32, embed_dim=24, hidden_dim=56, num_layers=1, num_heads=2, num_kv_heads=2,
    head_dim=12, max_seq_len=64, num_experts=7, num_experts_per_token=3, expert_dim=20,
)  # fmt: skip
_SHAPE = {"hidden_size": 24, "num_experts_per_tok": 3, "num_local_experts": 7}


def _block(kind, is_normalized):
    torch = pytest.importorskip("torch")
    from transformers import MixtralConfig, Qwen3MoeConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    torch.manual_seed(0)
    if kind == "mixtral":
        block = MixtralSparseMoeBlock(MixtralConfig(intermediate_size=20, **_SHAPE))
    else:
        config = Qwen3MoeConfig(moe_intermediate_size=20, norm_topk_prob=is_normalized, **_SHAPE)
        block = Qwen3MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return block.eval()


def _params(block):
    tensors = {name: jnp.asarray(tensor.numpy()) for name, tensor in block.state_dict().items()}
    return {
        "router": tensors["gate.weight"],
        "experts_gate_up": tensors["experts.gate_up_proj"].reshape(7, 2, 20, 24),
        "experts_down": tensors["experts.down_proj"],
    }


@pytest.mark.parametrize(
    ("kind", "is_normalized"), [("mixtral", True), ("qwen3_moe", True), ("qwen3_moe", False)]
)
def test_equals_transformers(kind, is_normalized, monkeypatch):
    """Guards against weights of the wrong experts, rows left unsorted, and a missing division."""
    block = _block(kind, is_normalized)
    config = dataclasses.replace(_CONFIG, normalize_expert_weights=is_normalized)
    inputs = np.random.default_rng(1).normal(size=(2, 9, 24)).astype(np.float32)
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        expected = block(torch.tensor(inputs)).numpy()
    for is_native in (True, False):  # by C++ where there is a compiler, and by XLA
        if not is_native:
            monkeypatch.setattr("jspec.kernels.library.is_available", lambda: False)
        actual = Experts(config).apply({"params": _params(block)}, jnp.asarray(inputs))
        np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_does_not_depend_on_its_neighbours(dtype):
    """Guards against a verify call whose logits differ from those of single steps."""
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), _params(_block("mixtral", True)))
    inputs = np.random.default_rng(2).normal(size=(1, 40, 24)).astype(np.float32)
    apply = jax.jit(lambda inputs: Experts(_CONFIG).apply({"params": params}, inputs))
    together = np.asarray(apply(inputs))
    for token in range(0, 40, 7):
        np.testing.assert_array_equal(apply(inputs[:, token : token + 1])[0], together[:, token])
    for width in (2, 6):
        np.testing.assert_array_equal(apply(inputs[:, :width]), together[:, :width])


@pytest.mark.parametrize("sizes", [[0, 5, 0, 1], [6, 0, 0, 0], [1, 2, 2, 1], [0, 0, 0, 0]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_grouped_product_is_one_product_a_group(sizes, dtype):
    """Guards against groups without rows that shift the others."""
    rng = np.random.default_rng(3)
    matrices = jnp.asarray(rng.normal(size=(4, 11, 32)), dtype)
    rows = jnp.asarray(rng.normal(size=(sum(sizes), 32)), jnp.float32)
    actual = kernels.grouped_product(rows, matrices, jnp.asarray(sizes, jnp.int32))
    owners = np.repeat(np.arange(4), sizes)
    rounded = np.asarray(rows.astype(dtype), np.float64)
    expected = np.einsum("ri,roi->ro", rounded, np.asarray(matrices, np.float64)[owners])
    np.testing.assert_allclose(actual, expected, atol=1e-4)
