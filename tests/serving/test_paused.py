"""Requests in less memory than they want: whoever loses its slot goes on with the same tokens."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.common.timing import compile_clock
from jspec.drafters.options import DrafterOptions
from jspec.generation.costs import RoundCosts
from jspec.generation.generator import Generator
from jspec.generation.request import Request, SamplingParams
from jspec.sampling.settings import Switches
from jspec.serving.job import Job
from jspec.serving.prefix_tree import path
from jspec.serving.worker import make_row, make_scheduler
from jspec.speculation.control import drafters_of
from tests import tiny_models
from tests.drafters import test_translated_model as translated
from tests.serving.served import answer_all, generate_by_one_program, run, step
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


def generator_of_three(drafter, **options):
    """Returns a Generator for three rows, that of a model the same one at every call."""
    is_shared = drafter == "model" and "num_draft_tokens" not in options
    return (shared_generator if is_shared else build)(drafter, batch_size=3, **options)


def make(drafter, num_pages, **options):
    """Returns a Generator, and a scheduler with that many pages of each part left."""
    if options.get("num_draft_tokens") == "auto":
        engine = build(drafter, costs=None, **options).engine
        numbers, names = engine.numbers, drafters_of(engine.drafter.kinds)
        seconds = tuple(1 + 0.1 * number for number in numbers)
        reading = tuple(0.02 * (name in ("model", "dflash")) for name in names)
        options["costs"] = RoundCosts(
            (64,), numbers, tuple(names), ((seconds,) * len(names),), (reading,)
        )
    generator = generator_of_three(drafter, **options)
    scheduler = make_scheduler(generator, max_queue=20, rounds_per_visit=3)
    for pool in scheduler.slots.pools:  # in arrays as large as those of other tests
        pool.take(pool.num_free - num_pages)
    scheduler.slots._batch.num_pages = num_pages
    return generator, scheduler


def alone(drafter, **options):
    generator = (build if drafter == "translated" else shared_generator)(drafter, **options)
    return generate_by_one_program(generator, map(Request, PROMPTS, SETTINGS))


@functools.cache
def alone_by_model(**options):
    return alone("model", **options)


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
    results = answer_all(generator, scheduler, zip(PROMPTS, SETTINGS, strict=True))
    assert scheduler.num_paused > 0
    assert compile_clock().num_programs == begin
    if "num_draft_tokens" in options:
        expected_of = generator.generate(list(map(Request, PROMPTS, SETTINGS)))
    elif drafter == "model":
        expected_of = alone_by_model(**options)
    else:
        expected_of = alone(drafter, **options)
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
    drafter, options, _ = CASES[0]
    generator = generator_of_three(drafter, **options)
    scheduler = make_scheduler(generator, max_queue=3, rounds_per_visit=2, prefill_budget=1)
    request, tokens, results = Request(PROMPTS[0], SETTINGS[0]), [], []

    def keep(update):
        tokens.extend(update.chunk.token_ids)
        results.append(update.chunk.result)

    scheduler.submit([Job(request, make_row(generator, request), keep)])
    while len(tokens) < 40:
        step(scheduler)
    (slot,) = scheduler._running
    scheduler._pause(slot)
    step(scheduler)
    assert scheduler._reading == slot, "it is read in one chunk"
    scheduler._pause(slot)
    run(scheduler)
    expected = alone_by_model(**options)[0]
    assert tokens == results[-1].token_ids == expected.token_ids
    assert results[-1].stats.rounds == expected.stats.rounds
    assert scheduler.num_paused == 2


def test_memory_for_less_than_one_request_is_refused():
    with pytest.raises(
        InputError, match=r"cache_bytes of 131072 at least, .* 200 tokens, got 131071"
    ):
        make_scheduler(make_generator("model", batch_size=2), max_queue=1, rounds_per_visit=1,
                       cache_bytes=131071)  # fmt: skip


CONFIG = dataclasses.replace(tiny_models.CONFIG, head_dim=32)  # of which C++ reads rows in place
MANY_PAGES, FEW_PAGES = 20, 7


def make_side_by_side(batch_size, acceptance):
    """Returns a Generator of a lookup and a draft model, of which both are worth their costs."""
    target, draft = (
        tiny_models.make_model(CONFIG, params=tiny_models.peaked_params(CONFIG, disturbance=much))
        for much in (0.0, 0.02)
    )
    options = {
        "drafter": "prompt_lookup+model", "num_draft_tokens": "auto", "acceptance": acceptance,
        "batch_size": batch_size,
    }  # fmt: skip
    engine = Generator(target, draft, **options).engine
    names = drafters_of(engine.drafter.kinds)
    seconds = tuple(1 + 0.05 * number for number in engine.numbers)
    reading = tuple(0.002 * (name == "model") for name in names)
    costs = RoundCosts((512,), engine.numbers, tuple(names), ((seconds,) * 2,), (reading,))
    return Generator(target, draft, costs=costs, **options)


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
def test_blocks_side_by_side_say_what_a_row_says_alone(acceptance):
    """In C++, where rows choose their numbers of drafts; in few pages, too."""
    alone, together = (make_side_by_side(size, acceptance) for size in (1, 4))
    if not together.engine.call_sizes(4, Switches()):
        pytest.skip("blocks lie side by side where C++ attends")
    requests = [
        Request(prompt, settings) for prompt, settings in zip(PROMPTS, SETTINGS, strict=True)
    ]
    expected = [alone.generate(request).token_ids for request in requests]
    results = together.generate(requests)
    assert [result.token_ids for result in results] == expected
    assert all(result.stats.num_proposed for result in results)
    for num_pages in (MANY_PAGES, FEW_PAGES):
        # Layers, keys and values, heads, slots, dimensions, bytes, of target and draft.
        size = 2 * 2 * 2 * 64 * CONFIG.head_dim * 4 * 2
        scheduler = make_scheduler(
            together, max_queue=20, rounds_per_visit=3, cache_bytes=num_pages * size + 1
        )
        spoil(scheduler, np.random.default_rng(0))
        results = answer_all(together, scheduler, zip(PROMPTS, SETTINGS, strict=True))
        assert [result.token_ids for result in results] == expected
        assert (scheduler.num_paused > 0) == (num_pages == FEW_PAGES)
