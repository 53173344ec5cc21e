"""What transformers does beside jspec's methods."""

import dataclasses

import pytest

from jspec.common.errors import InputError
from jspec.lab.benchmarking.baselines import transformers_methods
from jspec.lab.benchmarking.compare import check_vocabularies, plain_of
from jspec.lab.benchmarking.measurement import parse_methods
from tests.tiny_models import make_model, target


@pytest.mark.parametrize(
    ("drafters", "expected"),
    [
        (["none"], {("prompt_lookup", 2)}),
        (["prompt_lookup:3", "prompt_lookup:9"], {("prompt_lookup", 3), ("prompt_lookup", 9)}),
        (["prompt_lookup:auto", "prompt_lookup:5"], {("prompt_lookup", 5)}),
        (["prompt_lookup:auto"], {("prompt_lookup", 2)}),
        (["model", "hierarchical:2"], {("model", 7), ("model", 2)}),
        (["model+prompt_lookup:4", "model:auto"], {("model", 4)}),
    ],
)
def test_numbers_of_drafts_are_those_of_jspecs_methods(drafters, expected):
    """Guards against a comparison of unlike numbers of drafts; plain is always there, first."""
    methods = transformers_methods(parse_methods(drafters, "7"))
    assert next(iter(methods.items())) == ("transformers plain", ("none", 0))
    assert set(methods.values()) == {("none", 0), *expected}
    for name, (drafter, number) in list(methods.items())[1:]:
        assert name == f"transformers {drafter}:{number}"


def test_plain_decoding_is_that_of_the_same_program():
    """Or jspec's, where it was not measured."""
    names = ["jspec plain", "jspec model:2", "transformers plain", "transformers model:2",
             "llama.cpp lookup:2"]  # fmt: skip
    assert list(plain_of(names).values()) == [
        "jspec plain", "jspec plain", "transformers plain", "transformers plain", "jspec plain"
    ]  # fmt: skip


def test_a_draft_of_another_vocabulary_is_refused():
    """transformers would raise in the middle of the run."""
    config = dataclasses.replace(target().config, vocab_size=64)
    with pytest.raises(InputError, match=r"draft of 128 ids .* got 64 \(small\)"):
        check_vocabularies(target(), make_model(config, name="small"))
