"""What a key that is missing in a config.json means, beside transformers' own classes."""

import dataclasses

import pytest
from transformers import CONFIG_MAPPING

from jspec.models.families.hf_config import from_hf_config

_SIZES = {
    "vocab_size": 61, "hidden_size": 128, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "given"),
    [
        *((name, {}) for name in ("llama", "mistral", "mixtral", "phi3", "olmo2", "granite")),
        *((name, {}) for name in ("qwen2", "qwen3", "gemma2", "gemma3_text", "smollm3")),
        ("qwen3_moe", {}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
        ("mistral", {"sliding_window": None}),
    ],
)
def test_missing_keys_mean_what_they_mean_to_transformers(name, given):
    """Guards against a window, a base or a number of heads that both read otherwise."""
    given = _SIZES | given
    actual = from_hf_config({"model_type": name} | given)
    expected = from_hf_config(CONFIG_MAPPING[name](**given).to_dict() | {"architectures": None})
    ends = {"bos_id": expected.bos_id, "eos_ids": expected.eos_ids}
    assert dataclasses.replace(actual, **ends) == expected
