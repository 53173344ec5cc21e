"""Altered headers of weight files, and altered configs."""

import json

import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.weights.hf import read_config
from tests.cases import slow_unless
from tests.weights import fuzz_configs, fuzz_headers


@pytest.mark.parametrize("num", [100, slow_unless(False, 10_000)])
def test_altered_headers_give_one_line_each(num):
    """Guards against tracebacks, hangs, and memory taken for lengths that a file only claims.

    A few changes leave a file that loads: another epsilon, a name in another case.
    """
    num_refused = fuzz_headers.fuzz(num, seed=1)
    assert 0.75 < num_refused / num < 1


@pytest.mark.parametrize("num", [80, slow_unless(False, 10_000)])
def test_altered_configs_give_one_line_each(num):
    """Guards against tracebacks, Python's own words, and tables of billions of experts.

    Some changes leave a config that loads: of keys that say nothing, or numbers within bounds.
    """
    assert 0.5 < fuzz_configs.fuzz(num, seed=1) / num < 0.94


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_local_experts": 10**400}, "num_experts must be at most 16777216, got 1000"),
        ({"num_local_experts": 10**7}, "a tensor for each of 4 layers and 10000000 experts, found"),
        ({"num_experts_per_tok": 6}, "at least one of the experts, got 6 of 5"),
        ({"num_experts_per_tok": 0}, "at least one of the experts, got 0 of 5"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step to be a finite number above 0, got 0"),
        ({"mlp_only_layers": 1}, "expected mlp_only_layers to be a list, got 1"),
        (
            {"hidden_size": True},
            "expected hidden_size to be a whole number from 1 to 16777216, got True",
        ),
        ({"rope_parameters": [1]}, r"expected rope_parameters to be an object, got \[1\]"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "x"}}, "factor to be .* got 'x'"),
        ({"rope_parameters": fuzz_configs.ROPES[2]}, "short_factor of longrope to be a list, got"),
    ],
)
def test_a_wrong_value_of_a_config_is_named(tmp_path, change, message):
    """Guards against Python's own words, which do not say where the value stands."""
    ((path, raw),) = fuzz_configs.write_folders(tmp_path, ["qwen3 moe"]).items()
    path.write_text(json.dumps(raw | change))
    with pytest.raises(InputError, match=message):
        fuzz_headers.load(path)


def test_a_null_is_as_good_as_a_missing_number(tmp_path):
    """Guards against arithmetic with None: Gemma's scale of scores is 256 where nothing says it."""
    ((path, raw),) = fuzz_configs.write_folders(tmp_path, ["gemma3"]).items()
    raw |= {"query_pre_attn_scalar": None, "_sliding_window_pattern": None}
    path.write_text(json.dumps(raw))
    assert read_config(path.parent).attention_scale == 256**-0.5


def test_a_traceback_would_be_noticed(tmp_path, monkeypatch):
    """The negative control: a reader that fails in its own words is not taken for a refusal."""

    def load(path):
        np.frombuffer(path.read_bytes()[:3], np.uint64)

    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setattr(fuzz_headers, "load", load)
    with pytest.raises(ValueError, match="buffer size"):
        fuzz_headers.refusal(path, 4)
