"""Measures what filters, processors and log-probabilities cost a decoding round.

`python scripts/measure_sampling.py --drafter=none`

One sampled answer after another, every way of sampling in turn, repeat after repeat; the ratio is
that of one repeat's times, the median over repeats.
"""

import dataclasses

import numpy as np
from absl import flags

from jspec.common import cli
from jspec.common.errors import check_range
from jspec.generation.generator import DEFAULT_TARGET, Generator
from jspec.generation.request import Request, Settings

_TARGET = flags.DEFINE_string("target", DEFAULT_TARGET, "The model.")
_DRAFTER = flags.DEFINE_string("drafter", "none", "The drafter.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "Tokens of an answer.")
_REPEATS = flags.DEFINE_integer("repeats", 7, "How often each way is timed.")

_PROMPT = "Tell me a long story about a dragon and a knight."


def main() -> None:
    """Times every way of sampling and prints the ratios."""
    check_range("repeats", _REPEATS.value, 1, 1000)
    generator = Generator.load(_TARGET.value, drafter=_DRAFTER.value)
    methods = sampling_methods(_MAX_NEW_TOKENS.value)
    for settings in methods.values():
        milliseconds_per_round(generator, settings)
    times = {name: [] for name in methods}
    for seed in range(_REPEATS.value):
        for name, settings in methods.items():
            settings = dataclasses.replace(settings, seed=seed)
            times[name].append(milliseconds_per_round(generator, settings))
    first = np.array(next(iter(times.values())))
    for name, values in times.items():
        ratio = np.median(np.array(values) / first)
        print(f"{name}: {np.median(values):.2f} ms a round, {ratio:.3f} times the first")


def sampling_methods(max_new_tokens: int) -> dict[str, Settings]:
    """Returns settings by what they switch on."""
    plain = Settings(max_new_tokens=max_new_tokens, temperature=0.8)
    filters = dataclasses.replace(plain, top_k=50, top_p=0.95, min_p=0.02)
    penalties = {
        "repetition_penalty": 1.05,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "logit_bias": {5: 0.5},
        "forbidden_token_ids": (7,),
        "min_new_tokens": max_new_tokens,
    }
    return {
        "temperature alone": plain,
        "filters": filters,
        "processors": dataclasses.replace(plain, **penalties),
        "all, with log-probabilities": dataclasses.replace(filters, logprobs=True, **penalties),
    }


def milliseconds_per_round(generator: Generator, settings: Settings) -> float:
    """Returns the mean time of a round of one answer, compilation excluded."""
    stats = generator.generate(Request(_PROMPT, settings), chat=True).stats
    return stats.decode_seconds / stats.num_rounds * 1e3


if __name__ == "__main__":
    cli.run_main(main)
