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

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "llama3.2-1b"])
def test_logits_are_as_exact_as_those_of_transformers(name, tmp_path):
    """Guards against a wrong epsilon, theta or rounding that tiny models forgive.

    The latter by its shape, with random weights: it needs 16 GB.
    """
    if name in PRESETS:
        config, params = PRESETS[name], random_params(PRESETS[name], 0, "float32")
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, 64).tolist()
    else:
        model = load_model(name, dtype="float32")
        config, params = model.config, model.params
        text = "The quick brown fox jumps over the lazy dog, 3 times in 1984; naïve café — 東京."
        tokens = model.tokenizer.encode(text)
        del model
    cache = init_cache(config, batch_size=1, capacity=len(tokens), dtype=jnp.float32)
    logits = jax.jit(make_apply(config))(params, jnp.asarray([tokens], jnp.int32), cache)[0]
    ours = np.asarray(logits[0], np.float64)
    save_hf(tmp_path / "model", config, params)
    del params
    gc.collect()
    oracle = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        theirs = oracle(ids).logits[0].double().numpy()
        exact = oracle.double()(ids).logits[0].numpy()
    errors = [np.sqrt(np.mean((logits - exact) ** 2)) for logits in (ours, theirs)]
    assert errors[0] <= 2 * errors[1], "{:.2e} from float64, transformers {:.2e}".format(*errors)
