"""Drafters that count, through the Generator: plain decoding's tokens, whatever is proposed."""

import functools

import pytest

from jspec.drafters import DrafterOptions, without_unread
from jspec.drafters.tables import count_ngrams, save_table
from jspec.generation.generator import Generator
from jspec.generation.request import Request, SamplingParams
from tests.cases import slow_unless
from tests.generation.test_generator_processors import PENALTIES
from tests.tiny_models import CONFIG, draft, shared_generator, target

PROMPTS = [list(b"a rose is a rose is a"), list(b"z")]
SETTINGS = [
    SamplingParams(max_new_tokens=40, seed=1, **PENALTIES),
    SamplingParams(max_new_tokens=32, seed=2, temperature=1.0, **PENALTIES),
    SamplingParams(max_new_tokens=30, seed=3, temperature=1.0),
    SamplingParams(max_new_tokens=36, seed=4),
]
REQUESTS = [Request(prompt, settings) for prompt in PROMPTS for settings in SETTINGS]


@pytest.fixture(scope="module")
def plain():
    """Plain decoding's answers."""
    return shared_generator("none", batch_size=3).generate(REQUESTS)


@pytest.fixture(scope="module")
def make(tmp_path_factory, plain):
    """Returns a function that makes a batched Generator with a table of the target's own output."""
    path = tmp_path_factory.mktemp("table") / "table.safetensors"
    texts = [result.prompt_token_ids + result.token_ids for result in plain]
    save_table(count_ngrams(texts, CONFIG.vocab_size), path)
    return functools.partial(_make, str(path))


def _make(path, drafter, distribution, rule):
    options = DrafterOptions(lookup_min_match=3, ngram_probs=distribution, draft_table=path)
    return Generator(
        target(), draft() if "model" in drafter else None, drafter=drafter, acceptance=rule,
        batch_size=3, num_draft_tokens=4, drafter_options=without_unread(drafter, options),
    )  # fmt: skip


_SLOW = [slow_unless(False, name) for name in ("unigram", "random")]


@pytest.mark.parametrize("drafter", ["ngram", "bigram", *_SLOW])
def test_one_seed_gives_one_text_under_the_coupled_rule(plain, make, drafter):
    """Plain decoding's tokens at temperatures 0 and 1, with penalties and without, in a batch."""
    results = make(drafter, "sampled", "coupled").generate(REQUESTS)
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    proposed = sum(r.stats.num_proposed for r in results)
    accepted = sum(r.stats.num_accepted for r in results)
    assert accepted < proposed
    assert accepted > 0 or drafter == "random"


@pytest.mark.parametrize(
    ("drafter", "distribution"),
    [
        slow_unless(False, "prompt_lookup+ngram", "deterministic"),
        ("ngram+model", "sampled"),
    ],
)
def test_greedy_output_of_cascades_is_plain_decodings(plain, make, drafter, distribution):
    """Token for token in float32, beside sampled rows."""
    results = make(drafter, distribution, "rejection").generate(REQUESTS)
    for result, expected in zip(results, plain, strict=True):
        if expected.settings.temperature == 0:
            assert result.token_ids == expected.token_ids
    assert sum(r.stats.num_accepted for r in results) > 0
