"""What a draft's own temperature, top-k and top-p do to acceptance, at each target temperature.

    python -m jspec.experiment --config=configs/draft_temperature.py --workdir=runs/heat
    python -m jspec.report runs/heat

Section 6 of arXiv 2211.17192 leaves this open. Alpha = E[Σ min(target, draft)] at the tokens of the
target's own answers, which are the same for all drafts at one target temperature. SmolLM2's drafts
are those of itself in int4, and of its first 25 of 30 layers.

Expected, in minutes on two CPU cores: docs/findings.md.
"""

from ml_collections import ConfigDict

from jspec.lab.experiments.config import defaults, method, ordered

_TARGET = "smollm2-135m-instruct"
_TEMPERATURES = 0.0, 0.5, 1.0
_OF_DRAFTS = 0.0, 0.25, 0.5, 0.75, 1.0, 1.5
_FILTERS = {
    "k=1": {"draft_top_k": 1},
    "k=4": {"draft_top_k": 4},
    "k=16": {"draft_top_k": 16},
    "p=0.5": {"draft_top_p": 0.5},
    "p=0.9": {"draft_top_p": 0.9},
}


def get_config() -> ConfigDict:
    """Returns the config."""
    config = defaults()
    config.kind = "estimate"
    config.title = "Acceptance by the draft's own temperature, top-k and top-p"
    config.target = _TARGET
    layers = {"draft_layers": tuple(range(25))}
    config.methods = ordered(
        {
            "model int4": method("model", draft=_TARGET, draft_quantization="int4"),
            "layer_skip:25 layers": method("layer_skip", options=layers),
        }
    )
    settings = {
        f"T={temperature:g}, draft T={draft_value:g}": {
            "temperature": temperature,
            "draft_temperature": draft_value,
        }
        for temperature in _TEMPERATURES
        for draft_value in _OF_DRAFTS
    }
    settings |= {
        f"T={temperature:g}, draft {label}": {"temperature": temperature, **fields}
        for temperature in _TEMPERATURES[1:]
        for label, fields in _FILTERS.items()
    }
    config.settings = ordered(settings)
    config.num_prompts = 5
    config.max_new_tokens = 32
    return config
