"""Requests in less memory than they want: whoever loses its slot goes on with the same tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.common.timing import compile_clock
from jspec.drafters.options import DrafterOptions
from jspec.generation.costs import RoundCosts
from jspec.generation.generator import Generator
from jspec.generation.request import Request, SamplingParams
from jspec.serving.job import Job
from jspec.serving.prefix_tree import path
from jspec.serving.worker import make_row, make_scheduler
from jspec.speculation.control import drafters_of
from tests.drafters import test_translated_model as translated
from tests.tiny_models import make_generator, shared_generator

_COMMON = {"max_new_tokens": 90, "min_new_tokens": 85, "temperature": 0.9}
SETTINGS = [
    SamplingParams(**_COMMON, seed=1, repetition_penalty=1.2),
    SamplingParams(**_COMMON, seed=2, top_k=20, presence_penalty=0.4, logprobs=True),
    SamplingParams(max_new_tokens=90, min_new_tokens=85),
    SamplingParams(**_COMMON, seed=4, min_p=0.01),
    SamplingParams(**_COMMON, seed=5),
]
# Two of them begin with the same page.
PROMPTS = [[1 + n * n % 97 for n in range(length)] for length in (100, 40, 90, 30, 20)]
# Drafter, options, and so many pages that some answer must wait.
CASES = [
    ("model", {"drafter_options": DrafterOptions(draft_context=24)}, 7),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("model", {}, 7),
            ("model", {"acceptance": "coupled"}, 7),
            ("model", {"num_draft_tokens": "auto"}, 7),
            ("none", {}, 7),
            ("merged tree", {}, 6),
            ("merged tree", {"num_draft_tokens": "auto"}, 6),
            ("hierarchical", {}, 7),
            ("dflash", {}, 7),
            ("dflash", {"num_draft_tokens": "auto"}, 7),
            ("translated", {}, 14),
            ("translated", {"acceptance": "coupled"}, 14),
        )
    ),
]


def build(drafter, **options):
    """Returns a Generator; the draft model of "translated" has another vocabulary."""
    if drafter != "translated":
        return make_generator(drafter, **options)
    options = {"num_draft_tokens": 4} | options
    return Generator(translated.model("bytes"), translated.model("bpe", 0.01), **options)


def answers(generator, scheduler, settings=SETTINGS):
    """Answers all prompts together; returns the results in their order."""
    results = {}
    for index, (prompt, one) in enumerate(zip(PROMPTS, settings, strict=True)):
        request = Request(prompt, one)

        def keep(update, index=index):
            results[index] = update.chunk.result or results.get(index)

        scheduler.submit([Job(request, make_row(generator, request), keep)])
    while scheduler.is_busy:
        for update in scheduler.step():
            update.job.on_update(update)
    return [results[index] for index in range(len(PROMPTS))]


def make(drafter, num_pages, **options):
    """Returns a Generator, and a scheduler with that many pages of each part."""
    if options.get("num_draft_tokens") == "auto":
        engine = build(drafter, costs=None, **options).engine
        numbers, names = engine.numbers, drafters_of(engine.drafter.kinds)
        seconds = tuple(1 + 0.1 * number for number in numbers)
        reading = tuple(0.02 * (name in ("model", "dflash")) for name in names)
        options["costs"] = RoundCosts(
            (64,), numbers, tuple(names), ((seconds,) * len(names),), (reading,)
        )
    generator = build(drafter, batch_size=4, **options)
    # Layers, keys and values, heads, slots, dimensions, bytes; target and draft are of one size.
    size = 2 * 2 * 2 * 64 * 8 * 4 * (1 if drafter in ("none", "translated") else 2)
    scheduler = make_scheduler(
        generator, max_queue=20, rounds_per_visit=3, cache_bytes=num_pages * size + 1
    )
    assert [pool.num_pages for pool in scheduler.slots.pools] == [num_pages] * 2
    return generator, scheduler


def spoil(scheduler, rng):
    """Makes pages go out in another order, and writes rubbish into the free ones at every visit."""
    slots = scheduler.slots
    batch, run = slots._batch, slots._batch.run
    for pool in slots.pools:
        rng.shuffle(pool._free)

    def spoilt(layer, free):
        numbers = np.array(layer)
        numbers[free] = np.nan
        return jnp.asarray(numbers)

    spoilt(batch._layers[0][0][0][0], [0])  # compiles what it needs itself

    def run_on_rubbish(num_rounds):
        for part, pool in enumerate(slots.pools):
            free = [0, *pool._free]
            batch._layers[part] = [
                tuple(tuple(spoilt(layer, free) for layer in half) for half in cache)
                for cache in batch._layers[part]
            ]
        return run(num_rounds)

    batch.run = run_on_rubbish


@pytest.mark.parametrize(("drafter", "options", "num_pages"), CASES)
def test_tokens_do_not_depend_on_memory_or_on_page_numbers(drafter, options, num_pages):
    """In float32, with sampling and penalties, where answers wait, and by a Generator alone.

    Nobody waits for a compiler.
    """
    generator, scheduler = make(drafter, num_pages, **options)
    spoil(scheduler, np.random.default_rng(0))
    begin = compile_clock().num_programs
    results = answers(generator, scheduler)
    assert scheduler.num_paused > 0
    assert compile_clock().num_programs == begin
    if "num_draft_tokens" in options:
        alone = generator
    elif drafter == "translated":
        alone = build(drafter, **options)
    else:
        alone = shared_generator(drafter, **options)
    # In one call, though one at a time: their programs have all processors, and are compiled once.
    expected_of = alone.generate(list(map(Request, PROMPTS, SETTINGS)))
    for result, expected, settings in zip(results, expected_of, SETTINGS, strict=True):
        assert result.token_ids == expected.token_ids
        assert result.text == expected.text
        # With `auto` greedy answers have as many drafts as pay in their company.
        if "num_draft_tokens" not in options or settings.temperature > 0:
            assert result.stats.rounds == expected.stats.rounds
        if settings.logprobs:
            np.testing.assert_allclose(result.raw_logprobs, expected.raw_logprobs, atol=1e-4)
    target, draft = scheduler.slots.pools
    nodes = list(scheduler.slots.tree._by_use)
    assert draft.num_free == num_pages - sum(len(node.page.draft_pages) for node in nodes)
    assert target.num_free == num_pages - len(nodes)  # of a page each
    assert scheduler.slots.usage == 0
    # Prompts and answers are in the tree, and no draft.
    texts = [[i for node_of_path in path(node) for i in node_of_path.chunk] for node in nodes]
    whole = [[*result.prompt_token_ids, *result.token_ids] for result in results]
    assert texts
    assert all(any(known[: len(text)] == text for known in whole) for text in texts)


def test_an_answer_paused_while_it_is_read_again_goes_on():
    """Guards against an answer that begins anew, and is streamed twice.

    It loses its slot between two chunks of its second reading: what was saved before still stands.
    """
    generator = shared_generator("model", batch_size=3)
    scheduler = make_scheduler(generator, max_queue=3, rounds_per_visit=2, prefill_budget=1)
    request, tokens, results = Request(PROMPTS[0], SETTINGS[0]), [], []

    def keep(update):
        tokens.extend(update.chunk.token_ids)
        results.append(update.chunk.result)

    def step():
        for update in scheduler.step():
            update.job.on_update(update)

    scheduler.submit([Job(request, make_row(generator, request), keep)])
    while len(tokens) < 40:
        step()
    (slot,) = scheduler._running
    scheduler._pause(slot)
    step()
    assert scheduler._reading == slot, "it is read in one chunk"
    scheduler._pause(slot)
    while scheduler.is_busy:
        step()
    expected = shared_generator("model").generate(request)
    assert tokens == results[-1].token_ids == expected.token_ids
    assert results[-1].stats.rounds == expected.stats.rounds
    assert scheduler.num_paused == 2


def test_memory_for_less_than_one_request_is_refused():
    with pytest.raises(
        InputError, match=r"cache_bytes of 131072 at least, .* 200 tokens, got 131071"
    ):
        make_scheduler(make_generator("model", batch_size=2), max_queue=1, rounds_per_visit=1,
                       cache_bytes=131071)  # fmt: skip
