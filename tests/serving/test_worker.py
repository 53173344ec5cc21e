"""The scheduler on the real engine: tokens do not depend on company, and nothing is compiled.

Few rows, of one size and another: `row_counts` of a real server are tested without an engine.
"""

import queue

import jax
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.common.timing import compile_clock
from jspec.drafters.options import DrafterOptions
from jspec.generation import costs as costs_module
from jspec.generation.batch import Batch, row_counts
from jspec.generation.costs import RoundCosts, measure_costs
from jspec.generation.paged_batch import PagedBatch
from jspec.generation.request import Request, SamplingParams
from jspec.serving.job import Job
from jspec.serving.worker import Worker, make_row, make_scheduler, make_slots
from tests.cases import slow_unless
from tests.serving.served import answer_all, generate_by_one_program, run, step, submit
from tests.serving.test_slots import CACHED
from tests.serving.test_slots import PROMPTS as BEGUN_ALIKE
from tests.serving.test_slots import SETTINGS as DRAWN
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
# A draft model that reads a text's end only, as in test_paused.py, which has these programs, too.
RECENT = {"drafter_options": DrafterOptions(draft_context=24)}
PROMPTS = ["one", "two, and more", "x" * 70, "four" * 8, "ab" * 20, "six", "7", "eight"]


@pytest.fixture(scope="module", autouse=True)
def two_sizes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jspec.generation.paged_batch.row_counts", lambda number: (1, number))
        yield


@pytest.fixture(scope="module")
def scheduler(two_sizes):
    jax.clear_caches()  # what other tests have compiled
    generator = make_generator("model", batch_size=3, **RECENT)  # its own: none compiles for it
    return generator, make_scheduler(generator, max_queue=20, rounds_per_visit=2)


def answers(generator, scheduler, indices, *drafting):
    asked = [(generator.encode_prompt(PROMPTS[index]), SETTINGS[index]) for index in indices]
    return answer_all(generator, scheduler, asked, *drafting)


def test_requests_compile_nothing(scheduler, monkeypatch):
    """Guards against a client who waits for a compiler: all is there once the scheduler is made.

    Nor do long prompts and hits beside running answers, in chunks of another number between the
    rounds, which change no token. This test stands first: between tests a process that has grown
    large forgets its programs.
    """
    generator, scheduler = scheduler
    begin = compile_clock().num_programs
    answers(generator, scheduler, range(8))
    outcomes = []
    for budget in (1, 100):
        scheduler.slots.clear()
        monkeypatch.setattr(scheduler, "_prefill_budget", budget)
        pairs = zip(BEGUN_ALIKE, DRAWN, strict=True)
        jobs = [submit(generator, scheduler, *pair) for pair in pairs]
        run(scheduler)
        assert sum(job.num_cached for job, _ in jobs) >= sum(CACHED)
        outcomes.append([results[0].token_ids for _, results in jobs])
    assert compile_clock().num_programs == begin
    requests = list(map(Request, BEGUN_ALIKE, DRAWN))
    expected = generate_by_one_program(shared_generator("model", **RECENT), requests)
    assert outcomes == [[result.token_ids for result in expected]] * 2


def test_tokens_do_not_depend_on_company(scheduler):
    """In float32: alone, among 7 others, and by a Generator."""
    generator, scheduler = scheduler
    together = answers(generator, scheduler, range(8))
    assert len({result.text for result in together}) == 8
    expected_of = generate_by_one_program(
        shared_generator("model", **RECENT), map(Request, PROMPTS, SETTINGS)
    )
    for index, (result, expected) in enumerate(zip(together, expected_of, strict=True)):
        (alone,) = answers(generator, scheduler, [index])
        assert alone.token_ids == result.token_ids == expected.token_ids
        assert alone.text == result.text == expected.text
        assert result.stats.rounds == expected.stats.rounds
        assert (result.raw_logprobs is None) == (not SETTINGS[index].logprobs)


CASCADE = ("prompt_lookup", "ngram")


@pytest.fixture(scope="module")
def choosing():
    """Returns a Generator whose rows choose among two drafters, and its numbers of drafts."""
    options = {"batch_size": 2, "num_draft_tokens": "auto"}
    numbers = make_generator("+".join(CASCADE), costs=None, **options).engine.numbers
    seconds = tuple(1 + 0.1 * number for number in numbers)
    costs = RoundCosts((64,), numbers, CASCADE, ((seconds,) * 2,), ((0.0,) * 2,))
    return make_generator("+".join(CASCADE), costs=costs, **options), np.array(numbers)


