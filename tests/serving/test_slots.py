"""Prompts that begin alike: what is not read again changes no token of an answer."""

import numpy as np
import pytest

from jspec.generation.request import Request, SamplingParams
from jspec.kernels.product import ChunkWidths
from jspec.serving.worker import make_scheduler
from tests.serving.served import answer, run, step, submit
from tests.tiny_models import shared_generator

SHARED = [1 + n * n % 97 for n in range(140)]  # two full chunks, and a part of a third
PROMPTS = [
    [*SHARED, 3],
    [*SHARED, 3],
    [*SHARED, 4, 5, 6],
    [*SHARED[:70], 9],  # one full chunk
    SHARED[:128],  # the second chunk is its last and is read
    [2, *SHARED],  # nothing in common
    SHARED[:3],
]
CACHED = [0, 128, 128, 64, 64, 0, 0]
SETTINGS = [SamplingParams(max_new_tokens=20, temperature=0.9, seed=seed) for seed in range(7)]


def make(generator=None, prefix_cache_bytes=10**8, **options):
    """Returns a Generator, by default the one that these tests share, and a scheduler."""
    options = {"max_queue": 20, "rounds_per_visit": 2} | options
    generator = generator or shared_generator("model", batch_size=3)
    scheduler = make_scheduler(generator, prefix_cache_bytes=prefix_cache_bytes, **options)
    return generator, scheduler


@pytest.fixture(scope="module")
def made():
    return make()


def test_a_hit_gives_the_tokens_of_a_miss(made):
    """One after another, by a Generator, and without a cache; drafts are the same as well."""
    generator, scheduler = made
    _, without = make(prefix_cache_bytes=0)
    for prompt, settings, num_cached in zip(PROMPTS, SETTINGS, CACHED, strict=True):
        cached, result = answer(generator, scheduler, prompt, settings)
        assert cached == num_cached
        missed, expected = answer(generator, without, prompt, settings)
        assert missed == 0
        plain = shared_generator("model").generate(Request(prompt, settings))
        assert result.token_ids == expected.token_ids == plain.token_ids
        assert result.stats.rounds == expected.stats.rounds == plain.stats.rounds


def test_the_rest_of_a_prompt_may_be_read_in_short_chunks(monkeypatch):
    """What is less than a page stays its row's own."""
    plain, generator = (shared_generator("model", batch_size=size) for size in (1, 3))
    prompts = [[*SHARED, *range(30)], [*SHARED, *range(30)], [*SHARED, *range(25), 3], [4, 5]]
    requests = [Request(*request) for request in zip(prompts, SETTINGS, strict=False)]
    expected = [plain.generate(request).token_ids for request in requests]
    for engine in (plain.engine, generator.engine):
        monkeypatch.setattr(engine, "_widths_of_chunks", ChunkWidths(16, 64, 49))
    assert plain.engine.chunks(len(prompts[0]))[2:] == [(128, 16), (144, 16), (160, 16)]
    _, scheduler = make()
    for request, num_cached, tokens in zip(requests, (0, 128, 128, 0), expected, strict=True):
        cached, result = answer(generator, scheduler, request.prompt, request.settings)
        assert cached == num_cached
        assert result.token_ids == tokens == plain.generate(request).token_ids


def test_a_cache_that_is_full_drops_pages_and_changes_no_token():
    """CacheSize for three pages: prompts of up to three come and go at random."""
    generator, scheduler = make()
    answer(generator, scheduler, PROMPTS[0], SETTINGS[0])
    size = scheduler.slots.tree.num_bytes // len(scheduler.slots.tree)
    generator, scheduler = make(prefix_cache_bytes=3 * size + 1)
    tree, rng, expected = scheduler.slots.tree, np.random.default_rng(0), {}
    for _ in range(12):
        number = int(rng.integers(4))
        prompt = [number, *SHARED] if number % 2 else [*SHARED[:64], number, *SHARED[65:]]
        _, result = answer(generator, scheduler, prompt, SETTINGS[number])
        assert expected.setdefault(number, result.token_ids) == result.token_ids
        assert tree.num_bytes <= 3 * size + 1
    assert tree.num_evicted > 0
    assert tree.root.num_pins == 0


@pytest.mark.parametrize("widths", [ChunkWidths(64, 256, 129), ChunkWidths(16, 64, 49)])
def test_a_prompt_that_was_cancelled_half_read_leaves_what_was_read(monkeypatch, widths):
    """Its slot answers the next request, and its chunks are there for it."""
    generator = shared_generator("model", batch_size=3)
    monkeypatch.setattr(generator.engine, "_widths_of_chunks", widths)
    _, scheduler = make(generator, prefill_budget=1)
    job, results = submit(generator, scheduler, PROMPTS[0], SETTINGS[0])
    for _ in range(2):
        assert list(scheduler.step()) == []
    scheduler.cancel(job)
    run(scheduler)
    assert (results[0].finish_reason, results[0].token_ids) == ("cancelled", [])
    num_cached, result = answer(generator, scheduler, PROMPTS[0], SETTINGS[0])
    assert num_cached == 128
    expected = shared_generator("model").generate(Request(PROMPTS[0], SETTINGS[0]))
    assert result.token_ids == expected.token_ids
    assert all(node.num_pins == 0 for node in scheduler.slots.tree._by_use)


def test_a_slot_that_is_free_asks_for_nothing(made):
    """Guards against likeliest tokens and patterns that are looked up for ended answers."""
    generator, scheduler = made
    batch = scheduler.slots._batch
    settings = SamplingParams(max_new_tokens=4, logprobs=True, top_logprobs=5, pattern="[a-z]+")
    _, results = submit(generator, scheduler, PROMPTS[0], settings)
    while not batch._state.settings.wants_top.any():
        assert scheduler.is_busy
        step(scheduler)
    run(scheduler)
    assert len(results[0].token_ids) > 0
    (pattern,) = (state for state in batch._state.settings.states if hasattr(state, "here"))
    assert not pattern.here.any()
    assert not batch._state.settings.wants_top.any()
    assert batch._state.is_done.all()
