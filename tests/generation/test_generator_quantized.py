"""Generators and programs with quantised models: the draft's never changes the answer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from jspec.common.errors import InputError
from jspec.generate import list_notes
from jspec.generation.generator import Generator
from jspec.generation.request import Request, SamplingParams
from jspec.lab.auditing.subject import cast
from jspec.weights import load_model
from jspec.weights.quantize import KINDS
from tests.cases import slow_unless
from tests.programs import call_generate, check_refusal
from tests.tiny_models import save_folder, shared_generator, target
from tests.weights.toys import quantize_params

_PROMPTS = [[1 + (7 * i + i * i) % 127 for i in range(n)] for n in (5, 23, 40)]


def _quantized(model, kind="int8"):
    params = quantize_params(model.params, model.config, kind)
    return dataclasses.replace(model, params=params, quantization=kind)


@functools.cache
def _requests():
    return [Request(prompt, SamplingParams(max_new_tokens=30)) for prompt in _PROMPTS]


def _answers(generator):
    return [result.token_ids for result in generator.generate(_requests())]


def test_a_quantised_draft_changes_no_answer():
    """Guards against a quantised draft that reaches the target, or drafts nothing of use."""
    generator = Generator(target(), _quantized(target()), num_draft_tokens=4)
    results = generator.generate(_requests())
    assert [result.token_ids for result in results] == _answers(shared_generator("none"))
    accepted = sum(result.stats.num_accepted for result in results)
    proposed = sum(result.stats.num_proposed for result in results)
    assert 0.5 < accepted / proposed < 1
    described = generator.describe()
    assert (described["target_quantization"], described["draft_quantization"]) == ("none", "int8")


@pytest.mark.slow
def test_a_quantised_target_answers_alike_alone_and_in_batch():
    """Guards against caches of integers, and rows that change their neighbours'. Float32."""
    model = _quantized(target())
    expected = _answers(Generator(model, drafter="none"))
    assert expected != _answers(shared_generator("none"))  # it is another model
    generator = Generator(model, model, drafter="model", num_draft_tokens=4, batch_size=3)
    results = generator.generate(_requests())
    assert [result.token_ids for result in results] == expected
    assert all(result.stats.acceptance_rate == 1 for result in results)
    described = generator.describe()
    assert (described["target_quantization"], described["dtype"]) == ("int8", "float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_folder(tmp_path_factory.mktemp("model") / "tiny", hidden_dim=64)


@pytest.mark.parametrize("kind", [slow_unless(k in ("int8", "q4_0"), k) for k in KINDS])
def test_models_are_quantised_as_they_are_loaded(folder, kind):
    """Guards against an option that is read and forgotten, and an audit that casts integers."""
    model = load_model(str(folder), dtype="float32", quantization=kind)
    assert model.quantization == kind
    expected = quantize_params(load_model(str(folder), dtype="float32").params, model.config, kind)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, model.params, expected))
    params = cast(model, "bfloat16").params
    assert params["embedding"].dtype == params["final_norm"]["scale"].dtype == jnp.bfloat16
    assert kind == "q4_0" or params["embedding"].values.dtype == jnp.int8


def test_options_reach_the_models_they_are_for(folder):
    """Guards against target and draft mixed up, and a draft's option without a draft."""
    loaded = Generator.load(str(folder), str(folder), draft_quantization="int4")
    described = loaded.describe()
    assert (described["target_quantization"], described["draft_quantization"]) == ("none", "int4")
    assert list_notes(loaded) == []  # a quantised draft changes no distribution
    loaded = Generator.load(str(folder), target_quantization="int8", drafter="none")
    said = f"the target is quantised to int8: another model than {folder}"
    assert list_notes(loaded) == [said]
    with pytest.raises(InputError, match="draft_quantization 'int8' expects a draft model"):
        Generator.load(str(folder), draft_quantization="int8")
    with pytest.raises(InputError, match="q4_0, packed, packed_a8; got 'int2'"):
        Generator.load(str(folder), target_quantization="int2")


def test_the_program_says_what_is_unusual(monkeypatch, capsys, folder):
    """Guards against answers taken for the original's, and a base model's for bad ones."""
    flags = [f"--target={folder}", "--prompt=one", "--max_new_tokens=4", "--drafter=none"]
    run = functools.partial(call_generate, monkeypatch, capsys, *flags)
    status, _, errors = run("--target_quantization=int8")
    assert status == 0
    notes = [line for line in errors.splitlines() if line.startswith("note:")]
    assert notes == [
        f"note: the target is quantised to int8: another model than {folder}",
        f"note: {folder} has no chat template: it only continues the prompt",
    ]
    assert "expected --draft=MODEL" in check_refusal(*run("--draft_quantization=int4"))