@pytest.fixture
def unmeasured(monkeypatch, tmp_path):
    """Has no costs of this machine known, and few measured: of one draft or none, once.

    By programs of one size, as a server of few rows has.
    """
    monkeypatch.setattr("jspec.generation.paged_batch.row_counts", lambda number: (number,))
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(costs_module, "_REPEATS", 1)
    monkeypatch.setattr("jspec.generation.generator.MOST_DRAFT_TOKENS", 1)


@pytest.mark.parametrize("rule", ["coupled", slow_unless(False, "rejection")])
def test_costs_are_measured_with_the_rows_that_answer(rule, scheduler, unmeasured, monkeypatch):
    """By programs that a server compiles anyway; but texts of a seed are those of a Generator.

    Guards against pages and rows that stay taken, and against a second measurement at each start.
    """
    timed = []

    def measure(batch, context, num_rows, *options):
        timed.append((type(batch), num_rows))
        return measure_costs(batch, context, num_rows, *options)

    monkeypatch.setattr("jspec.generation.auto.measure_costs", measure)
    options = {"num_draft_tokens": "auto", "batch_size": 3, "acceptance": rule, "costs": None}
    generator = make_generator("prompt_lookup", **options)
    measured = make_scheduler(generator, max_queue=20, rounds_per_visit=2)
    kind = PagedBatch if rule == "coupled" else Batch
    assert timed == [(kind, 3), (kind, 1)]
    assert generator.round_costs.known.decided == generator.costs.decided != ()
    assert len(timed) == 2, "requests only look the costs up"
    assert measured.slots.usage == 0
    assert not any(table.any() for table in measured.slots._batch.tables)
    (answer,) = answers(generator, measured, [3])
    (greedy,) = answers(*scheduler, [3])  # by another drafter
    assert answer.token_ids == greedy.token_ids
    again = make_generator("prompt_lookup", **options)
    # Whose programs are compiled.
    again.engine, again.pattern_processor = generator.engine, generator.pattern_processor
    make_slots(again)
    assert len(timed) == 2


@pytest.mark.parametrize(("length", "has_pages"), [(18, False), (200, True)])
def test_short_texts_are_not_measured_in_pages(length, has_pages, monkeypatch):
    """They have no room for the prompt that is measured: the slow test below measures them."""
    asked = []

    def recall(known_costs, num_rows, length, pages=None):
        asked.append((num_rows, pages is not None))

    monkeypatch.setattr("jspec.generation.auto.KnownCosts._recall", recall)
    options = {"num_draft_tokens": "auto", "batch_size": 2, "max_seq_len": length}
    generator = make_generator("prompt_lookup", acceptance="coupled", costs=None, **options)
    generator.round_costs.know_all(object())  # any pages: they are handed on only
    assert asked == [(2, has_pages), (1, has_pages)]


@pytest.mark.slow
def test_a_server_of_short_texts_is_measured_too(monkeypatch, tmp_path):
    """Guards against a prompt of fewer tokens than none."""
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(costs_module, "_REPEATS", 1)
    options = {"num_draft_tokens": "auto", "batch_size": 2, "max_seq_len": 18}
    generator = make_generator("prompt_lookup", acceptance="coupled", costs=None, **options)
    make_slots(generator)
    assert generator.round_costs.known is not None


@pytest.mark.slow
def test_rows_may_share_pages_while_they_are_measured(unmeasured):
    """Guards against a server with little memory that takes pages which are not there."""
    page = sum(make_slots(shared_generator("prompt_lookup"))._batch.page_bytes)
    options = {"num_draft_tokens": "auto", "batch_size": 3, "max_seq_len": 200}
    few = make_generator("prompt_lookup", acceptance="coupled", costs=None, **options)
    batch = make_slots(few, cache_bytes=5 * page)._batch
    assert (batch.num_pages, batch.num_apart) == (5, 1)
    assert sum(few.costs.decided[0]) > 0


@pytest.mark.parametrize(
    ("asked", "most"),
    [
        ((0,), (0, 0)),
        ((1,), (1, 1)),
        ((None, "none"), (0, 0)),
        ((None, "prompt_lookup"), (7, 0)),
        ((1, "ngram"), (0, 1)),
    ],
)
def test_a_request_may_ask_for_fewer_drafts_and_for_their_drafter(choosing, asked, most):
    """All others are never worth it, alone as in company: `most` drafts of each drafter."""
    generator, numbers = choosing
    request = Request([1], SamplingParams())
    is_allowed = numbers <= np.array(most)[:, None]
    rounds = make_row(generator, request).costs[:2], make_row(generator, request, *asked).costs[:2]
    for free, limited in zip(*rounds, strict=True):
        assert np.max(free) < 10
        np.testing.assert_array_equal(np.broadcast_to(is_allowed, free.shape), limited == free)
        assert np.min(limited, where=~is_allowed, initial=1e9) > 1e3


