"""The length of answer below which speculation does not pay.

    python -m jspec.experiment --config=configs/break_even.py --workdir=runs/break_even
    python -m jspec.report runs/break_even

The same greedy answers, cut after 8 to 256 tokens. The time of the whole answer counts: its prefill
costs all methods the same, and the text has less to repeat at its beginning.

Measured on two cores of an AMD EPYC (2026-11-23, SmolLM2, 8 prompts of Spec-Bench, two repeats),
whole answers of 8, 16, 32, 64, 128 and 256 tokens, times plain decoding's speed: prompt_lookup:3
0.97, 0.97, 0.99, 0.95, 1.09, 1.34; prompt_lookup:auto 0.94, 1.03, 1.02, 1.03, 1.13, 1.44. It
clearly pays from 128 on.
"""

from ml_collections import ConfigDict

from jspec.lab.experiments.config import defaults, methods, ordered

_LENGTHS = (8, 16, 32, 64, 128, 256)


def get_config() -> ConfigDict:
    """Returns the config."""
    config = defaults()
    config.title = "Break-even length of an answer"
    config.methods = methods("prompt_lookup:3", "prompt_lookup:auto")
    config.settings = ordered(
        {f"{length} tokens": {"max_new_tokens": length} for length in _LENGTHS}
    )
    config.repeats = 3
    return config
