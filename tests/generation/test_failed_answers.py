"""An answer that fails, alone and beside others; arguments of another type, each in one line."""

import json

import jax.numpy as jnp
import pytest

from jspec.common.errors import InputError
from jspec.generation.generator import Generator
from jspec.generation.request import Request, Settings
from jspec.sampling.processor import Processor
from tests.tiny_models import make_generator, shared_generator, target

UNLUCKY = 13
BROKEN = Processor(  # the logits of one seed are NaN, from some token on
    "broken",
    is_used=lambda settings: True,
    init=lambda settings, **_: jnp.int32(3 if settings.seed == UNLUCKY else 10**6),
    apply=lambda left, logits: jnp.where((left > 0)[:, None], logits, jnp.nan),
    update=lambda left, token: left - 1,
)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("drafter", ["none", "prompt_lookup"])
def test_one_row_of_nan_fails_alone(drafter, temperature):
    """Guards against neighbours' answers that are lost with it."""
    requests = [
        Request("abcabcabc", Settings(max_new_tokens=20, seed=seed, temperature=temperature))
        for seed in (1, UNLUCKY, 2)
    ]
    results = make_generator(drafter, batch_size=3, processors=[BROKEN]).generate(requests)
    whole = shared_generator(drafter).generate(requests)
    for index in (0, 2):
        assert results[index].token_ids == whole[index].token_ids
        assert results[index].error is None
    failed = results[1]
    assert failed.finish_reason == "failed"
    assert failed.error == (
        "expected logits that are numbers; the model gave NaN, or forbade every token, at token 3 "
        "of the answer"
    )
    assert failed.token_ids == whole[1].token_ids[:3]
    json.dumps(failed.to_json(), allow_nan=False)


def test_one_prompt_that_fails_raises():
    """There is nothing else to return."""
    generator = make_generator("none", processors=[BROKEN])
    with pytest.raises(InputError, match="NaN, or forbade every token, at token 3 of the answer"):
        generator.generate(Request("abc", Settings(seed=UNLUCKY)))


HUGE = 10**400


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": HUGE},
        {"top_p": HUGE},
        {"logit_bias": {1: HUGE}},
        {"draft_temperature": HUGE},
    ],
    ids=str,
)
def test_numbers_beyond_floats_are_refused(settings):
    """Guards against an OverflowError."""
    with pytest.raises(InputError, match="to be a number that a float can hold"):
        Settings(**settings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"drafter": ["model"]},
            r"expected drafter to be a text or a DrafterEntry, got \['model'\]",
        ),
        (
            {"acceptance": ["block"]},
            r"expected acceptance to be a text or a AcceptanceRule, got \['block'\]",
        ),
        ({"processors": ("x",)}, "expected each of processors to be a Processor, got 'x'"),
        ({"drafter_options": {}}, "expected drafter_options to be a DrafterOptions, got {}"),
        ({"rule_options": {}}, "expected rule_options to be a RuleOptions, got {}"),
    ],
)
def test_options_of_another_type_are_refused(options, message):
    """Guards against an AttributeError far from its cause."""
    with pytest.raises(InputError, match=message):
        Generator(target(), **options)


@pytest.mark.parametrize("prompts", [{"prompt": "a"}, {"a"}, b"abc"], ids=str)
def test_prompts_of_another_type_are_refused(prompts):
    """Guards against an answer to a key, or to a byte."""
    message = f"list of them, got {type(prompts).__name__}"
    with pytest.raises(InputError, match=message):
        shared_generator("none").generate(prompts)