def test_an_unknown_drafter_is_refused(choosing):
    with pytest.raises(InputError, match=r"among none, prompt_lookup, ngram, got 'model'"):
        make_row(choosing[0], Request([1], SamplingParams()), None, "model")


@pytest.mark.slow
def test_drafts_are_as_few_and_of_whom_a_request_asks(choosing):
    """Alone by a program of one row, whose rounds have their own costs, and in company."""
    generator, _ = choosing
    scheduler = make_scheduler(generator, max_queue=20, rounds_per_visit=2)
    asked = [(), (0,), (1,), (None, "none"), (None, CASCADE[0]), (1, CASCADE[1])]
    results = [answers(generator, scheduler, [3], *drafting)[0] for drafting in asked]
    assert len(scheduler.slots._batch._state.last_token) == 1
    assert len({tuple(result.token_ids) for result in results}) == 1
    free, plain, single, none, _, second = results
    assert plain.stats.num_proposed == none.stats.num_proposed == 0
    assert max(r.num_proposed for r in free.stats.rounds) > 1
    assert max(r.num_proposed for r in single.stats.rounds) == 1
    assert max(r.num_proposed for r in second.stats.rounds) == 1
    for result, name in zip(results[4:], CASCADE, strict=True):
        assert {r.drafter for r in result.stats.rounds if r.num_proposed} == {name}
    in_company = answers(generator, scheduler, [3, 6], 0)
    assert len(scheduler.slots._batch._state.last_token) == 2
    assert [result.stats.num_proposed for result in in_company] == [0, 0]


def test_a_fixed_number_of_drafts_cannot_be_lowered(scheduler):
    """A row has no choice of its own there; what the server does anyway may be asked for."""
    generator, _ = scheduler
    request = Request([1], SamplingParams())
    for asked, got in (((0,), "num_draft_tokens 0"), ((None, "none"), "drafter 'none'")):
        with pytest.raises(InputError, match=f"--num_draft_tokens=auto; got {got}$"):
            make_row(generator, request, *asked)
    make_row(generator, request, generator.num_draft_tokens, generator.drafter)
    make_row(shared_generator("none"), request, 0, "none")


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
    request = Request([1], SamplingParams())
    worker.submit([Job(request, make_row(shared_generator("model"), request), messages.put)])
    assert messages.get(timeout=10).chunk.result.error == "MemoryError: none is left"
    assert messages.get(timeout=10) == "stopped"
    assert worker.error == "MemoryError: none is left"
    worker.stop()


@pytest.mark.parametrize(
    ("num_rows", "counts"),
    [(1, (1,)), (3, (3,)), (7, (7,)), (8, (1, 2, 8)), (32, (1, 2, 8, 32)), (24, (1, 6, 24))],
)
def test_few_programs_for_many_rows(num_rows, counts):
    assert row_counts(num_rows) == counts


@pytest.mark.slow
def test_a_batch_grows_and_shrinks_and_no_answer_changes(monkeypatch):
    """One, then seven more beside it, then the last one alone; nothing is compiled for it."""
    monkeypatch.setattr("jspec.generation.paged_batch.row_counts", row_counts)
    generator = make_generator("prompt_lookup", batch_size=8)
    scheduler = make_scheduler(generator, max_queue=20, rounds_per_visit=2)
    batch, seen = scheduler.slots._batch, []
    num_programs = compile_clock().num_programs
    asked = [SamplingParams(max_new_tokens=60 if seed in (0, 7) else 5, temperature=0.9, seed=seed)
             for seed in range(8)]  # fmt: skip

    def step_once():
        step(scheduler)
        seen.append(len(batch._state.last_token))

    answers = [submit(generator, scheduler, [5, 6, 7], asked[0])[1]]
    step_once()
    answers += [submit(generator, scheduler, [5, 6, 7], settings)[1] for settings in asked[1:]]
    while scheduler.is_busy:
        step_once()
    assert seen[0] == 1
    assert max(seen) == 8
    assert compile_clock().num_programs == num_programs
    answers.append(submit(generator, scheduler, [5, 6, 7], asked[1])[1])
    while scheduler.is_busy:
        step_once()
    assert seen[-1] == 1
    assert compile_clock().num_programs == num_programs
    alone = shared_generator("prompt_lookup")
    for settings, results in zip([*asked, asked[1]], answers, strict=True):
        (expected,) = alone.generate([[5, 6, 7]], settings)
        assert results[0].token_ids == expected.token_ids
