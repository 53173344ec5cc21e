"""The scheduler on the real engine: tokens do not depend on company, and nothing is compiled."""

import dataclasses
import queue

import pytest

from jspec.common.errors import InputError
from jspec.common.timing import compile_clock
from jspec.generation.costs import RoundCosts
from jspec.generation.request import Request, SamplingParams
from jspec.serving.job import Job
from jspec.serving.worker import Worker, make_row, make_scheduler
from tests.tiny_models import make_generator, shared_generator

_COMMON = {"max_new_tokens": 24, "temperature": 0.8}
SETTINGS = [
    SamplingParams(**_COMMON, seed=1),
    SamplingParams(**_COMMON, seed=2, top_k=5),
    SamplingParams(**_COMMON, seed=3, top_p=0.7, presence_penalty=0.5),
    SamplingParams(max_new_tokens=24, min_new_tokens=20),
    SamplingParams(**_COMMON, seed=5, min_p=0.1, logit_bias={97: 2.0}, logprobs=True),
    SamplingParams(**_COMMON, seed=6, repetition_penalty=1.3, frequency_penalty=0.2),
    SamplingParams(**_COMMON, seed=7, forbidden_token_ids=(97, 98)),
    SamplingParams(max_new_tokens=5, temperature=1.0, seed=8, stop=("zz",)),
]
PROMPTS = ["one", "two, and more", "x" * 70, "four" * 8, "ab" * 20, "six", "7", "eight"]


@pytest.fixture(scope="module")
def scheduler():
    generator = make_generator("model", batch_size=8)
    return generator, make_scheduler(generator, max_queue=20, rounds_per_visit=2)


def answers(generator, scheduler, indices, *drafting):
    """Answers these requests together; returns the results in their order."""
    results = {}
    for index in indices:
        ids = generator.encode_prompt(PROMPTS[index])
        request = Request(ids, SETTINGS[index])

        def keep(update, index=index):
            results[index] = update.chunk.result or results.get(index)

        scheduler.submit([Job(request, make_row(generator, request, *drafting), keep)])
    while scheduler.is_busy:
        for update in scheduler.step():
            update.job.on_update(update)
    return [results[index] for index in indices]


def test_requests_compile_nothing(scheduler):
    """Guards against a client who waits for a compiler: all is there once the scheduler is made.

    This test stands first: between tests a process that has grown large forgets its programs.
    """
    generator, scheduler = scheduler
    begin = compile_clock().num_programs
    answers(generator, scheduler, range(8))
    assert compile_clock().num_programs == begin


def test_tokens_do_not_depend_on_company(scheduler):
    """In float32: alone, among 7 others, and by a Generator, also where it compiles less."""
    generator, scheduler = scheduler
    together = answers(generator, scheduler, range(8))
    assert len({result.text for result in together}) == 8
    requests = list(map(Request, PROMPTS, SETTINGS))
    expected_of = shared_generator("model").generate(requests)
    expected_of[0] = shared_generator("model").generate(PROMPTS[0], SETTINGS[0])
    for index, (result, expected) in enumerate(zip(together, expected_of, strict=True)):
        (alone,) = answers(generator, scheduler, [index])
        assert alone.token_ids == result.token_ids == expected.token_ids
        assert alone.text == result.text == expected.text
        assert result.stats.rounds == expected.stats.rounds
        assert (result.raw_logprobs is None) == (not SETTINGS[index].logprobs)


def test_a_request_may_ask_for_fewer_drafts_and_for_their_drafter_where_that_varies(monkeypatch):
    """Alone by a program of one row, whose rounds have their own costs, and in company."""
    monkeypatch.setattr("jspec.generation.paged_batch.row_counts", lambda num_rows: (1, num_rows))
    drafters, options = ("prompt_lookup", "ngram"), {"batch_size": 2, "num_draft_tokens": "auto"}
    numbers = make_generator("+".join(drafters), costs=None, **options).engine.numbers
    seconds = tuple(1 + 0.1 * number for number in numbers)
    costs = RoundCosts((64,), numbers, drafters, ((seconds,) * 2,), ((0.0,) * 2,))
    generator = make_generator("+".join(drafters), costs=costs, **options)
    scheduler = make_scheduler(generator, max_queue=20, rounds_per_visit=2)
    asked = [(), (0,), (1,), (None, "none"), (None, drafters[0]), (1, drafters[1])]
    free, plain, single, none, first, second = (
        answers(generator, scheduler, [3], *_)[0] for _ in asked
    )
    assert len(scheduler.slots._batch._state.last_token) == 1
    results = free, plain, single, none, first, second
    assert len({tuple(result.token_ids) for result in results}) == 1
    assert plain.stats.num_proposed == none.stats.num_proposed == 0
    assert max(r.num_proposed for r in single.stats.rounds) == 1
    assert max(r.num_proposed for r in free.stats.rounds) > 1
    assert max(r.num_proposed for r in second.stats.rounds) == 1
    for result, name in zip((first, second), drafters, strict=True):
        assert {r.drafter for r in result.stats.rounds if r.num_proposed} == {name}
    in_company = answers(generator, scheduler, [3, 6], 0)
    assert len(scheduler.slots._batch._state.last_token) == 2
    assert [result.stats.num_proposed for result in in_company] == [0, 0]
    with pytest.raises(InputError, match=r"among none, prompt_lookup, ngram, got 'model'"):
        make_row(generator, Request([1], SamplingParams()), None, "model")


def test_a_fixed_number_of_drafts_cannot_be_lowered(scheduler):
    generator, _ = scheduler
    with pytest.raises(InputError, match="only where the server runs with --num_draft_tokens=auto"):
        make_row(generator, Request([1], SamplingParams()), 0)


def test_a_worker_that_fails_says_so_to_all_and_stops(scheduler):
    """Guards against clients that wait for ever for a thread that is dead."""
    _, scheduler = scheduler
    messages, seen = queue.SimpleQueue(), []

    class Broken(type(scheduler)):
        def step(self):
            raise MemoryError("none is left")

    broken = Broken(scheduler.slots, scheduler._target, 1, max_queue=1, rounds_per_visit=1,
                    prefill_budget=1, clock=lambda: 0.0)  # fmt: skip
    worker = Worker(broken, seen.append, lambda: messages.put("stopped"))
    worker.start()
    settings = SamplingParams()
    row = dataclasses.replace(settings)
    request = Request([1], row)
    worker.submit([Job(request, make_row(shared_generator("model"), request), messages.put)])
    assert messages.get(timeout=10).chunk.result.error == "MemoryError: none is left"
    assert messages.get(timeout=10) == "stopped"
    assert worker.error == "MemoryError: none is left"
    worker.stop()
