"""Spec-Bench: drafters on its tasks, all turns of its conversations (arXiv 2401.07851).

    python -m jspec.experiment --config=configs/spec_bench.py --workdir=runs/spec_bench \\
      --config.prompts_file=question.jsonl
    python -m jspec.report runs/spec_bench

`question.jsonl` is data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench. Without it the
13 prompts of configs/prompts.jsonl are answered, which are of the same kinds. Spec-Bench itself
lets answers have 1024 tokens: `--config.max_new_tokens=1024`; the first two prompts of each
category: `--config.per_category=2`.

Measured on two cores of an AMD EPYC (2026-11-23, SmolLM2, the first prompt of each of Spec-Bench's
13 categories, 64 tokens a turn, three repeats): times plain decoding's speed prompt_lookup:3 1.23
[1.08, 1.46], prompt_lookup:7 1.20 [1.001, 1.50], prompt_lookup:auto 1.36 [1.13, 1.65], ngram:3 1.25
[1.07, 1.47].
"""

from ml_collections import ConfigDict

from jspec.lab.experiments.config import defaults, methods


def get_config() -> ConfigDict:
    """Returns the config."""
    config = defaults()
    config.title = "Spec-Bench"
    config.methods = methods("prompt_lookup:3", "prompt_lookup:7", "prompt_lookup:auto", "ngram:3")
    config.turns = 0
    return config
