"""Measures what quantised weights save: their bytes, and the time of a decoding step.

`python scripts/measure_quantization.py --model=random:llama3.2-1b`

A step is one token of one row, chosen greedily, many of them in one compiled loop (see
`measure_calls.py`, whose flags `--capacity`, `--repeats` and `--output_json` hold here too). The
kinds take turns, repeat after repeat; a ratio is the median over repeats of one repeat's times.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import measure_calls
from absl import flags

from jspec import cli, provenance
from jspec.errors import check_range
from jspec.generator import DEFAULT_TARGET
from jspec.json_lines import JsonLinesWriter
from jspec.weights.resolver import load_model

flags.adopt_module_key_flags(measure_calls)
_MODEL = flags.DEFINE_string("model", DEFAULT_TARGET, "The model, all of whose kinds fit memory.")


def main() -> None:
    """Measures, prints a line a kind, writes JSON."""
    options = flags.FLAGS
    check_range("repeats", options.repeats, 1, 1000)
    output = JsonLinesWriter(options.output_json) if options.output_json else None
    num_bytes, functions = {}, {}
    for kind in cli.QUANTIZATIONS:
        name = options.dtype if kind == "none" else kind
        quantization = cli.parse_quantization(kind)
        model = load_model(_MODEL.value, dtype=options.dtype, quantization=quantization)
        num_bytes[name] = measure_calls.num_bytes(model.params)
        functions[name] = measure_calls.time_calls(model, 1)
    for function in functions.values():
        function()
    times = {name: [] for name in functions}
    for _ in range(options.repeats):
        for name, function in functions.items():
            times[name].append(function())
    report = summarise(num_bytes, times)
    for name, row in report.items():
        print(
            f"{name}: {row['bytes'] / 1e6:.0f} MB ({row['bytes_ratio']:.3f}), "
            f"{row['milliseconds']:.2f} ms a step ({row['time_ratio']:.3f})"
        )
    if output is not None:
        record = {"model": _MODEL.value, "capacity": options.capacity, "kinds": report}
        with output:
            output.write(provenance.environment() | record)


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
