"""How near a model's calls come to what the machine allows.

The least time of a call is the longer of two: reading its bytes at the machine's bandwidth, and
doing its operations at the machine's rate (the roofline of Williams et al., 2009,
doi:10.1145/1498765.1498785). Bandwidth and rate are measured by products that a model consists of;
bytes and operations are those of `CallCost`.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jspec.analysis.call_cost import CallCost
from jspec.analysis.machine import Machine, measure_machine
from jspec.benchmarking.calls import MOST_WIDTH, time_calls
from jspec.engine import prefill_widths
from jspec.generator import Generator
from jspec.weights.resolver import LoadedModel

_CONTEXT = 256
_WIDTHS = (1, 2, 3, 4, 6, 8, 16)
_CONTEXTS = (1024, 4096, 8000)
_BATCHES = (4, 16)


class Line(NamedTuple):
    """One measured part.

    Attributes:
      name: what it is.
      seconds: measured.
      num_bytes: read and written at least; None where nothing is known.
      operations: done at least; None where nothing is known.
      least_seconds: that these take; None where nothing is known.
    """

    name: str
    seconds: float
    num_bytes: float | None = None
    operations: float | None = None
    least_seconds: float | None = None

    @property
    def share(self) -> float | None:
        """The least time, as a part of the measured one."""
        return None if self.least_seconds is None else self.least_seconds / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return self._asdict() | {"share": self.share}


def measure_roofline(
    target: LoadedModel, draft: LoadedModel | None, generators: Mapping[str, Generator]
) -> tuple[Machine, list[Line]]:
    """Measures the machine, calls of the target and of the draft, and rounds; says what it does.

    Args:
      target: the target.
      draft: the draft model, if there is one.
      generators: ways of generating, by name.
    """
    machine = measure_machine(str(target.params["embedding"].dtype))
    models = {"target": target} if draft is None else {"target": target, "draft": draft}
    lines = []
    for role, model in models.items():
        lines += _announced(call_lines(model, role, machine))
    lines += _announced(round_lines(generators))
    return machine, lines


def _announced(lines: Iterator[Line]) -> Iterator[Line]:
    for line in lines:
        print(f"{line.name}: {1e3 * line.seconds:.2f} ms", file=sys.stderr, flush=True)
        yield line


def call_lines(model: LoadedModel, role: str, machine: Machine) -> Iterator[Line]:
    """Yields calls of a model: by width, of a prefill, by context and by batch size.

    Args:
      model: the target or the draft.
      role: its name in the lines.
      machine: what the machine can do at most.
    """
    most = model.config.max_seq_len
    middle = min(_CONTEXT, most // 2)
    shapes = [(width, middle, 1) for width in _WIDTHS]
    shapes += [(width, 0, 1) for width in prefill_widths(model)]
    shapes += [(1, context, 1) for context in _CONTEXTS]
    shapes += [(1, middle, batch_size) for batch_size in _BATCHES]
    itemsize = model.params["embedding"].dtype.itemsize
    cost = CallCost(model.config, quantization=model.quantization, float_bytes=itemsize)
    for width, context, batch_size in shapes:
        if context + width > most:
            continue
        is_prefill = width > MOST_WIDTH
        kind = "prefill of" if is_prefill else "call on"
        name = f"{role}: {kind} {width} tokens, {context} before, {batch_size} rows"
        size = {"context": context, "batch_size": batch_size}
        num_bytes, operations = cost.call_bytes(width, **size), cost.call_operations(width, **size)
        if is_prefill:  # the head sees one token of a chunk
            head = model.config.vocab_size * model.config.embed_dim
            operations -= 2 * head * (width - 1) * batch_size
        least = max(num_bytes / machine.bandwidth, operations / machine.flop_rate)
        seconds = time_calls(model, width, **size)
        yield Line(name, seconds, num_bytes, operations, least)


def round_lines(generators: Mapping[str, Generator]) -> Iterator[Line]:
    """Yields whole rounds of ways of generating, sampling and acceptance included, T = 0.

    Args:
      generators: by name, with the numbers of drafts that are of interest.
    """
    for name, generator in generators.items():
        costs = generator.measure_costs()
        if costs is None:
            continue
        for drafter, by_number in zip(costs.drafters, costs.seconds[0], strict=True):
            for number, seconds in zip(costs.numbers, by_number, strict=True):
                yield Line(f"{name}: a round of {drafter or name}, {number} drafts", seconds)


def format_lines(lines: list[Line], machine: Machine) -> str:
    """Returns a table."""
    width = max(len(line.name) for line in lines)
    rows = [
        f"{machine.bandwidth / 1e9:.1f} GB/s and {machine.flop_rate / 1e9:.0f} GFLOP/s by the "
        "products of this program",
        f"{'':<{width}}        MB    GFLOP  least ms  measured ms  share",
    ]
    for line in lines:
        row = f"{line.name:<{width}}"
        if line.num_bytes is None or line.operations is None or line.least_seconds is None:
            row += f"{'':>29}{1e3 * line.seconds:11.2f}"
        else:
            row += f"{line.num_bytes / 1e6:10.1f}{line.operations / 1e9:9.2f}"
            row += f"{1e3 * line.least_seconds:10.2f}{1e3 * line.seconds:13.2f}"
            row += f"{line.share:7.0%}"
        rows.append(row)
    return "\n".join(rows)
