"""The norms of EAGLE-3.1, and of speculators' heads that add to the normed feature."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.eagle_head import apply_head, fuse, load_eagle, save_eagle
from jspec.drafters.eagle_layouts import save_speculators
from jspec.models import init_cache
from tests import tiny, tiny_eagle
from tests.cases import slow_unless

FLAGS = ("has_input_norm", "has_output_norm", "has_residual_norm")
KEYS = {"has_input_norm": "norm_before_fc", "has_output_norm": "norm_output",
        "has_residual_norm": "norm_before_residual"}  # fmt: skip


def reference(config, head, outputs, embedded):
    """Returns the logits and what takes the features' place of a chain of pairs, by numpy."""
    cfg, head = config.layer, jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), head)
    params, k, h = head["head"], cfg.num_kv_heads, cfg.head_dim

    def norm(x, scale):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + cfg.norm_epsilon) * scale

    def rotate(x):
        angles = np.arange(len(x))[:, None] / cfg.rope_theta ** (np.arange(0, h, 2) / h)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    wide = outputs.reshape(len(outputs), -1)
    if config.has_input_norm:
        wide = norm(wide, head["input_norm"]["scale"])
    x = wide @ head["fc"].T
    feature = norm(x, params["feature_norm"]["scale"])
    pair = np.concatenate([norm(embedded, params["embedding_norm"]["scale"]), feature], axis=-1)
    if config.has_residual_norm:
        x = feature
    qkv = np.einsum("ti,kphi->tkph", pair, params["attention"]["qkv"])
    groups = cfg.num_groups
    queries = rotate(qkv[:, :, :groups].reshape(len(x), -1, h)) / np.sqrt(h)
    keys = rotate(qkv[:, :, groups]).repeat(groups, axis=1)
    scores = np.einsum("tnh,snh->nts", queries, keys)
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    values = qkv[:, :, groups + 1].repeat(groups, axis=1)
    assert values.shape[1] == k * groups
    mixed = np.einsum("nts,snh->tnh", weights, values)
    x = x + mixed.reshape(len(x), -1) @ params["attention"]["out"].T
    gate, up = np.einsum(
        "td,pfd->ptf", norm(x, params["mlp_norm"]["scale"]), params["mlp"]["gate_up"]
    )
    x = x + (gate / (1 + np.exp(-gate)) * up) @ params["mlp"]["down"].T
    said = norm(x, params["final_norm"]["scale"])
    return said @ params["head"].T, said if config.has_output_norm else x


@pytest.mark.parametrize(
    "flags",
    [slow_unless(sum(flags) in (1, 3), flags) for flags in itertools.product([0, 1], repeat=3)],
)
def test_a_head_with_these_norms_says_what_numpy_says(tmp_path, flags):
    """From folders of both layouts; with each norm alone, and all of them."""
    norms = dict(zip(FLAGS, map(bool, flags), strict=True))
    config = dataclasses.replace(tiny_eagle.CONFIG, **norms)
    params = tiny_eagle.params(config=config)
    save_eagle(tmp_path / "head", config, params)
    save_speculators(tmp_path / "head", tmp_path / "other", target="t", num_draft_tokens=3)
    rng = np.random.default_rng(0)
    outputs, embedded = rng.normal(size=(5, 3, 32)), rng.normal(size=(5, 32))
    expected = reference(config, params, outputs, embedded)
    for name in ("head", "other"):
        loaded = load_eagle(tmp_path / name, tiny.CONFIG, "float32")
        assert loaded.config == config
        jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
    features = fuse(params, jnp.asarray(outputs[None], jnp.float32), config.layer.norm_epsilon)
    empty = init_cache(config.layer, batch_size=1, capacity=5, dtype=jnp.float32)
    block = jnp.asarray(embedded[None], jnp.float32)
    logits, hidden, _ = apply_head(config, params, block, features, empty)
    np.testing.assert_allclose(logits[0], expected[0], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(hidden[0], expected[1], rtol=1e-3, atol=1e-3)
    last, same, _ = apply_head(config, params, block, features, empty, logits_at=jnp.array([3]))
    np.testing.assert_allclose(last[0, 0], expected[0][3], rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(same, hidden)


def test_what_is_missing_means_what_it_means_to_vllm(tmp_path):
    """In speculators' layout `norm_before_residual` is true where nothing is said."""
    save_eagle(tmp_path / "head", tiny_eagle.CONFIG, tiny_eagle.params())
    save_speculators(tmp_path / "head", tmp_path / "other", target="t", num_draft_tokens=3)
    path = tmp_path / "other" / "config.json"
    raw = json.loads(path.read_text())
    del raw["norm_before_residual"]
    path.write_text(json.dumps(raw))
    assert load_eagle(tmp_path / "other", tiny.CONFIG, "float32").config.has_residual_norm


@pytest.mark.parametrize("flag", ["has_output_norm", "has_residual_norm"])
def test_the_keys_may_stand_in_a_group(tmp_path, flag):
    """As some publish them."""
    save_eagle(tmp_path / "head", tiny_eagle.CONFIG, tiny_eagle.params())
    path = tmp_path / "head" / "config.json"
    raw = json.loads(path.read_text()) | {"eagle_config": {KEYS[flag]: True}}
    path.write_text(json.dumps(raw))
    assert getattr(load_eagle(tmp_path / "head", tiny.CONFIG, "float32").config, flag)
