"""Acceptance against lenience, and how far the distribution then is from the target's.

    python -m jspec.experiment --config=configs/lenience.py --workdir=runs/lenience
    python -m jspec.report runs/lenience

Like Table 5 of arXiv 2211.17192: lenience 1 (none), 0.5, 0.3 and 0.1, at temperature 1, for
drafts that are drawn from a distribution. The total variation is exact, summed over the vocabulary
at every token of the target's own answers. The drafts are the target itself with rounded weights,
its first layers, and a table of bigrams counted on other answers of it.

Drafts accepted / total variation, measured on the answers of SmolLM2 to 26 prompts of Spec-Bench
(2026-11-23):

    lenience             1              0.5            0.3            0.1
    model int8           0.96 / 0       1.00 / 0.036   1.00 / 0.036   1.00 / 0.036
    model int4           0.67 / 0       0.81 / 0.137   0.87 / 0.202   0.95 / 0.281
    layer_skip:20 layers 0.16 / 0       0.22 / 0.062   0.26 / 0.103   0.35 / 0.189
    bigram               0.13 / 0       0.16 / 0.037   0.19 / 0.065   0.26 / 0.128
"""

from ml_collections import ConfigDict

from jspec.lab.experiments.config import defaults, method, ordered

_TARGET = "smollm2-135m-instruct"
_LAYERS = {"draft_layers": tuple(range(20))}


def get_config() -> ConfigDict:
    """Returns the config."""
    config = defaults()
    config.kind = "estimate"
    config.title = "Lenience"
    config.target = _TARGET
    methods = {
        f"model {kind}": method("model", draft=_TARGET, draft_quantization=kind)
        for kind in ("int8", "int4")
    }
    methods["layer_skip:20 layers"] = method("layer_skip", options=_LAYERS)
    methods["bigram"] = method("bigram")
    config.methods = ordered(methods)
    config.settings = ordered({"T=1": {"temperature": 1.0}})
    config.estimate.leniences = (1.0, 0.5, 0.3, 0.1)
    return config
