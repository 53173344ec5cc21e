"""Measures what quantised weights save: their bytes, and the time of a decoding step."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jspec.common.memory import tree_bytes
from jspec.common.text_table import format_table
from jspec.common.timing import seconds_in_turn
from jspec.evaluation.benchmarking.call_parts import CallShape, call_loop
from jspec.evaluation.benchmarking.outcome import Outcome
from jspec.generation.flag_values import QUANTIZATIONS, parse_quantization
from jspec.weights.resolver import load_model


def measure_quantization(name: str, dtype: str, context: int, repeats: int) -> Iterator[Outcome]:
    """Times a step of each kind of weights, by turns; yields after each repeat.

    A step is one token of one row, chosen greedily, many in one compiled loop. All kinds have to
    fit into memory together.

    Args:
      name: of the model; see `load_model`.
      dtype: of the weights that are not quantised.
      context: tokens in the cache before the step.
      repeats: a ratio is the median over them of one repeat's times.
    """
    num_bytes, loops = {}, {}
    for kind in QUANTIZATIONS:
        quantization = parse_quantization(kind)
        model = load_model(name, dtype=dtype, quantization=quantization)
        title = quantization or dtype
        num_bytes[title] = tree_bytes(model.params)
        loops[title] = call_loop(model, CallShape(1, context))
    times = {title: [] for title in loops}
    for turn in seconds_in_turn(loops, repeats):
        for title, own in times.items():
            own.append(1e3 * turn[title])
        yield _outcome(num_bytes, times)


def _outcome(num_bytes: Mapping[str, int], times: Mapping[str, Sequence[float]]) -> Outcome:
    """Returns each kind's bytes and median milliseconds, and their ratios to the first kind's."""
    first = next(iter(num_bytes))
    report: dict[str, dict[str, Any]] = {}
    for name, own in times.items():
        ratios = [mine / theirs for mine, theirs in zip(own, times[first], strict=True)]
        report[name] = {
            "bytes": num_bytes[name],
            "bytes_ratio": num_bytes[name] / num_bytes[first],
            "milliseconds": statistics.median(own),
            "least_milliseconds": min(own),
            "time_ratio": statistics.median(ratios),
            "all_milliseconds": list(own),
        }
    rows = [
        [name, f"{row['bytes'] / 1e6:.0f}", f"{row['bytes_ratio']:.3f}",
         f"{row['milliseconds']:.2f}", f"{row['time_ratio']:.3f}"]
        for name, row in report.items()
    ]  # fmt: skip
    return Outcome({"kinds": report}, format_table(["", "MB", "ratio", "ms a step", "ratio"], rows))
