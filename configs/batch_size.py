"""Latency against throughput as the batch grows: where speculation stops paying.

    python -m jspec.experiment --config=configs/batch_size.py --workdir=runs/batch_size
    python scripts/summarize.py runs/batch_size

The number of prompts is a multiple of all batch sizes, so that every batch is full at its start.
Costs of `auto` are measured for each batch size.

Measured on two cores of an AMD EPYC (2026-11-22, SmolLM2, 8 prompts of Spec-Bench, one of them
long, 32 tokens): plain decoding gives 28, 40, 46 and 31 tokens a second for batches of 1, 2, 4 and
8, whole answers with their prompts; prompt_lookup:3 is 0.99, 0.98, 0.84 and 0.95 times as fast.
"""

from ml_collections import ConfigDict

from jspec.experiments.config import defaults, ordered, way


def get_config() -> ConfigDict:
    """Returns the config."""
    config = defaults()
    config.title = "Batch size"
    config.ways = ordered(
        {
            "plain": way("none"),
            "prompt_lookup:1": way("prompt_lookup", 1),
            "prompt_lookup:3": way("prompt_lookup", 3),
            "prompt_lookup:auto": way("prompt_lookup", "auto"),
        }
    )
    config.batch_sizes = (1, 2, 4, 8)
    config.num_prompts = 8
    config.repeats = 3
    return config
