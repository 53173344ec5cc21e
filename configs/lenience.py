"""Acceptance against lenience, and how far the law then is from the target's.

    python -m jspec.experiment --config=configs/lenience.py --workdir=runs/lenience
    python scripts/summarize.py runs/lenience

In kind of Table 5 of arXiv 2211.17192: lenience 1 (none), 0.5, 0.3 and 0.1, at temperature 1, for
drafts that are drawn from a law. The total variation is exact, summed over the vocabulary at every
token of the target's own answers. The drafts are the target itself with rounded weights, its first
layers, and a table of bigrams counted on other answers of it.

Drafts kept / total variation, measured on 611 tokens (2026-11-22, SmolLM2, 13 prompts of
Spec-Bench):

    lenience             1              0.5            0.3            0.1
    model int8           0.96 / 0       1.00 / 0.036   1.00 / 0.036   1.00 / 0.036
    model int4           0.66 / 0       0.79 / 0.133   0.86 / 0.197   0.94 / 0.280
    layer_skip:20 layers 0.17 / 0       0.23 / 0.063   0.27 / 0.101   0.35 / 0.181
    bigram               0.13 / 0       0.17 / 0.035   0.19 / 0.060   0.25 / 0.122
"""

from ml_collections import ConfigDict

from jspec.experiments.config import defaults, ordered, way

_TARGET = "smollm2-135m-instruct"
_LAYERS = {"draft_layers": tuple(range(20))}


def get_config() -> ConfigDict:
    """Returns the config."""
    config = defaults()
    config.kind = "estimate"
    config.title = "Lenience"
    config.target = _TARGET
    ways = {
        f"model {kind}": way("model", draft=_TARGET, draft_quantization=kind)
        for kind in ("int8", "int4")
    }
    ways["layer_skip:20 layers"] = way("layer_skip", options=_LAYERS)
    ways["bigram"] = way("bigram")
    config.ways = ordered(ways)
    config.settings = ordered({"T=1": {"temperature": 1.0}})
    config.estimate.leniences = (1.0, 0.5, 0.3, 0.1)
    return config
