"""A look at everything in under a minute: three ways, two temperatures, four short answers.

python -m jspec.experiment --config=configs/smoke.py --workdir=runs/smoke
python scripts/summarize.py runs/smoke

Expected on two CPU cores: not measured yet.
"""

from ml_collections import ConfigDict

from jspec.experiments.config import defaults, ordered, way


def get_config() -> ConfigDict:
    """Returns the config."""
    config = defaults()
    config.title = "Smoke test: prompt lookup and n-grams beside plain decoding"
    config.ways = ordered(
        {
            "plain": way("none"),
            "prompt_lookup:3": way("prompt_lookup", 3),
            "ngram:3": way("ngram", 3),
        }
    )
    config.settings = ordered({"T=0": {"temperature": 0.0}, "T=1": {"temperature": 1.0}})
    config.num_prompts = 4
    config.max_new_tokens = 16
    return config
