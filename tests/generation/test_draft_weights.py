"""A draft's weights on a device where candidates compete, with times that are given."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from gguf import GGMLQuantizationType

from jspec.common.memory import CacheSize
from jspec.generation.draft_weights import with_fast_weights
from jspec.generation.generator import Generator
from jspec.kernels import candidates, contest, trial, verdicts
from jspec.weights.gguf import load_gguf
from jspec.weights.quantize import holds_compact, is_kernel, quantize
from tests.cases import slow_unless
from tests.tiny_models import make_model, save_folder
from tests.weights.toys import GGUF_CONFIG, random_tensors, write_gguf


@pytest.fixture
def times(monkeypatch, tmp_path):
    """Makes candidates compete on a CPU, without any; returns the times that are "measured"."""
    times = {"none": 1.0, "int8": 0.6}
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "cache"))
    for module, name, value in (
        (candidates, "_has_choice", lambda: True),
        (contest, "_MOST_BLOCKS", 2),
        (contest, "_TURNS", 2),
        (contest, "medians", lambda calls: times),
        (trial, "_SLOTS", 128),
        (verdicts, "_VERDICTS", {}),
    ):
        monkeypatch.setattr(module, name, value)
    return times


def rounded_model(quantization):
    """Loads the tiny model again, its weights rounded."""
    model = make_model()
    leaves = dict(flatten_dict(model.params))
    for path in filter(is_kernel, leaves):
        leaves[path] = quantize(leaves[path], path, quantization, "float32")
    return dataclasses.replace(model, params=unflatten_dict(leaves), quantization=quantization)


def never(quantization):
    raise AssertionError("nothing is to be loaded again")


@pytest.mark.parametrize(
    ("seconds", "kind"), [(0.6, "int8"), (0.98, None), slow_unless(False, 1.4, None)]
)
def test_a_draft_is_rounded_where_its_blocks_are_faster(seconds, kind, times):
    """By 3 % at least. It is what `quantization="int8"` makes of it."""
    times["int8"] = seconds
    draft = make_model()
    rounded = with_fast_weights(draft, "rejection", rounded_model)
    assert (rounded.quantization, rounded.is_quantization_chosen) == (kind, kind is not None)
    assert holds_compact(rounded.params) == (kind is not None)
    assert rounded.params.keys() == draft.params.keys()


def test_the_verdict_is_kept(times, tmp_path):
    with_fast_weights(make_model(), "rejection", rounded_model)
    (verdict,) = json.loads((tmp_path / "cache/kernels.json").read_text())["cpu"][
        "verdicts"
    ].values()
    assert verdict["choice"] == "int8"
    assert verdict["seconds"] == {
        "none": {"1": 0.25, "5": 0.25},  # of 2 blocks, 2 turns
        "int8": {"1": 0.15, "5": 0.15},
    }
    verdicts._VERDICTS.clear()
    times.clear()  # another race would fail
    assert with_fast_weights(make_model(), "rejection", rounded_model).quantization == "int8"


def test_it_is_said_and_recorded(times, tmp_path):
    save_folder(tmp_path / "model")
    loaded = Generator.load(str(tmp_path / "model"), str(tmp_path / "model"), dtype="float32")
    described = loaded.describe()
    assert (described["target_quantization"], described["draft_quantization"]) == ("none", "int8")
    assert described["kernels"] == described["draft_kernels"]
    budget = str(loaded.budget(CacheSize(1, 64, 10**6)))
    assert budget.endswith("by measured costs; the draft's weights in int8: faster here")
    asked = Generator.load(
        str(tmp_path / "model"), str(tmp_path / "model"), dtype="float32", draft_quantization="none"
    )
    assert asked.describe()["draft_quantization"] == "none"
    assert str(asked.budget(CacheSize(1, 64, 10**6))).endswith("by measured costs")


def test_a_packed_draft_is_rounded_to_q4_0(tmp_path):
    """As "q4_0" does, without loading it again; by a lossy rule the answers would change."""
    path = tmp_path / "draft.gguf"
    kinds = {"ffn_up": GGMLQuantizationType.Q4_0, "": GGMLQuantizationType.Q8_0}
    write_gguf(path, GGUF_CONFIG, random_tensors(GGUF_CONFIG), kinds=kinds)
    draft, expected = (
        dataclasses.replace(
            make_model(), params=load_gguf(path, "float32", kind)[1], quantization=kind
        )
        for kind in ("packed", "q4_0")
    )
    rounded = with_fast_weights(draft, "rejection", never)
    assert (rounded.quantization, rounded.is_quantization_chosen) == ("q4_0", True)
    assert jax.tree.structure(rounded.params) == jax.tree.structure(expected.params)
    assert jax.tree.structure(rounded.params) != jax.tree.structure(draft.params)
    jax.tree.map(np.testing.assert_array_equal, rounded.params, expected.params)
    assert with_fast_weights(draft, "lenient", never) is draft


@pytest.mark.parametrize(
    ("rule", "quantization", "is_gpu"),
    [("rejection", "int4", True), ("typical", None, True), ("rejection", None, False)],
    ids=["asked for", "lossy", "on a CPU"],
)
def test_a_draft_stays_as_it_is(rule, quantization, is_gpu, request):
    """By a lossy rule the answers depend on the draft."""
    if is_gpu:
        request.getfixturevalue("times")
    draft = dataclasses.replace(make_model(), quantization=quantization)
    assert with_fast_weights(draft, rule, never) is draft
