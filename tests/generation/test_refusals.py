"""Requests, settings and options that are refused, in one line and before any work.

What flags can spell is refused by the same checks: see tests/test_bad_input.py.
"""

import dataclasses

import pytest

from jspec.common.errors import InputError
from jspec.drafters import DrafterOptions
from jspec.generation.costs import RoundCosts
from jspec.generation.generator import Generator
from jspec.generation.request import Request, SamplingParams
from jspec.sampling.settings import PROCESSORS
from tests.tiny_models import make_generator, shared_generator, target

_COSTS = RoundCosts((512,), (0, 1, 3, 7), ("model",), (((1.0, 1.1, 1.2, 1.3),),), ((0.0,),))
_OTHER_COSTS = RoundCosts((512,), (0, 1), ("prompt_lookup",), (((1, 2),),))
_NOT_A_FLOAT = "to be a number that a float can hold"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": 1e39}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"draft_top_k": -1}, "expected draft_top_k of at least 0, got -1"),
        ({"draft_top_p": 1.5}, r"expected draft_top_p in \[0, 1\], got 1.5"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty above 0"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty above 0"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"seed": -(2**63) - 1}, "seed of 64 bits"),
        ({"stop_token_ids": (-1,)}, "stop token ids"),
        ({"stop_token_ids": (2**31,)}, "stop token ids"),
        ({"max_new_tokens": 4.5}, "max_new_tokens to be a whole number, got 4.5"),
        ({"draft_top_k": 1.5}, "expected draft_top_k to be a whole number, got 1.5"),
        ({"temperature": "1"}, "temperature to be a number, got '1'"),
        ({"draft_temperature": "hot"}, "draft_temperature to be a number, got 'hot'"),
        ({"top_p": None}, "top_p to be a number, got None"),
        ({"temperature": 10**400}, _NOT_A_FLOAT),
        ({"stop": (5,)}, r"stop as a tuple of texts, got \(5,\)"),
        ({"stop": "end"}, "stop as a tuple of texts, got 'end'"),
        ({"stop_token_ids": 5}, "stop_token_ids as a tuple of whole numbers, got 5"),
        ({"stop_token_ids": None}, "stop_token_ids as a tuple of whole numbers, got None"),
        ({"forbidden_token_ids": ("a",)}, "forbidden_token_ids to be a whole number, got 'a'"),
        ({"logit_bias": 5}, r"logit_bias as \(token id, number\) pairs, got 5"),
        ({"logit_bias": {1: "a"}}, "a value of logit_bias to be a number, got 'a'"),
        ({"logit_bias": {1: 10**400}}, _NOT_A_FLOAT),
        ({"logit_bias": {1: 1e39}}, "finite numbers in logit_bias"),
        ({"num_beams": 0}, "expected num_beams of at least 1, got 0"),
        ({"num_beams": 2, "temperature": 0.5}, "expected num_beams 1 with temperature 0.5, got 2"),
        ({"num_beams": 2, "stop": ("a",)}, r"expected num_beams 1 with stop \('a',\), got 2"),
        ({"early_stopping": True}, "num_beams of at least 2 with early_stopping True, got 1"),
        ({"num_beams": 2, "early_stopping": "no"}, "early_stopping False, True or 'never', got no"),
        ({"num_beams": 2, "length_penalty": float("nan")}, "a finite length_penalty, got nan"),
        ({"pattern": "a", "min_new_tokens": 1}, "no min_new_tokens with a pattern"),
        ({"pattern": "a", "allowed_token_ids": (1,)}, "no allowed_token_ids with a pattern"),
        ({"pattern": 3}, "pattern as a text"),
    ],
)
def test_settings(settings, message):
    """Guards against values that would be clamped, wrapped round or give NaN."""
    with pytest.raises(InputError, match=message):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ("", {}, "empty text"),
        ([], {}, "at least one token, got none"),
        ([1, 128], {}, "ids from 0 to 127, got some from 1 to 128"),
        ([-1], {}, "ids from 0 to 127"),
        ("é", {}, "beyond the vocabulary"),
        ("\udcff", {}, "not valid UTF-8"),
        ("a", {"stop_token_ids": tuple(range(1, 10))}, "at most 8 stop token ids"),
        ("a", {"allowed_token_ids": (500,)}, "allowed_token_ids from 0 to 127"),
        ("a", {"forbidden_token_ids": tuple(range(128))}, "every one forbidden"),
        ("a", {"allowed_token_ids": (0,), "min_new_tokens": 1}, "besides those that end"),
        ("a", {"pattern": "("}, "expected a regular expression"),
    ],
)
def test_requests(prompt, settings, message):
    """Guards against tracebacks, silent clamps, and a batch that fails half way."""
    generator, request = shared_generator("none"), Request(prompt, SamplingParams(**settings))
    with pytest.raises(InputError, match=message) as error:
        generator.generate(request)
    assert "\n" not in str(error.value)
    if "pattern" not in settings:  # which is read once the rows are made
        with pytest.raises(InputError, match=f"^prompt 1: .*{message}"):
            next(generator.run([Request("good"), request]))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ({"prompt": "a"}, "list of them, got dict"),
        ({"a"}, "list of them, got set"),
        (b"abc", "list of them, got bytes"),
        ([{"role": "user", "content": "a"}], "a Request, got dict .of chat messages give the user"),
        ([1, 2, 3], r"a Request, got 1 \(one prompt of token ids is a list in a list, \[\[1, 2"),
        ([["a"]], "token id to be a whole number, got 'a'"),
        (5, "each prompt as a text, a list of token ids or a Request, got 5"),
        (["a", None], "each prompt as a text, a list of token ids or a Request, got None"),
    ],
    ids=str,
)
def test_prompts_of_another_type(prompts, message):
    """Guards against an answer to a key or a byte, and against "a token id, got 'role'"."""
    with pytest.raises(InputError, match=message):
        shared_generator("none").generate(prompts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_draft_tokens": True}, "num_draft_tokens to be a whole number or 'auto', got"),
        ({"num_draft_tokens": None}, "num_draft_tokens to be a whole number or 'auto', got"),
        ({"batch_size": 1.5}, "batch_size to be a whole number, got 1.5"),
        ({"max_seq_len": "9"}, "max_seq_len to be a whole number, got '9'"),
        ({"max_seq_len": 1}, "max_seq_len"),
        ({"rounds_per_visit": 33}, "rounds_per_visit"),
        ({"drafter": ["model"]}, r"drafter to be a text or a DrafterEntry, got \['model'\]"),
        (
            {"acceptance": ["block"]},
            r"acceptance to be a text or a AcceptanceRule, got \['block'\]",
        ),
        ({"processors": ("x",)}, "expected each of processors to be a Processor, got 'x'"),
        ({"processors": max}, "expected processors as a list, such as .mine., got <built-in"),
        ({"processors": PROCESSORS[0]}, "processors as a list, such as .mine., got Processor"),
        ({"drafter_options": {}}, "expected drafter_options to be a DrafterOptions, got {}"),
        ({"rule_options": {}}, "expected rule_options to be a RuleOptions, got {}"),
        ({"costs": _COSTS, "num_draft_tokens": "auto"}, "costs of rounds with .0, 1, 3, 7. drafts"),
        ({"costs": _OTHER_COSTS, "num_draft_tokens": "auto"}, "costs of rounds with .0, 1, 3, 7."),
        ({"costs": _OTHER_COSTS, "num_draft_tokens": 4}, "num_draft_tokens='auto' and a drafter"),
        ({"drafter": "none", "costs": _OTHER_COSTS}, "num_draft_tokens='auto' and a drafter"),
        ({"drafter": "suffix", "draft_memory": -1}, "draft_memory from 0 to 4096, got -1"),
        ({"drafter": "suffix", "draft_memory": "all"}, "expected draft_memory"),
        (
            {"drafter": "suffix", "draft_memory": 3, "acceptance": "lenient", "lenience": 0.5},
            "got 'lenient'",
        ),
        ({"draft_memory": 3}, r"draft_memory with a drafter that reads it \(suffix"),
    ],
)
def test_options(options, message):
    """Guards against values that are ignored, or fail far from their cause."""
    with pytest.raises(InputError, match=message):
        Generator(target(), **{"drafter": "prompt_lookup"} | options)


