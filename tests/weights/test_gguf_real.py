"""Published GGUF files beside transformers, both dequantised to float32.

`JSPEC_GGUF_FILES=a.gguf:b.gguf pytest -m slow tests/weights/test_gguf_real.py`; torch and the
model's weights, twice in float32, must fit into memory.
"""

import gc
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models import init_cache, make_apply
from jspec.weights.gguf_model import load_gguf

_FILES = [pathlib.Path(name) for name in os.environ.get("JSPEC_GGUF_FILES", "").split(":") if name]
_NEW_TOKENS = 32
_PROMPTS = (
    "def fibonacci(n):\n    ",
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
)


def _theirs(path, prompts):
    """Returns the tokens of each prompt, and transformers' greedy text and logits of all of it."""
    import torch
    import transformers

    options = {"gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **options)
    quantization = transformers.GgufConfig(gguf_file=path.name, dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, **options, quantization_config=quantization, dtype=torch.float32
    ).eval()
    texts, logits = [], []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            text = model.generate(
                ids, max_new_tokens=_NEW_TOKENS, min_new_tokens=_NEW_TOKENS, do_sample=False,
                repetition_penalty=1.0,
            )  # fmt: skip
            logits.append(model(text).logits[0].float().numpy())
        texts.append((ids.shape[1], text[0].numpy()))
    return texts, logits


@pytest.mark.slow
@pytest.mark.skipif(not _FILES, reason="JSPEC_GGUF_FILES names no file")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.stem)
def test_logits_and_greedy_text_equal_those_of_transformers(path):
    """Guards against a theta, a scale, a window or a norm that the tiny models do not have."""
    texts, logits = _theirs(path, _PROMPTS)
    gc.collect()
    config, params, _ = load_gguf(path, "float32")
    apply = jax.jit(make_apply(config))
    for (prompt_length, text), expected in zip(texts, logits, strict=True):
        cache = init_cache(config, batch_size=1, capacity=128, dtype=jnp.float32)
        found = np.asarray(apply(params, jnp.asarray(text[None]), cache)[0])[0]
        error = np.abs(found - expected).max() / np.abs(expected).max()
        print(f"{path.stem}: relative error {error:.1e}")
        assert error < 2e-4
        np.testing.assert_array_equal(
            found.argmax(-1)[prompt_length - 1 : -1], text[prompt_length:]
        )
