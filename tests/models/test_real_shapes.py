"""Logits of real shapes, measured against float64: no further off than transformers itself."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models import PRESETS, init_cache, make_apply
from jspec.weights.hf import save_hf
from jspec.weights.random_weights import random_params
from jspec.weights.resolver import load_model

torch = pytest.importorskip("torch")
import transformers  # noqa: E402


def _own_logits(config, params, tokens):
    cache = init_cache(config, batch_size=1, capacity=len(tokens), dtype=jnp.float32)
    logits = jax.jit(make_apply(config))(params, jnp.asarray([tokens], jnp.int32), cache)[0]
    return np.asarray(logits[0], np.float64)


def _errors(config, params, tokens, folder):
    """Returns the root mean square error of jspec's and of transformers' float32 logits."""
    ours = _own_logits(config, params, tokens)
    save_hf(folder / "model", config, params)
    del params
    gc.collect()
    oracle = transformers.LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        theirs = oracle(ids).logits[0].double().numpy()
        exact = oracle.double()(ids).logits[0].numpy()
    return np.sqrt(np.mean((ours - exact) ** 2)), np.sqrt(np.mean((theirs - exact) ** 2))


def test_smollm2_logits_are_as_exact_as_transformers(tmp_path):
    """Guards against a wrong epsilon, theta or rounding that tiny models forgive."""
    model = load_model("smollm2-135m-instruct", dtype="float32")
    text = "The quick brown fox jumps over the lazy dog, 3 times in 1984; naïve café — 東京."
    tokens = model.tokenizer.encode(text)
    ours, theirs = _errors(model.config, model.params, tokens, tmp_path)
    assert ours <= 2 * theirs, f"jspec is {ours:.2e} from float64, transformers {theirs:.2e}"


@pytest.mark.slow
def test_llama_1b_logits_are_as_exact_as_transformers(tmp_path):
    """The full Llama-3.2-1B shape, random weights, positions up to 64. Needs 16 GB."""
    config = PRESETS["llama3.2-1b"]
    params = random_params(config, 0, "float32")
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 64).tolist()
    ours, theirs = _errors(config, params, tokens, tmp_path)
    assert ours <= 2 * theirs, f"jspec is {ours:.2e} from float64, transformers {theirs:.2e}"
