"""Rounds whose acceptance is drawn: the rate is what was asked for, and it says what it is."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.common.timing import compile_clock
from jspec.drafters import DrafterOptions
from jspec.generation.prompts import Prompt
from jspec.lab.benchmarking import synthetic
from jspec.lab.benchmarking.measurement import Measurement, Method, parse_methods
from jspec.lab.benchmarking.synthetic import parse_rates
from jspec.speculation.acceptance.synthetic import rate_of, seed_of
from tests.lab.auditing.subjects import models as models_of_one_layer


@pytest.fixture
def measure(monkeypatch):
    """Returns a function that measures the tiny models: all outcomes."""
    models = dict(zip(("target", "draft"), models_of_one_layer(), strict=True))
    monkeypatch.setattr(Measurement, "load", lambda _, role: models[role])
    monkeypatch.setattr(synthetic, "choose_prompts", lambda asked: (asked.prompts, None))

    def run(methods, rates, texts=("hello", "abcabcabc"), max_new_tokens=120, repeats=2):
        asked = Measurement(
            synthetic_acceptance=rates, methods=methods, options=DrafterOptions(),
            prompts=[Prompt(text) for text in texts], max_new_tokens=max_new_tokens,
            repeats=repeats,
        )  # fmt: skip
        return list(synthetic.measure_synthetic(asked))

    return run


def test_drafts_are_kept_at_the_rate(measure):
    """Tokens a call are those of Eq. 1, whatever the models say; all and none are exact."""
    methods = {"jspec model:3": Method("model", 3)}
    none, some, every = measure(methods, ["0", "0.7", "1"])[-1].record["lines"]
    assert none["tokens_per_target_call"] == none["expected_tokens"] == 1
    assert some["expected_tokens"] == pytest.approx(1 + 0.7 + 0.7**2 + 0.7**3)
    assert some["tokens_per_target_call"] == pytest.approx(some["expected_tokens"], rel=0.15)
    assert every["expected_tokens"] == 4
    assert every["tokens_per_target_call"] > 3.8  # the last round of an answer is cut
    assert every["expected_speedup"] > some["expected_speedup"] > none["expected_speedup"] > 0
    assert json.loads(json.dumps(some))["rate"] == 0.7


def test_a_seed_holds_a_rate():
    """All and none exactly, as they were asked for; requests of one rate differ."""
    rates = [0.0, 0.3, 0.7, 1.0]
    seeds = [seed_of(rate, 1234) for rate in rates]
    assert max(seeds) < 2**32
    np.testing.assert_allclose(rate_of(jnp.array(seeds, jnp.uint32)), rates, atol=1e-5)
    assert rate_of(jnp.array([seeds[0], seeds[-1]], jnp.uint32)).tolist() == [0, 1]
    assert len({seed_of(0.7, number) for number in range(2**16)}) == 2**16


def test_every_repeat_has_its_lines(measure):
    """Guards against an hour of measuring that is lost because the last repeat was cut off."""
    lines = measure({"jspec model:3": Method("model", 3)}, ["0.5"], ("hello",), 20, repeats=3)
    assert [len(each.record["lines"]) for each in lines] == [1, 1, 1]
    assert all(each.record["lines"][0]["speedup"]["median"] > 0 for each in lines)
    assert "jspec model:3       3       0.5" in lines[-1].text


def test_one_program_serves_all_rates(measure, monkeypatch):
    """Guards against a minute of compiling a rate, as on a GPU: rates are data."""
    monkeypatch.setattr("jspec.lab.benchmarking.synthetic.time_call", lambda *_, **__: 1.0)
    clock, numbers = compile_clock(), []
    for rates in (
        ["0.5"],
        ["0.4", "0.6", "0.8", "0.9"],
    ):  # the first time compiles what all runs share
        for _ in range(2):
            before = clock.num_programs
            measure({"jspec model:3": Method("model", 3)}, rates, ("hello",), 8, repeats=1)
            numbers.append(clock.num_programs - before)
    assert numbers[1] > 0, "each run has programs of its own, or the test would prove nothing"
    assert numbers[1] == numbers[2] == numbers[3]


def test_bad_input_is_one_line(measure):
    """Rates that are none, and ways without a fixed number of drafts."""
    assert parse_rates(["0", "0.5"]) == [0.0, 0.5]
    for text, message in (("x", "as numbers, got 'x'"), ("1.5", "from 0.0 to 1.0, got 1.5")):
        with pytest.raises(InputError, match=message):
            parse_rates([text])
    with pytest.raises(InputError, match="a drafter that drafts"):
        measure(parse_methods(["none"], "3"), ["0.5"])
    with pytest.raises(InputError, match="a fixed number of drafts"):
        measure(parse_methods(["prompt_lookup"], "auto"), ["0.5"])
