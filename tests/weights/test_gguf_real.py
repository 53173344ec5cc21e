"""Published GGUF files beside transformers, both dequantised to float32.

`JSPEC_GGUF_FILES=a.gguf:b.gguf JSPEC_TEST_OPTIMISED=1 pytest -m slow -s
tests/weights/test_gguf_real.py`; torch and accelerate must be installed, and the model's weights
fit into memory twice in float32. JSPEC_GGUF_RESULTS names a folder that gets a file of JSON for
each. JSPEC_GGUF_FIRST=11 begins with the twelfth of the twenty prompts.
"""

import dataclasses
import os
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Generator, SamplingParams
from jspec.generation.prompts import encode_prompt, read_prompts
from jspec.generation.provenance import Recorder
from jspec.generation.request import Request
from jspec.models import init_cache, make_apply
from jspec.weights.resolver import load_model

_ROOT = pathlib.Path(__file__).parents[2]
_FILES = [pathlib.Path(name) for name in os.environ.get("JSPEC_GGUF_FILES", "").split(":") if name]
_RESULTS = os.environ.get("JSPEC_GGUF_RESULTS")
_FIRST = int(os.environ.get("JSPEC_GGUF_FIRST", "0"))
_NEW_TOKENS = 128
_LONG = 512  # the window of Gemma 3 270M
_CHUNK = 128  # tokens a pass


def _prompts(model):
    """Returns twenty prompts: questions, functions to complete, and three longer than _LONG."""
    questions = [prompt.text for prompt in read_prompts(str(_ROOT / "configs/prompts.jsonl"))]
    functions = [prompt.text for prompt in read_prompts(str(_ROOT / "configs/code_prompts.jsonl"))]
    licence = (_ROOT / "LICENSE").read_text()
    texts = [*functions[:4], "\n\n".join(functions), licence[:4000], licence[:7000]]
    ids = [encode_prompt(model, text, chat=None, system=None) for text in questions]
    return ids + [encode_prompt(model, text, chat=False, system=None) for text in texts]


class _Theirs(NamedTuple):
    tokens: list[int]
    logits: np.ndarray  # before each of them, [n v]


def _theirs(path, prompts):
    """Yields transformers' greedy tokens after each prompt; nothing ends them."""
    torch = pytest.importorskip("torch")
    import transformers

    quantization = transformers.GgufConfig(gguf_file=path.name, dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=quantization, dtype=torch.float32
    ).eval()
    model.generation_config = transformers.GenerationConfig(
        max_new_tokens=_NEW_TOKENS, do_sample=False
    )
    for prompt in prompts:
        with torch.no_grad():
            text = model.generate(torch.tensor([prompt]))
            logits = model(text, logits_to_keep=_NEW_TOKENS + 1).logits[0, :-1]
        yield _Theirs(text[0, len(prompt) :].tolist(), logits.numpy())


def _logits(model):
    """Returns a function from a text to its logits, [n v], read in chunks from a cache."""
    apply = jax.jit(make_apply(model.config))

    def read(text):
        padded = -(-len(text) // _CHUNK) * _CHUNK
        chunks = np.pad(text, (0, padded - len(text))).reshape(-1, 1, _CHUNK)
        cache = init_cache(model.config, batch_size=1, capacity=2048, dtype=jnp.float32)
        blocks = []
        for chunk in chunks:
            logits, _, cache = apply(model.params, jnp.asarray(chunk), cache)
            cache = cache.commit(jnp.array([_CHUNK]))
            blocks.append(np.asarray(logits[0])[:, : model.config.vocab_size])
        return np.concatenate(blocks)[: len(text)]

    return read


@pytest.mark.slow
@pytest.mark.skipif(not _FILES, reason="JSPEC_GGUF_FILES names no file")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.stem)
def test_logits_and_greedy_text_equal_those_of_transformers(path):
    """Guards against a theta, a scale, a window or a norm that the tiny models do not have.

    128 tokens after each of 20 prompts, by rounds with drafts. Where a token differs, the two must
    be as close in transformers' logits as twice the largest difference between these and jspec's
    over that text: else rounding is no excuse. Every such place is printed.
    """
    recorder = Recorder(_RESULTS and f"{_RESULTS}/{path.stem}.json", {"file": path.name})
    model = load_model(path, dtype="float32", quantization="none")
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, eos_ids=()))
    prompts = _prompts(model)
    assert len(prompts) == 20
    assert sum(len(prompt) > _LONG for prompt in prompts) == 3
    prompts = prompts[_FIRST:]
    generator = Generator(model, drafter="prompt_lookup", num_draft_tokens=3, batch_size=4)
    settings = SamplingParams(max_new_tokens=_NEW_TOKENS)
    results = generator.generate([Request(prompt, settings) for prompt in prompts])
    read, lines = _logits(model), []
    for prompt, result, theirs in zip(prompts, results, _theirs(path, prompts), strict=True):
        logits = read([*prompt, *theirs.tokens])[len(prompt) - 1 : -1]
        error = float(np.abs(logits - theirs.logits).max())
        line = {"prompt_tokens": len(prompt), "error": error,
                "relative_error": error / float(np.abs(theirs.logits).max())}  # fmt: skip
        best = np.sort(theirs.logits, axis=-1)[:, -2:]
        line["smallest_top_two_gap"] = float((best[:, 1] - best[:, 0]).min())
        pairs = enumerate(zip(result.token_ids, theirs.tokens, strict=True))
        parting = next(((i, a, b) for i, (a, b) in pairs if a != b), None)
        if parting is not None:
            place, ours, token_there = parting
            gap = float(theirs.logits[place, token_there] - theirs.logits[place, ours])
            line |= {"parted_at": place, "gap": gap}
        print(f"{path.stem}: {line}", flush=True)
        lines.append(line)
    recorder.save({"num_new_tokens": _NEW_TOKENS, "prompts": lines})
    assert all(line["relative_error"] < 2e-4 for line in lines)
    assert all(line.get("gap", 0) <= 2 * line["error"] for line in lines)
    assert all(result.stats.num_accepted > 0 for result in results[-3:])
