"""A config of plain values to an experiment."""

import dataclasses
import json

import pytest

from jspec.errors import InputError
from jspec.experiments.read_spec import read_experiment
from jspec.experiments.spec import Experiment

WAYS = {"plain": {"drafter": "none"}, "lookup": {"drafter": "prompt_lookup"}}
PLAIN = {"ways": WAYS, "settings": {"T=0": {}, "T=1": {"temperature": 1.0}}}

BAD = {
    '{"kind": "magic"}': "expected kind among generate, estimate, theory, predict; got 'magic'",
    '{"max_new_token": 3}': "no field 'max_new_token'; did you mean 'max_new_tokens'",
    '{"qqq": 3}': "no field 'qqq'; expected kind, title",
    '{"title": 3}': "expected title to be a text, got 3",
    '{"num_prompts": 1.5}': "expected num_prompts to be a whole number, got 1.5",
    '{"num_prompts": -1}': "expected num_prompts from 0",
    '{"repeats": 0}': "expected repeats from 1",
    '{"seeds": []}': "expected seeds that differ, at least one; got",
    '{"seeds": [1, 1]}': "expected seeds that differ",
    '{"seeds": [5000000]}': "expected seeds from 0",
    '{"seeds": 1}': "expected seeds to be a list, got 1",
    '{"batch_sizes": ["a"]}': "expected batch_sizes to be a whole number, got 'a'",
    '{"dtype": "int8"}': "expected dtype among bfloat16, float32",
    '{"target_quantization": null}': "expected target_quantization to be a text, got None",
    '{"chat": "maybe"}': "expected chat among auto, yes, no",
    '{"ways": {}}': "expected the config to have ways, got none",
    '{"ways": 3}': "expected ways to be a group of fields, got 3",
    '{"ways": {"a": 3}}': "expected ways.a to be a group of fields, got 3",
    '{"ways": {"a/b": {}}}': "expected labels of ways without '/', got 'a/b'",
    '{"ways": {"a": {"drafter": "magic"}}}': "ways.a: expected a drafter among none",
    '{"ways": {"a": {"draftr": "none"}}}': "no field 'ways.a.draftr'; did you mean 'drafter'",
    '{"ways": {"a": {"drafter": "model"}}}': "ways.a: a drafter among model, hierarchical",
    '{"ways": {"a": {"drafter": "none", "draft": "x"}}}': "ways.a: a drafter among model",
    '{"ways": {"a": {"drafter": "ngram", "draft_quantization": "int8"}}}': "expected a draft model",
    '{"ways": {"a": {"drafter": "ngram", "num_draft_tokens": 0}}}': "num_draft_tokens from 1",
    '{"ways": {"a": {"drafter": "ngram", "num_draft_tokens": "many"}}}': "or 'auto', got 'many'",
    '{"ways": {"a": {"options": {"ngram_windo": 2}}}}': "no field 'ways.a.options.ngram_windo'",
    '{"ways": {"a": {"options": {"ngram_window": 1}}}}': "ways.a: expected ngram_window from 2",
    '{"ways": {"a": {"options": {"draft_confidence": "x"}}}}': "ways.a: ",
    '{"ways": {"a": {"acceptance": "magic"}}}': "ways.a: expected an acceptance rule among",
    '{"ways": {"a": {"lenience": 2}}}': "ways.a: ",
    '{"ways": {"a": {"acceptance": "greedy"}}}': "ways.a: the acceptance rule 'greedy' expects",
    '{"settings": {}}': "expected the config to have settings, got none",
    '{"settings": {"a": {"seed": 1}}}': "no field 'settings.a.seed'",
    '{"settings": {"a": {"temperature": -1}}}': "settings.a: expected a finite temperature",
    '{"settings": {"a": {"temperature": "hot"}}}': "settings.a: ",
    '{"max_new_tokens": 0}': "max_new_tokens of at least 1, got 0",
    '{"table": {"num_tokens": 0}}': "expected table.num_tokens from 1",
    '{"table": {"temperature": "x"}}': "expected table.temperature to be a number, got 'x'",
    '{"estimate": {"leniences": [2.0]}}': "expected estimate.leniences from 0 to 1, got 2.0",
    '{"estimate": {"bins": 2}}': "no field 'estimate.bins'; did you mean 'num_bins'",
    '{"theory": {"tables": ["table9"]}}': "expected theory.tables among table1",
    '{"predict": {"a": {"bandwith": 2}}}': "no field 'predict.a.bandwith'; did you mean",
}  # fmt: skip


@pytest.mark.parametrize("change", BAD)
def test_what_is_wrong_is_named(change):
    """Guards against a field that is silently ignored, and hours of a run before a traceback."""
    with pytest.raises(InputError) as caught:
        read_experiment(PLAIN | json.loads(change))
    assert BAD[change] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_defaults_and_settings():
    """Guards against settings that ignore the config's max_new_tokens, or their own."""
    settings = {"short": {"max_new_tokens": 8, "stop": ["x"]}, "T=1": {"temperature": 1}}
    experiment = read_experiment(PLAIN | {"max_new_tokens": 32, "settings": settings})
    assert experiment.settings["short"].max_new_tokens == 8
    assert experiment.settings["short"].stop == ("x",)
    assert experiment.settings["T=1"].max_new_tokens == 32
    assert experiment.ways["lookup"].num_draft_tokens == 5
    assert experiment.seeds == (0,)


def test_token_ids_are_numbers_again():
    """Guards against JSON's keys, which are texts."""
    settings = {"a": {"logit_bias": {"5": 1.0}}, "b": {"logit_bias": [[5, 1.0]]}}
    experiment = read_experiment(PLAIN | {"settings": settings})
    assert experiment.settings["a"].logit_bias == experiment.settings["b"].logit_bias == ((5, 1.0),)


def test_every_field_of_an_experiment_can_be_said():
    """Guards against a field whose type cannot be read back from JSON."""
    plain = json.loads(json.dumps(dataclasses.asdict(Experiment()))) | PLAIN
    again = read_experiment(plain)
    assert again == read_experiment(PLAIN)
