"""A config of plain values to an experiment."""

import dataclasses
import json

import pytest

from jspec.common.errors import InputError
from jspec.lab.experiments.spec import Experiment, read_experiment

METHODS = {"plain": {"drafter": "none"}, "lookup": {"drafter": "prompt_lookup"}}
PLAIN = {"methods": METHODS, "settings": {"T=0": {}, "T=1": {"temperature": 1.0}}}

BAD = [
    ("kind", "magic", "among generate, estimate, theory, predict, functions; got 'magic'"),
    ("max_new_token", 3, "no field 'max_new_token'; did you mean 'max_new_tokens'"),
    ("qqq", 3, "no field 'qqq'; expected kind, title"),
    ("title", 3, "expected title to be a text, got 3"),
    ("num_prompts", 1.5, "expected num_prompts to be a whole number, got 1.5"),
    ("repeats", 0, "expected repeats from 1"),
    ("seeds", [], "expected seeds that differ, at least one; got"),
    ("seeds", [1, 1], "expected seeds that differ"),
    ("seeds", [5000000], "expected seeds from 0"),
    ("seeds", 1, "expected seeds to be a list, got 1"),
    ("dtype", "int8", "expected dtype among bfloat16, float32"),
    ("chat", "maybe", "expected chat among auto, yes, no"),
    ("methods", {}, "expected the config to have methods, got none"),
    ("methods", 3, "expected methods to be a group of fields, got 3"),
    ("methods.a/b", {}, "expected labels of methods without '/', got 'a/b'"),
    ("methods.a.drafter", "magic", "methods.a: expected a drafter among none"),
    ("methods.a.drafter", "model", "methods.a: the drafter 'model' expects a draft"),
    ("methods.a", {"drafter": "none", "draft": "x"}, "drafter among model, hierarchical; got"),
    ("methods.a", {"drafter": "ngram", "draft_quantization": "int8"}, "expected a draft model"),
    ("methods.a", {"drafter": "ngram", "num_draft_tokens": 0}, "num_draft_tokens from 1"),
    ("methods.a", {"drafter": "ngram", "num_draft_tokens": "many"}, "or 'auto', got 'many'"),
    ("methods.a.options.ngram_window", 1, "methods.a.options: expected ngram_window from 2"),
    ("methods.a.acceptance", "magic", "methods.a: expected an acceptance rule among"),
    ("methods.a.lenience", 2, "methods.a: expected a lenience from 0 to 1; got 2"),
    ("methods.a", {"drafter": "ngram", "lenience": 0.5}, "methods.a: expected lenience with a"),
    ("methods.a", {"acceptance": "lenient", "lenience": 0.1}, "with 'none' and 'lenient'"),
    ("methods.a.num_draft_tokens", 5, "methods.a: expected num_draft_tokens with a drafter"),
    ("settings.a.draft_temperature", 1, "settings.a: expected draft_temperature with"),
    ("methods.a.acceptance", "greedy", "methods.a: the acceptance rule 'greedy' expects"),
    ("settings", {}, "expected the config to have settings, got none"),
    ("settings.a.seed", 1, "no field 'settings.a.seed'"),
    ("settings.a.temperature", -1, "settings.a: expected a finite temperature"),
    ("max_new_tokens", 0, "max_new_tokens of at least 1, got 0"),
    ("estimate.leniences", [2.0], "estimate: expected leniences from 0 to 1, got 2.0"),
    ("estimate.bins", 2, "no field 'estimate.bins'; did you mean 'num_bins'"),
    ("kind", "predict", "expected the config to have predict, got none"),
    ("predict.a.bandwidth", "fast", "predict.a.bandwidth to be a number or None, got"),
    ("predict.a.bandwidth", 0, "predict.a: expected bandwidth above 0, and finite, got"),
    ("predict.a", {"target_bytes_per_weight": 1, "target_quantization": "int8"}, "got both"),
    ("predict.a.alphas", [0.5, 1.5], "predict.a: expected alphas from 0 to 1, got 1.5"),
    ("predict.a.draft_quantization", "int3", "predict.a: expected draft_quantization among none"),
    ("methods.a", {"drafter": "ngram", "num_draft_tokens": True}, "methods.a.num_draft_tokens"),
    ("methods.a.options.draft_layers", 3, "draft_layers to be a list or None, got 3"),
    ("settings.a.logprobs", 1, "settings.a.logprobs to be True or False, got 1"),
    ("settings.a.logit_bias", {"x": 1}, "settings.a.logit_bias to be numbers by token"),
    ("functions.a.chain", "text", "functions.a: expected chain among digits, metropolis, langevin"),
    ("functions.a.guess", "coin", "functions.a: expected guess among small, table; got 'coin'"),
    ("functions.a.acceptance", "block", "expected acceptance among rejection, coupled"),
    ("functions.a.num_drafts", [], "expected num_drafts to have some"),
    ("functions.a.num_drafts", [0], "expected num_drafts from 1"),
    ("functions.a.num_steps", 65, "expected num_steps from 1 to 64, got 65"),
    ("settings.a.logit_bias", [[1.5, 2]], "settings.a.logit_bias to be numbers by token"),
]  # fmt: skip


