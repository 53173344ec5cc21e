"""Measures what filters, processors and log-probabilities cost a round."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from jspec.common.text_table import format_table
from jspec.evaluation.benchmarking.answers import Generated, GenerateFn, Timings, measure, warm_up
from jspec.evaluation.benchmarking.outcome import Outcome
from jspec.generation.generator import Generator
from jspec.generation.request import Request, Settings

_PROMPT = "Tell me a long story about a dragon and a knight."


def measure_sampling(generator: Generator, max_new_tokens: int, repeats: int) -> Iterator[Outcome]:
    """Times answers under several settings, by turns; yields after each repeat.

    Args:
      generator: what answers.
      max_new_tokens: of an answer.
      repeats: of every answer; a ratio is that of one repeat's times, the median over repeats.
    """
    methods = {name: _answer(generator, one) for name, one in _settings(max_new_tokens).items()}
    prompts = [generator.encode_prompt(_PROMPT)]
    warm_up(methods, prompts)
    for timings in measure(methods, prompts, repeats):
        yield _outcome(timings)


def _settings(max_new_tokens: int) -> dict[str, Settings]:
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


def _answer(generator: Generator, settings: Settings) -> GenerateFn:
    def generate(prompt: list[int], seed: int) -> Generated:
        result = generator.generate(Request(prompt, dataclasses.replace(settings, seed=seed)))
        stats = result.stats
        return Generated(
            result.token_ids, stats.num_round_tokens, stats.num_rounds, seconds=stats.decode_seconds
        )

    return generate


def _outcome(timings: dict[str, Timings]) -> Outcome:
    rounds = {name: 1e3 * own.seconds[:, 0] / own.calls[:, 0] for name, own in timings.items()}
    first = next(iter(rounds.values()))
    report = {
        name: {
            "milliseconds": float(np.median(own)),
            "ratio": float(np.median(own / first)),
            "all_milliseconds": own.tolist(),
        }
        for name, own in rounds.items()
    }
    rows = [
        [name, f"{row['milliseconds']:.2f}", f"{row['ratio']:.3f}"] for name, row in report.items()
    ]
    return Outcome({"sampling": report}, format_table(["", "ms a round", "ratio"], rows))
