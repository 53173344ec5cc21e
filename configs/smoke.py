"""A look at everything in about a minute: three methods, two temperatures, four short answers.

    python -m jspec.experiment --config=configs/smoke.py --workdir=runs/smoke
    python -m jspec.report runs/smoke

Expected of bfloat16 on two cores of an AMD EPYC (2026-11-22): 24 cells in 27 s, start and warm-up
included; only one program had been compiled before. Of the drafts of both drafters 22 % are
accepted at T = 0 and 16 % at T = 1, 1.22 and 1.13 tokens a target call. Four prompts of 16 tokens,
each timed once, say nothing about speed.
"""

from ml_collections import ConfigDict

from jspec.lab.experiments.config import defaults, methods, ordered


def get_config() -> ConfigDict:
    """Returns the config."""
    config = defaults()
    config.title = "Smoke test: prompt lookup and n-grams beside plain decoding"
    config.methods = methods("prompt_lookup:3", "ngram:3")
    config.settings = ordered({"T=0": {"temperature": 0.0}, "T=1": {"temperature": 1.0}})
    config.num_prompts = 4
    config.max_new_tokens = 16
    return config
