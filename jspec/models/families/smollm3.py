"""SmolLM3: a Llama, every fourth layer of which has no rotary embeddings (arXiv 2501.18795)."""

from typing import Any

from jspec.models.config import DecoderConfig
from jspec.models.families.family import BIASES, Family, GgufForm


def _read(raw: dict[str, Any]) -> dict[str, Any]:
    num_layers, interval = raw["num_hidden_layers"], raw.pop("no_rope_layer_interval", 4)
    # 1 in a list of that name means that the layer has rotary embeddings.
    by_default = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    has_rope = raw.pop("no_rope_layers", None) or by_default
    if len(has_rope) != num_layers:
        raise ValueError(f"expected {num_layers} no_rope_layers, got {has_rope}")
    return {"unrotated_layers": tuple(i for i in range(num_layers) if not has_rope[i])}


def _write(config: DecoderConfig) -> dict[str, Any]:
    layers = range(config.num_layers)
    return {"no_rope_layers": [int(layer not in config.unrotated_layers) for layer in layers]}


SMOLLM3 = Family(
    "SmolLM3ForCausalLM",
    "smollm3",
    keys=BIASES,
    gguf=GgufForm("smollm3", is_permuted=True),
    defaults={
        "tie_word_embeddings": True, "rope_theta": 2_000_000.0, "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
    },
    required={"use_sliding_window": (False,)},
    # Without the switch above, the window and its layers say nothing.
    ignored=frozenset({"sliding_window", "max_window_layers", "layer_types", "pretraining_tp"}),
    read=_read,
    write=_write,
)  # fmt: skip