def config_of(path, value):
    """Returns a config of one field, "FIELD" or "GROUP.FIELD"."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize(("path", "value", "message"), BAD)
def test_what_is_wrong_is_named(path, value, message):
    """Guards against a field that is silently ignored, and hours of a run before a traceback."""
    with pytest.raises(InputError) as caught:
        read_experiment(PLAIN | config_of(path, value))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


ESTIMATE = {"kind": "estimate", "methods": {"a": {"drafter": "ngram"}}, "settings": {"T=0": {}}}
UNREAD = [
    ("turns", 0, "expected turns to be 1 with kind 'estimate', which does not read it; got 0"),
    ("repeats", 2, "expected repeats to be 1 with kind 'estimate'"),
    ("batch_sizes", [1, 4], "expected batch_sizes to be [1] with kind 'estimate', which"),
    ("methods.a", {"drafter": "ngram", "num_draft_tokens": 5}, "num_draft_tokens to be 'auto'"),
    ("methods.a", {"drafter": "ngram", "acceptance": "block"}, "methods.a.acceptance to be '"),
    ("methods.a.drafter", "none", "expected methods.a.drafter to draft with kind 'estimate'"),
    ("methods.a.drafter", "ngram+eagle", "expected methods.a.drafter without a trained head"),
    ("methods.a.drafter", "ngram+recycle", "expected methods.a.drafter to learn from the text"),
    ("settings.a.presence_penalty", 1, "expected settings.a to have temperature and"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "message"), UNREAD)
def test_what_an_estimate_does_not_read_is_refused(path, value, message):
    """Guards against a rule, or a number of drafts, that changes nothing and is not missed."""
    assert read_experiment(ESTIMATE).kind == "estimate"
    with pytest.raises(InputError) as caught:
        read_experiment(ESTIMATE | config_of(path, value))
    assert message in str(caught.value)


def test_defaults_and_settings():
    """Guards against settings that ignore max_new_tokens, the config's or theirs."""
    settings = {"short": {"max_new_tokens": 8, "stop": ["x"]}, "T=1": {"temperature": 1}}
    experiment = read_experiment(PLAIN | {"max_new_tokens": 32, "settings": settings})
    assert experiment.settings["short"].max_new_tokens == 8
    assert experiment.settings["short"].stop == ("x",)
    assert experiment.settings["T=1"].max_new_tokens == 32
    assert experiment.methods["lookup"].num_draft_tokens == "auto"
    assert experiment.seeds == (0,)


@pytest.mark.parametrize("bias", [{"5": 1}, [[5, 1]], {}, []])
def test_token_ids_are_numbers_again(bias):
    """Guards against JSON's keys, which are texts; pairs are what `SamplingParams` has."""
    experiment = read_experiment(PLAIN | {"settings": {"a": {"logit_bias": bias}}})
    assert experiment.settings["a"].logit_bias == (((5, 1.0),) if bias else ())


def test_every_field_of_an_experiment_can_be_said():
    """Guards against a field whose type cannot be read back from JSON."""
    plain = json.loads(json.dumps(dataclasses.asdict(Experiment()))) | PLAIN
    again = read_experiment(plain)
    assert again == read_experiment(PLAIN)
