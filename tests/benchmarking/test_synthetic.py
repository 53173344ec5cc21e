"""Rounds whose acceptance is drawn: the rate is what was asked for, and it says what it is."""

import json

import pytest

from jspec.benchmarking.synthetic import measure_synthetic, parse_rates
from jspec.drafters import DrafterOptions
from jspec.errors import InputError
from jspec.ways import Way, parse_ways
from tests.tiny_models import draft, target


def measure(ways, rates, texts=("hello", "abcabcabc"), max_new_tokens=120, repeats=2):
    return measure_synthetic(
        target(), draft(), ways, DrafterOptions(), rates, texts, max_new_tokens, repeats
    )


def test_drafts_are_kept_at_the_rate():
    """Tokens a call are those of Eq. 1, whatever the models say; all and none are exact."""
    ways = {"jspec model:3": Way("model", 3)}
    none, some, every = measure(ways, [0.0, 0.7, 1.0])
    assert none.tokens_per_target_call == none.expected_tokens == 1
    assert some.expected_tokens == pytest.approx(1 + 0.7 + 0.7**2 + 0.7**3)
    assert some.tokens_per_target_call == pytest.approx(some.expected_tokens, rel=0.15)
    assert every.expected_tokens == 4
    assert every.tokens_per_target_call > 3.8  # the last round of an answer is cut
    assert every.expected_speedup > some.expected_speedup > none.expected_speedup > 0
    assert json.loads(json.dumps(some.to_json()))["rate"] == 0.7
    assert "each kept with 0.7" in str(some)


def test_bad_input_is_one_line():
    """Rates that are none, and ways without a fixed number of drafts."""
    assert parse_rates(["0", "0.5"]) == [0.0, 0.5]
    for text, message in (("x", "as numbers, got 'x'"), ("1.5", "from 0.0 to 1.0, got 1.5")):
        with pytest.raises(InputError, match=message):
            parse_rates([text])
    with pytest.raises(InputError, match="a drafter that drafts"):
        measure(parse_ways(["none"], "3"), [0.5])
    with pytest.raises(InputError, match="a fixed number of drafts"):
        measure(parse_ways(["prompt_lookup"], "auto"), [0.5])
