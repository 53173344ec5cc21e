"""Latency against throughput as the batch grows: where speculation stops paying.

    python -m jspec.experiment --config=configs/batch_size.py --workdir=runs/batch_size
    python -m jspec.report runs/batch_size

The number of prompts is a multiple of all batch sizes, so that every batch is full at its start.
The costs that `auto` chooses by are measured for each batch size.

Measured on two cores of an AMD EPYC (2026-11-23, SmolLM2, 8 prompts of Spec-Bench, one of them
long, 64 tokens, two repeats): plain decoding gives 68, 99, 130 and 131 tokens a second for batches
of 1, 2, 4 and 8, without reading the prompts; with whole answers counted, prompt_lookup:1 gives
1.06, 0.96, 0.97 and 0.95 times as many, prompt_lookup:auto 1.06, 0.99, 0.94 and 0.98: no method
clearly pays.
"""

from ml_collections import ConfigDict

from jspec.lab.experiments.config import defaults, methods


def get_config() -> ConfigDict:
    """Returns the config."""
    config = defaults()
    config.title = "Batch size"
    config.methods = methods("prompt_lookup:1", "prompt_lookup:3", "prompt_lookup:auto")
    config.batch_sizes = (1, 2, 4, 8)
    config.num_prompts = 8
    config.repeats = 3
    return config