def test_costs_without_reading():
    """Guards against a draft model that is taken to read its prompt in no time."""
    without = dataclasses.replace(_COSTS, reading=())
    with pytest.raises(InputError, match="expected costs with the seconds of reading a token"):
        make_generator("model", num_draft_tokens="auto", costs=without)
    lookup = dataclasses.replace(without, drafters=("prompt_lookup",))
    make_generator("prompt_lookup", num_draft_tokens="auto", costs=lookup)


def test_drawn_trees_have_a_fixed_number():
    """Nothing says which of their nodes are worth it."""
    tree = DrafterOptions(tree_depth=2, tree_branches=2, tree_draws="with")  # 4 drafts at most
    message = "^expected num_draft_tokens as a number with tree_draws=with, got 'auto'$"
    with pytest.raises(InputError, match=message):
        make_generator("model", num_draft_tokens="auto", drafter_options=tree)


def test_options_have_the_names_of_their_flags(monkeypatch):
    """`Generator.load(draft_layers=1)` is `--draft_layers=1`; a wrong one loads no model."""
    loaded = []
    monkeypatch.setattr(
        "jspec.generation.generator.load_model", lambda name, **_: loaded.append(name) or target()
    )
    generator = Generator.load("tiny", drafter="layer_skip", draft_layers=1)
    assert generator.describe()["drafter_options"]["draft_layers"] == (0,)
    rule = Generator.load("tiny", drafter="prompt_lookup", acceptance="lenient", lenience=0.25)
    assert rule.describe()["rule_options"]["lenience"] == 0.25
    loaded.clear()
    for options, message in (
        ({"drafter": "modle"}, "expected a drafter among"),
        ({"drafter": "auto"}, r"num_draft_tokens='auto' \(--num_draft_tokens=auto\) chooses their"),
        ({"drafter": "layer_skip", "draft_layers": "x"}, "draft_layers as a number or a list"),
        ({"drafer": "model"}, "unknown option 'drafer': did you mean 'drafter'"),
        ({"draft_layer": 2}, "unknown option 'draft_layer': did you mean 'draft_layers'"),
        ({"rule_options": {}}, "expected rule_options to be a RuleOptions, got {}"),
    ):
        with pytest.raises(InputError, match=message):
            Generator.load("tiny", **options)
    assert loaded == []


def test_the_greedy_rule_is_for_temperature_zero():
    """Guards against a rule that is not lossless for what it is asked."""
    generator = make_generator("none", acceptance="greedy")
    with pytest.raises(InputError, match=r"'greedy' expects temperature 0, got 0.5"):
        generator.generate("a", SamplingParams(temperature=0.5))
