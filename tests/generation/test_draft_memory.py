"""`draft_memory`: what earlier answers change, which is how often the target is called."""

import functools
import itertools

import pytest

from jspec.common.timing import compile_clock
from jspec.generation.conversation import Conversation
from jspec.generation.costs import RoundCosts
from jspec.generation.generator import Generator
from jspec.generation.request import Request, SamplingParams
from tests.tiny_models import small

PROMPTS = [list(b"say it once"), list(b"and say it again"), list(b"a"), list(b"say it once")]
GREEDY = SamplingParams(max_new_tokens=40)
SAMPLED = SamplingParams(max_new_tokens=40, temperature=0.8, seed=7)
NUMBERS = (0, 1, 3, 7)
SECONDS = tuple(1 + 0.1 * number for number in NUMBERS)
MEMORY = {
    "draft_memory": 4,  # as many answers as there are prompts
    "num_draft_tokens": "auto",
    "costs": RoundCosts((64,), NUMBERS, ("suffix",), ((SECONDS,),), ((0.0,),)),
}


def ask(generator, settings, order=(0, 1, 2, 3)):
    """Returns the results by prompt, asked in this order one after another."""
    results = generator.generate([Request(PROMPTS[index], settings) for index in order])
    return dict(zip(order, results, strict=True))


def ids(results):
    return {index: results[index].token_ids for index in sorted(results)}


@pytest.fixture
def generator():
    """The Generator that most tests share, which has answered nothing."""
    generator = make("suffix", acceptance="coupled", **MEMORY)
    generator.forget_answers()
    return generator


@functools.cache
def make(drafter, **options):
    return Generator(small(), drafter=drafter, **options)


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED])
def test_texts_are_plain_decodings_in_any_order(generator, settings):
    """Under `coupled`; no order of requests is another text, and none compiles anything."""
    expected = ids(ask(make("none"), settings))
    first = ask(generator, settings)  # compiles
    begin = compile_clock().num_programs
    counts = []
    for order in itertools.islice(itertools.permutations(range(len(PROMPTS))), 0, 24, 11):
        results = ask(generator, settings, order)
        assert ids(results) == expected
        counts.append(sum(result.stats.num_rounds for result in results.values()))
    assert compile_clock().num_programs == begin
    assert max(counts) < sum(result.stats.num_rounds for result in first.values())


def test_the_second_of_two_equal_requests_takes_far_fewer_calls(generator):
    """Counts, as no clock is read; after `forget_answers` they are what they were.

    `auto` learns from the drafts of earlier answers as from others: it asks for all that it may.
    """
    stats = [generator.generate(Request(PROMPTS[0], GREEDY)).stats for _ in range(2)]
    generator.forget_answers()
    stats.append(generator.generate(Request(PROMPTS[0], GREEDY)).stats)
    first, second, third = (stat.num_rounds for stat in stats)
    assert 2 * second < first == third, (first, second, third)
    assert max(a_round.num_proposed for a_round in stats[1].rounds) == max(NUMBERS)


def test_an_answer_that_is_given_up_is_not_kept(generator):
    """Nor one that fails. A conversation's are."""
    given_up = generator.stream(Request(PROMPTS[0], GREEDY))
    assert next(given_up).result is None
    given_up.close()
    assert num_places(generator) == 0
    conversation = Conversation(generator)
    visits = conversation.answer(PROMPTS[0], GREEDY)
    next(visits)
    conversation.stop()
    *_, visit = visits
    assert visit.chunk.result.finish_reason == "stopped"
    assert num_places(generator) == 0
    *_, visit = conversation.answer(PROMPTS[0], GREEDY)
    assert num_places(generator) == len(visit.chunk.result.token_ids) - 1


def num_places(generator):
    (memory,) = generator.params.draft
    return int(memory.corpus.num_sorted)


def test_two_runs_at_once_keep_the_answers_of_both(generator):
    """A run that goes on does not bring back what it began with."""
    runs = [generator.stream(Request(prompt, GREEDY)) for prompt in PROMPTS[:2]]
    for _ in itertools.zip_longest(*runs):
        pass
    assert num_places(generator) == 2 * (GREEDY.max_new_tokens - 1)


@pytest.mark.slow
def test_a_member_of_a_cascade_looks_answers_up():
    """The memory is found among the parameters of all members, whose others stay as they are."""
    generator = make("recycle+suffix", draft_memory=1, num_draft_tokens=4)
    expected = make("none").generate(Request(PROMPTS[0], GREEDY)).token_ids
    first, second = (generator.generate(Request(PROMPTS[0], GREEDY)) for _ in range(2))
    assert first.token_ids == second.token_ids == expected
    drafters = [{r.drafter for r in result.stats.rounds} for result in (first, second)]
    assert "suffix" in drafters[1]
    assert second.stats.num_rounds <= first.stats.num_rounds
