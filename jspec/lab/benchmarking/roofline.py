"""Times of a model's calls beside the least time the machine allows, and the parts of a round.

The least time of a call is the longer of two: reading its bytes at the machine's bandwidth, and
doing its operations at the machine's rate (the roofline of Williams et al., 2009,
doi:10.1145/1498765.1498785). Bandwidth and rate are measured with the products of a model; bytes
and operations are those of `CallCost`.
"""

import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from flax.traverse_util import flatten_dict

from jspec.common.memory import tree_bytes
from jspec.common.text_table import format_table, number_cell
from jspec.common.timing import seconds_in_turn
from jspec.generation.generator import Generator
from jspec.kernels import prefill_widths
from jspec.lab.analysis.call_cost import CallCost, Machine, measure_machine, streamed_rules
from jspec.lab.benchmarking.measurement import Measurement, Outcome
from jspec.lab.benchmarking.parts import (
    PROFILED,
    call_loop,
    choice_lines,
    round_lines,
    time_call,
    with_own_head,
)
from jspec.weights.quantize import PACKED_KINDS
from jspec.weights.resolver import LoadedModel

Line = dict[str, Any]
"""A measured part: its `name`, its `seconds`, and those of `_COLUMNS` that apply to it.

`ratio` is that of the seconds to those of the model's call on one token, or of a round's to those
of a plain step, measured by turns.
"""

_CONTEXT = 128
_COLUMNS = {  # title, format, unit
    "num_bytes": ("MB", ".1f", 1e-6),
    "operations": ("GFLOP", ".2f", 1e-9),
    "least_seconds": ("least ms", ".2f", 1e3),
    "seconds": ("measured ms", ".3f", 1e3),
    "share": ("share", ".0%", 1),  # the least time's of the measured one
    "ratio": ("calls on 1", ".2f", 1),
}
_SLOWED = "a share above 100 %: the machine was slower while its limit was measured"


def measure_roofline(asked: Measurement) -> Iterator[Outcome]:
    """Measures calls of the target and of the draft, and rounds; yields after each line.

    The machine is measured before and after; the better figures count.
    """
    target, draft = asked.models()
    generators = asked.generators(target, draft)
    dtype = str(target.params["embedding"].dtype)
    machine, lines = measure_machine(dtype), []

    def all_lines() -> Iterator[Line]:
        yield from call_lines(target, "target", asked.quick)
        yield from round_lines(generators)
        if draft is not None:
            used = with_own_head(target, draft, asked.options)
            yield from call_lines(used, "draft", asked.quick)
        yield from choice_lines(target.config.vocab_size)

    for line in all_lines():
        print(f"{line['name']}: {1e3 * line['seconds']:.3g} ms", file=sys.stderr, flush=True)
        lines.append(line)
        yield _outcome(lines, machine)
    yield _outcome(lines, Machine(*map(max, machine, measure_machine(dtype))))
    if asked.trace_folder is not None:
        profile(next(reversed(generators.values())), asked.trace_folder)


def profile(generator: Generator, folder: str) -> None:
    """Writes a trace of JAX's profiler while an answer is generated, for a viewer such as XProf."""
    generator.generate(PROFILED)  # compiles
    with jax.profiler.trace(folder):
        generator.generate(PROFILED)
    print(f"a profile of an answer is in {folder}", file=sys.stderr, flush=True)


def _outcome(lines: Sequence[Line], machine: Machine) -> Outcome:
    lines = [on_machine(line, machine) for line in lines]
    record = {"machine": machine._asdict(), "lines": lines}
    return Outcome(record, format_lines(lines, machine))


def on_machine(line: Line, machine: Machine) -> Line:
    """Returns a line with all columns, the least seconds that a machine needs among them."""
    line = {"name": line["name"]} | dict.fromkeys(_COLUMNS) | line
    if line["num_bytes"] is None:
        return line
    least = max(line["num_bytes"] / machine.bandwidth, line["operations"] / machine.flop_rate)
    return line | {"least_seconds": least, "share": least / line["seconds"]}


