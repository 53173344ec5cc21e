"""What the rounds of one answer look like: alone and in a batch, under penalties, in a cascade."""

import pytest

from jspec.drafters import DrafterOptions
from jspec.generation.generator import Generator
from jspec.generation.request import Request, SamplingParams
from tests.cases import slow_unless
from tests.generation.test_generator_auto import cascade
from tests.tiny_models import draft, shared_generator, target

PROMPTS = ["one two one two one", "abcabcabc", "z", "the cat and the dog and the cow"]


@pytest.mark.parametrize("temperature", [slow_unless(False, 0.0), 0.9])
def test_rounds_do_not_depend_on_the_batch(temperature):
    """Guards against a model that catches up on what its neighbours were fed.

    The costs make a row lag for a while, so that it has something to catch up on; the number of
    drafts depends on how much that is.
    """
    requests = [
        Request(prompt, SamplingParams(seed=seed, max_new_tokens=40, temperature=temperature))
        for seed, prompt in enumerate(PROMPTS)
    ]
    alone, together = (cascade(number).generate(requests) for number in (1, 4))
    assert [a.stats.rounds for a in together] == [a.stats.rounds for a in alone]
    proposers = {a_round.drafter for answer in alone for a_round in answer.stats.rounds}
    assert proposers >= {"prompt_lookup", "model"}


def test_a_draft_equal_to_its_target_is_always_accepted_under_penalties():
    """Guards against processors that have not seen the last token when the first draft is drawn."""
    strong = {"repetition_penalty": 3.0, "presence_penalty": 2.0, "frequency_penalty": 2.0}
    requests = [
        Request(list(b"what is said"), SamplingParams(seed=seed, temperature=1.0, **strong))
        for seed in range(4)
    ]
    for answer in shared_generator("self").generate(requests):
        assert answer.stats.num_proposed > 20
        assert answer.stats.acceptance_rate == 1


def test_log_probabilities_end_with_the_tokens():
    """Guards against those of a round's tokens after a stop string."""
    prompt = list(b"abcabcabc")
    generator = shared_generator("self")
    answer = generator.generate(Request(prompt, SamplingParams(max_new_tokens=30)))
    for begin in range(8, 16):  # some end inside a round
        stop = answer.text[begin : begin + 2]
        settings = SamplingParams(max_new_tokens=30, stop=(stop,), logprobs=True)
        result = generator.generate(Request(prompt, settings))
        assert result.finish_reason == "stop"
        assert len(result.logprobs) == len(result.raw_logprobs) == len(result.token_ids)


def test_an_unsure_member_lets_the_next_one_speak():
    """Guards against a model that has no draft, but takes its turn as if it had one."""
    options = DrafterOptions(draft_confidence=0.5)
    generator = Generator(
        target(), draft(), drafter="model+prompt_lookup", num_draft_tokens=4,
        drafter_options=options,
    )  # fmt: skip
    stats = generator.generate(
        Request("one two one two one", SamplingParams(max_new_tokens=80))
    ).stats
    by_drafter = stats.to_json()["by_drafter"]
    assert by_drafter["prompt_lookup"]["num_accepted"] > 0
    assert by_drafter["model"]["num_accepted"] > 0
