"""How near a model's calls come to what the machine allows, and what a round is made of.

The least time of a call is the longer of two: reading its bytes at the machine's bandwidth, and
doing its operations at the machine's rate (the roofline of Williams et al., 2009,
doi:10.1145/1498765.1498785). Bandwidth and rate are measured by products that a model consists of;
bytes and operations are those of `CallCost`.

That says what is possible, not what a wider call costs: long before its operations take as long as
its bytes, the two get in each other's way. How much more a call on several tokens takes than one on
a single token is foretold from the time that a large product takes with as many rows
(`analysis.machine.FewRows`), and stands beside what it does take.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jspec.analysis.call_cost import CallCost
from jspec.analysis.machine import FewRows, Machine, measure_few_rows, measure_machine
from jspec.benchmarking.calls import MOST_WIDTH, time_calls
from jspec.benchmarking.round_parts import host_seconds, time_choice, time_drafting
from jspec.drafters import DrafterOptions, needs_draft_model, without_unread
from jspec.engine import prefill_widths
from jspec.generator import Generator
from jspec.weights.resolver import LoadedModel

_CONTEXT = 256
_WIDTHS = (1, 2, 3, 4, 6, 8, 16)
_CONTEXTS = (1024, 4096, 8000)
_BATCHES = (4, 16)
_NUM_DRAFTS = 5  # of the choices that are timed
_VOCAB_SIZES = (8192, 128_256)


class Line(NamedTuple):
    """One measured part.

    Attributes:
      name: what it is.
      seconds: measured.
      num_bytes: read and written at least; None where nothing is known.
      operations: done at least; None where nothing is known.
      least_seconds: that these take; None where nothing is known.
      ratio: of the seconds to those of the model's call on one token; None for what is no call.
      expected_ratio: foretold by bytes and products of few rows; None where it is not.
    """

    name: str
    seconds: float
    num_bytes: float | None = None
    operations: float | None = None
    least_seconds: float | None = None
    ratio: float | None = None
    expected_ratio: float | None = None

    @property
    def share(self) -> float | None:
        """The least time, as a part of the measured one."""
        return None if self.least_seconds is None else self.least_seconds / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return self._asdict() | {"share": self.share}


def measure_roofline(
    target: LoadedModel,
    draft: LoadedModel | None,
    generators: Mapping[str, Generator],
    options: DrafterOptions,
) -> tuple[Machine, list[Line]]:
    """Measures the machine, calls of the target and of the draft, and rounds; says what it does.

    Args:
      target: the target.
      draft: the draft model, if there is one.
      generators: ways of generating, by name.
      options: of their drafters.
    """
    dtype = str(target.params["embedding"].dtype)
    machine = measure_machine(dtype)
    models = {"target": target} if draft is None else {"target": target, "draft": draft}
    lines = []
    for role, model in models.items():
        is_float = model.quantization is None
        few_rows = measure_few_rows(model.config.embed_dim, dtype) if is_float else None
        lines += _announced(call_lines(model, role, machine, few_rows))
    lines += _announced(choice_lines(target.config.vocab_size))
    lines += _announced(round_lines(target, draft, generators, options))
    return machine, lines


def _announced(lines: Iterator[Line]) -> Iterator[Line]:
    for line in lines:
        print(f"{line.name}: {1e3 * line.seconds:.3g} ms", file=sys.stderr, flush=True)
        yield line


def call_lines(
    model: LoadedModel, role: str, machine: Machine, few_rows: FewRows | None
) -> Iterator[Line]:
    """Yields calls of a model: by width, of a prefill, by context and by batch size.

    Args:
      model: the target or the draft.
      role: its name in the lines.
      machine: what the machine can do at most.
      few_rows: what products of few rows take on it; None for quantised weights.
    """
    most = model.config.max_seq_len
    middle = min(_CONTEXT, most // 2)
    shapes = [(width, middle, 1) for width in _WIDTHS]
    shapes += [(width, 0, 1) for width in prefill_widths(model)]
    shapes += [(1, context, 1) for context in _CONTEXTS]
    shapes += [(1, middle, batch_size) for batch_size in _BATCHES]
    itemsize = model.params["embedding"].dtype.itemsize
    cost = CallCost(model.config, quantization=model.quantization, float_bytes=itemsize)

    def expected(width: int, context: int, batch_size: int) -> float | None:
        rows = width * batch_size
        if few_rows is None or rows > few_rows.most:
            return None
        caches = cost.call_bytes(width, context=context, batch_size=batch_size) - cost.weight_bytes
        return cost.weight_bytes * few_rows.seconds_per_byte(rows) + caches / machine.bandwidth

    first = None
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
        own = seconds, expected(width, **size)
        first = first or own
        foretold = own[1] / first[1] if own[1] and first[1] else None
        yield Line(name, seconds, num_bytes, operations, least, seconds / first[0], foretold)


def choice_lines(vocab_size: int) -> Iterator[Line]:
    """Yields what follows a call: laws, acceptance and the choice of tokens, by vocabulary.

    Args:
      vocab_size: of the target.
    """
    for ids in (vocab_size, *(other for other in _VOCAB_SIZES if other != vocab_size)):
        for num_drafts in (0, _NUM_DRAFTS):
            ways: dict[str, dict[str, Any]] = {"T = 0": {"temperature": 0.0}}
            ways["T = 1"] = {"temperature": 1.0}
            if ids == vocab_size:
                ways["T = 1, filters"] = {"temperature": 1.0, "has_filters": True}
            if ids == vocab_size and num_drafts:
                ways["T = 1, drafts with a law"] = {"temperature": 1.0, "has_law": True}
            for title, options in ways.items():
                seconds = time_choice(ids, num_drafts, **options)
                name = f"choice among {ids} ids, {num_drafts} drafts, {title}"
                yield Line(name, seconds)


def round_lines(
    target: LoadedModel,
    draft: LoadedModel | None,
    generators: Mapping[str, Generator],
    options: DrafterOptions,
) -> Iterator[Line]:
    """Yields rounds of ways of generating, T = 0: drafting, the whole, and the host beside it.

    Args:
      target: the target.
      draft: the draft model, if there is one.
      generators: by name, with the numbers of drafts that are of interest.
      options: of their drafters.
    """
    for name, generator in generators.items():
        costs = generator.measure_costs()
        if costs is not None:
            number = generator.num_draft_tokens
            own_draft = draft if needs_draft_model(generator.drafter) else None
            own = without_unread(generator.drafter, options)
            seconds = time_drafting(target, own_draft, generator.drafter, own, number)
            yield Line(f"{name}: drafting {number}", seconds)
            for drafter, by_number in zip(costs.drafters, costs.seconds[0], strict=True):
                for drafts, seconds in zip(costs.numbers, by_number, strict=True):
                    yield Line(f"{name}: a round of {drafter or name}, {drafts} drafts", seconds)
        seconds = host_seconds(generator)
        if seconds is not None:
            yield Line(f"{name}: the host, a round", seconds)


def format_lines(lines: list[Line], machine: Machine) -> str:
    """Returns a table."""
    width = max(len(line.name) for line in lines)
    rows = [
        f"{machine.bandwidth / 1e9:.1f} GB/s and {machine.flop_rate / 1e9:.0f} GFLOP/s by the "
        "products of this program",
        f"{'':<{width}}        MB    GFLOP  least ms  measured ms  share  calls on 1  foretold",
    ]
    for line in lines:
        row = f"{line.name:<{width}}"
        if line.num_bytes is None or line.operations is None or line.least_seconds is None:
            row += f"{'':>29}{1e3 * line.seconds:13.3f}"
        else:
            row += f"{line.num_bytes / 1e6:10.1f}{line.operations / 1e9:9.2f}"
            row += f"{1e3 * line.least_seconds:10.2f}{1e3 * line.seconds:13.2f}"
            row += f"{line.share:7.0%}{line.ratio:12.2f}"
            row += "" if line.expected_ratio is None else f"{line.expected_ratio:10.2f}"
        rows.append(row)
    return "\n".join(rows)
