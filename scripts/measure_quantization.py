"""Measures what quantised weights save: their bytes, and the time of a decoding step.

`python scripts/measure_quantization.py --model=random:llama3.2-1b`

A step is one token of one row, chosen greedily, many of them in one compiled loop. The kinds take
turns, repeat after repeat; a ratio is the median over repeats of one repeat's times.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from jspec.common import cli
from jspec.common.errors import check_range
from jspec.common.json_lines import JsonLinesWriter
from jspec.common.memory import tree_bytes
from jspec.evaluation.benchmarking.calls import call_loop
from jspec.evaluation.benchmarking.repeated import seconds_in_turn
from jspec.generation import provenance
from jspec.generation.flag_values import QUANTIZATIONS, parse_quantization
from jspec.generation.generator import DEFAULT_TARGET
from jspec.weights.resolver import load_model

_MODEL = flags.DEFINE_string("model", DEFAULT_TARGET, "The model, all of whose kinds fit memory.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of the weights.")
_CONTEXT = flags.DEFINE_integer("context", 256, "Tokens in the cache before the step.")
_REPEATS = flags.DEFINE_integer("repeats", 7, "Repeats of each measurement.")
_OUTPUT_JSON = flags.DEFINE_string("output_json", None, "Write the results to this file.")


def main() -> None:
    """Measures, prints a line a kind, writes JSON."""
    check_range("repeats", _REPEATS.value, 1, 1000)
    check_range("context", _CONTEXT.value, 0, 2**20)
    output = JsonLinesWriter(_OUTPUT_JSON.value) if _OUTPUT_JSON.value else None
    num_bytes, loops = {}, {}
    for kind in QUANTIZATIONS:
        name = _DTYPE.value if kind == "none" else kind
        quantization = parse_quantization(kind)
        model = load_model(_MODEL.value, dtype=_DTYPE.value, quantization=quantization)
        num_bytes[name] = tree_bytes(model.params)
        loops[name] = call_loop(model, 1, context=_CONTEXT.value)
    times, report = {name: [] for name in loops}, {}
    common = provenance.environment() | {"model": _MODEL.value, "context": _CONTEXT.value}
    for repeat, turn in enumerate(seconds_in_turn(loops, _REPEATS.value), 1):
        for name, own in times.items():
            own.append(1e3 * turn[name])
        report = summarise(num_bytes, times)
        if output is not None:
            output.rewrite(common | {"kinds": report}, is_complete=repeat == _REPEATS.value)
    for name, row in report.items():
        print(
            f"{name}: {row['bytes'] / 1e6:.0f} MB ({row['bytes_ratio']:.3f}), "
            f"{row['milliseconds']:.2f} ms a step ({row['time_ratio']:.3f})"
        )


def summarise(
    num_bytes: Mapping[str, int], times: Mapping[str, Sequence[float]]
) -> dict[str, dict[str, Any]]:
    """Returns each kind's bytes and median milliseconds, and their ratios to the first kind's."""
    first = next(iter(num_bytes))
    report = {}
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
    return report


if __name__ == "__main__":
    cli.run_main(main)
