"""A conversation in the caches: what it reads, and that its answers are those of a fresh start."""

import dataclasses

import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.drafters import DrafterOptions
from jspec.generation.conversation import STOPPED, Conversation
from jspec.generation.request import Request, SamplingParams
from tests.cases import slow_unless
from tests.tiny_eagle import save_head
from tests.tiny_models import make_generator, shared_generator, target

SETTINGS = SamplingParams(max_new_tokens=20)
DRAFTERS = [
    slow_unless(name == "prompt_lookup", name)
    for name in ("none", "prompt_lookup", "model", "hierarchical", "tree", "eagle", "recent")
]


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """Returns the options of a head that does not agree with the target."""
    return DrafterOptions(
        draft_head=str(save_head(tmp_path_factory.mktemp("head"), target().config))
    )


def generator_of(drafter, request):
    """Returns a Generator: its programs are shared, and every conversation has its own caches."""
    if drafter == "eagle":
        return make_generator("eagle", drafter_options=request.getfixturevalue("head"))
    if drafter == "recent":
        return make_generator("model", drafter_options=DrafterOptions(draft_context=8))
    return shared_generator(drafter)


def drawn(seed, count):
    return [int(one) for one in np.random.default_rng(seed).integers(1, 128, count)]


def other(token_id):
    return [1 + token_id % 127]


def answer(conversation, prompt, settings=SETTINGS):
    *_, last = conversation.answer(prompt, settings)
    return last.chunk.result


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_only_what_is_new_is_read(drafter, request):
    """Guards against a conversation that is read again, and against caches that differ from it.

    The rounds are those of a fresh start, too: the drafter's caches hold what they would have read.
    In the third turn the text differs in the middle of the second answer; in the fourth nearly all.
    """
    generator = generator_of(drafter, request)
    conversation, prompt = Conversation(generator), drawn(0, 20)
    for turn in range(5):
        result = answer(conversation, prompt)
        expected = generator.generate(Request(prompt, SETTINGS))
        assert result.token_ids == expected.token_ids
        assert result.stats.rounds == expected.stats.rounds
        # All but the first is new; else the answer's newest token and the next question.
        assert conversation.num_read == [20, 6, 6, len(prompt) - 3, 1][turn]
        said = prompt + result.token_ids
        if turn == 0:
            prompt = said + drawn(1, 5)
        elif turn == 1:
            prompt = [*said[:-10], *other(said[-10]), *drawn(2, 5)]
        elif turn == 2:
            prompt = [*prompt[:3], *other(prompt[3]), *prompt[4:]]
        # The fourth prompt is given again: its last token alone is read.


@pytest.mark.slow
def test_growing_past_a_capacity_changes_nothing():
    """Guards against caches that are copied wrongly into larger ones: 512 tokens become 1024."""
    model = target()
    longer = dataclasses.replace(model, config=dataclasses.replace(model.config, max_seq_len=1000))
    generator = make_generator("prompt_lookup", longer)
    generator.engine = shared_generator("prompt_lookup").engine
    conversation, prompt, capacities = Conversation(generator), drawn(0, 470), []
    for turn in range(3):
        result = answer(conversation, prompt)
        expected = generator.generate(Request(prompt, SETTINGS))
        assert result.token_ids == expected.token_ids
        assert result.stats.rounds == expected.stats.rounds
        assert conversation.num_read == (6 if turn else 470)
        capacities.append(conversation._batch.cache_size.capacity)
        prompt = prompt + result.token_ids + drawn(turn + 1, 5)
    assert capacities == [512, 1024, 1024]


def test_up_to_the_end_of_the_context():
    """Guards against padding of the last chunk that is written over what was read."""
    generator = shared_generator("model")
    conversation, prompt = Conversation(generator), drawn(0, 150)
    first = answer(conversation, prompt)
    prompt = (prompt + first.token_ids + drawn(1, 30))[:195]
    result = answer(conversation, prompt)
    assert result.token_ids == generator.generate(Request(prompt, SETTINGS)).token_ids
    assert (result.finish_reason, len(result.token_ids)) == ("length", 5)
    with pytest.raises(InputError, match="fewer tokens than the context's 200"):
        answer(conversation, drawn(0, 200))


def test_other_settings_keep_the_caches():
    """Guards against a temperature that costs the conversation, and filters that lose it."""
    generator = shared_generator("model")
    conversation, prompt = Conversation(generator), drawn(0, 20)
    for settings in (
        SETTINGS,
        SamplingParams(max_new_tokens=20, temperature=0.8, seed=3),
        SamplingParams(max_new_tokens=20, temperature=0.8, top_p=0.7, repetition_penalty=1.2),
    ):
        result = answer(conversation, prompt, settings)
        expected = generator.generate(Request(prompt, settings))
        assert result.token_ids == expected.token_ids
        assert conversation.num_read in (20, 6)
        prompt = prompt + result.token_ids + drawn(1, 5)
    assert conversation.num_read == 6


def test_a_stopped_answer_is_gone_on_with():
    """Guards against caches that have lost what was said before Ctrl-C."""
    generator = shared_generator("model")
    conversation, prompt = Conversation(generator), drawn(0, 20)
    visits = conversation.answer(prompt, SETTINGS)
    next(visits)
    conversation.stop()
    *_, last = visits
    result = last.chunk.result
    assert result.finish_reason == STOPPED
    assert 0 < len(result.token_ids) < 20
    prompt = prompt + result.token_ids + drawn(1, 5)
    again = answer(conversation, prompt)
    assert again.token_ids == generator.generate(Request(prompt, SETTINGS)).token_ids
    assert conversation.num_read <= 6


def test_a_visit_that_fails_costs_only_the_caches():
    """Guards against caches that a program has taken over and not given back."""
    generator = shared_generator("model")
    conversation, prompt = Conversation(generator), drawn(0, 20)
    visits = conversation.answer(prompt, SETTINGS)
    next(visits)
    conversation._forget()  # as where the device fails, or Ctrl-C does not wait
    visits.close()
    result = answer(conversation, prompt)
    assert conversation.num_read == 20
    assert result.token_ids == generator.generate(Request(prompt, SETTINGS)).token_ids
