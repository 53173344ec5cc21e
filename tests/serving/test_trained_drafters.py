"""Under `coupled` a server with a trained drafter says what plain decoding says."""

import concurrent.futures
import functools

import pytest

from jspec.generation.generator import Generator
from jspec.generation.request import Request, SamplingParams
from jspec.weights.hf import read_config
from tests import tiny_peagle
from tests.cases import slow_unless
from tests.serving.served import Served
from tests.tiny_models import save_folder

PROMPTS = ("why is the sky blue", "1 2 3 4", "a")


@pytest.mark.parametrize("name", ["mtp", slow_unless(False, "P-EAGLE")])
def test_answers_are_plain_ones(tmp_path, name):
    """Of requests that come together, of which two share a batch."""
    fields = {"family": "mimo", "qkv_bias": True, "num_mtp_layers": 1}
    path = save_folder(tmp_path / "tiny", num_layers=1 if name == "mtp" else 2, **fields)
    load = functools.partial(Generator.load, path, dtype="float32", batch_size=2)
    options = {"drafter": "mtp"}
    if name == "P-EAGLE":
        head = tiny_peagle.save_head(tmp_path / "h", read_config(path), std=0.1)
        options = {"drafter": "eagle", "draft_head": head}
    params = [SamplingParams(temperature=1.0, seed=seed, max_new_tokens=30) for seed in range(3)]
    plain = load(drafter="none").generate(
        [Request(text, settings) for text, settings in zip(PROMPTS, params, strict=True)]
    )
    with Served(load(num_draft_tokens=3, acceptance="coupled", **options)) as server:

        def ask(text, settings):
            asked = {"temperature": 1.0, "seed": settings.seed, "max_tokens": 30}
            status, reply = server.post("/v1/completions", {"prompt": text} | asked)
            assert status == 200, reply
            return reply

        with concurrent.futures.ThreadPoolExecutor() as pool:
            replies = list(pool.map(ask, PROMPTS, params))
    assert [reply["choices"][0]["text"] for reply in replies] == [result.text for result in plain]
    assert sum(reply["usage"]["jspec"]["num_accepted"] for reply in replies) > 0
