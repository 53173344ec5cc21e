"""Speed against the number of draft tokens, and with the number that adapts.

    python -m jspec.experiment --config=configs/sweep_num_draft_tokens.py --workdir=runs/sweep
    python -m jspec.report runs/sweep

The report has the measured speed-ups with the line of Theorem 3.8 (arXiv 2211.17192) over them, and
what a verify call costs by its width.

Measured on two cores of an AMD EPYC (2026-11-22, SmolLM2, the first two prompts of each of
Spec-Bench's 13 categories, 64 tokens, three repeats), times plain decoding's speed with 1, 2, 3, 4,
5, 7 and 10 drafts: 1.15, 1.14, 1.10, 1.10, 1.07, 1.03, 0.90; auto 1.17. The speed
predicted from one half of the prompts by position is at most 7 % off for the other half.
"""

from ml_collections import ConfigDict

from jspec.lab.experiments.config import defaults, methods

_NUMBERS = (1, 2, 3, 4, 5, 7, 10)


def get_config() -> ConfigDict:
    """Returns the config."""
    config = defaults()
    config.title = "Speed against the number of draft tokens"
    config.methods = methods(*(f"prompt_lookup:{number}" for number in (*_NUMBERS, "auto")))
    config.per_category = 1
    config.repeats = 3
    config.measure_costs = True
    return config
