"""Acceptance and speed by category of prompt, and against how much a text repeats itself.

    python -m jspec.experiment --config=configs/categories.py --workdir=runs/categories
    python -m jspec.report runs/categories

Lines of the prompts file have a `category`; `--config.prompts_file=FILE` takes another,
`--config.per_category=5` the first five prompts of each category.

Measured on two cores of an AMD EPYC (2026-11-22, SmolLM2, 65 prompts of Spec-Bench's categories, 32
tokens), times plain decoding's speed at temperature 0 / 1: prompt_lookup:3 1.11 / 0.98,
prompt_lookup:auto 1.18 / 1.04, ngram:3 1.10 / 0.98, eagle:1 1.12 / 0.98, prompt_lookup+eagle:2
1.18 / 0.97, prompt_lookup+eagle:3 1.10 / 0.83. With a target other than smollm2-135m-instruct the
methods with eagle need `options.draft_head`.
"""

from ml_collections import ConfigDict

from jspec.lab.experiments.config import defaults, methods, ordered


def get_config() -> ConfigDict:
    """Returns the config."""
    config = defaults()
    config.title = "Categories of prompts"
    config.methods = methods(
        "prompt_lookup:3",
        "prompt_lookup:auto",
        "ngram:3",
        "eagle:1",
        "prompt_lookup+eagle:2",
        "prompt_lookup+eagle:3",
    )
    config.settings = ordered({"T=0": {"temperature": 0.0}, "T=1": {"temperature": 1.0}})
    return config
