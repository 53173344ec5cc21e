"""Acceptance and speed by category of prompt, and against how much a text repeats itself.

    python -m jspec.experiment --config=configs/categories.py --workdir=runs/categories
    python scripts/summarize.py runs/categories

Lines of the prompts file have a `category`; `--config.prompts_file=FILE` takes another one,
`--config.per_category=5` the first five prompts of each category.

Expected on two CPU cores: not measured yet.
"""

from ml_collections import ConfigDict

from jspec.experiments.config import defaults, ordered, way


def get_config() -> ConfigDict:
    """Returns the config."""
    config = defaults()
    config.title = "Categories of prompts"
    config.ways = ordered(
        {
            "plain": way("none"),
            "prompt_lookup:1": way("prompt_lookup", 1),
            "prompt_lookup:3": way("prompt_lookup", 3),
            "prompt_lookup:auto": way("prompt_lookup", "auto"),
            "ngram:3": way("ngram", 3),
        }
    )
    config.repeats = 3
    return config