def format_lines(lines: Sequence[Line], machine: Machine) -> str:
    """Returns a table of lines that are complete, under the machine's rates."""
    rows = [
        [line["name"], *(number_cell(line[key], *look) for key, (_, *look) in _COLUMNS.items())]
        for line in lines
    ]
    table = format_table(["", *(title for title, *_ in _COLUMNS.values())], rows)
    rates = (
        f"{machine.bandwidth / 1e9:.1f} GB/s and {machine.flop_rate / 1e9:.0f} GFLOP/s by the "
        "products of this program"
    )
    is_slowed = any((line["share"] or 0) > 1 for line in lines)
    return "\n".join([rates, table, *[_SLOWED] * is_slowed])


def _shapes(most: int, is_quick: bool) -> list[tuple[int, int, int]]:
    """Returns width, context and rows of calls by each of the three, where a context allows it."""
    widths, contexts, batch_sizes = (1, 2, 3, 4, 6, 8, 16), (1024, 4096, 8191), (4, 16)
    if is_quick:
        widths, contexts, batch_sizes = (1, 6, 16), (4096,), (16,)
    middle = min(_CONTEXT, most // 2)
    shapes = [(width, middle, 1) for width in widths]
    shapes += [(1, context, 1) for context in contexts]
    shapes += [(1, middle, batch_size) for batch_size in batch_sizes]
    return [shape for shape in shapes if shape[0] + shape[1] <= most]


def model_cost(model: LoadedModel, float_bytes: int) -> CallCost:
    """Returns what calls of a model cost; how small packed weights are, only they tell."""
    if model.quantization not in PACKED_KINDS:
        return CallCost(model.config, None, model.quantization, float_bytes)
    streamed = streamed_rules(model.config)
    leaves = flatten_dict(model.params)
    size = tree_bytes([leaves[rule.path] for rule in streamed])
    num_weights = sum(math.prod(rule.shape) for rule in streamed)
    return CallCost(model.config, size / num_weights, None, float_bytes)


def call_lines(model: LoadedModel, role: str, is_quick: bool) -> Iterator[Line]:
    """Yields calls of a model: by width, by context, by batch size, and of a prefill.

    Args:
      model: the target or the draft.
      role: its name in the lines.
      is_quick: fewer calls are measured, and each less often.
    """
    itemsize = model.params["embedding"].dtype.itemsize
    cost = model_cost(model, itemsize)
    shapes = _shapes(model.config.max_seq_len, is_quick)
    first, one_token = call_loop(model, *shapes[0]), 0.0
    for shape in shapes:
        width, context, rows = shape
        # Each by turns with the first call; a cache is freed before the next one is made.
        loops = {"own": first if shape == shapes[0] else call_loop(model, *shape), "first": first}
        turns = list(seconds_in_turn(loops, 5 if is_quick else 15))
        del loops
        one_token = statistics.median(turn["first"] for turn in turns)
        yield {
            "name": f"{role}: call on {width} tokens, {context} before, {rows} rows",
            "seconds": statistics.median(turn["own"] for turn in turns),
            "ratio": statistics.median(turn["own"] / turn["first"] for turn in turns),
            "num_bytes": cost.call_bytes(width, context=context, batch_size=rows),
            "operations": cost.call_operations(width, context=context, batch_size=rows),
        }
    outputs = model.config.head_size or model.config.vocab_size
    head = 2 * outputs * model.config.embed_dim  # operations on one token
    for width in prefill_widths(model.params["embedding"]):
        seconds = time_call(model, width, context=0)
        yield {
            "name": f"{role}: prefill of {width} tokens",
            "seconds": seconds,
            "ratio": seconds / one_token,
            "num_bytes": cost.call_bytes(width, context=0),
            # Only the last token's logits are computed.
            "operations": cost.call_operations(width, context=0) - (width - 1) * head,
        }
