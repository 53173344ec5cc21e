"""How near a model's calls come to what the machine allows, and what a round is made of.

The least time of a call is the longer of two: reading its bytes at the machine's bandwidth, and
doing its operations at the machine's rate (the roofline of Williams et al., 2009,
doi:10.1145/1498765.1498785). Bandwidth and rate are measured by products that a model consists of;
bytes and operations are those of `CallCost`.

That says what is possible, not what a wider call costs: long before its operations take as long as
its bytes, the two get in each other's way. How much more a call on several tokens takes than one on
a single token is foretold from the parts that grow with it, each measured by itself: its products
with as many rows, its attention, and what it does number by number, the choice of tokens included.
What a call has beside them counts as that of the call on one token. Likewise a round beside a plain
step: its drafting, its call on several tokens, the choice among them.
"""

import itertools
import math
import statistics
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Self

from jspec.drafters import DrafterOptions, needs_draft_model, without_unread
from jspec.evaluation.analysis.call_cost import CallCost
from jspec.evaluation.analysis.machine import Machine, measure_machine
from jspec.evaluation.benchmarking.call_parts import CallShape, time_parts
from jspec.evaluation.benchmarking.calls import time_calls
from jspec.evaluation.benchmarking.round_parts import host_seconds, time_choice
from jspec.evaluation.benchmarking.rounds import time_rounds
from jspec.evaluation.benchmarking.turns import typical_parts
from jspec.generation.generator import Generator
from jspec.kernels import prefill_widths
from jspec.weights.resolver import LoadedModel

_CONTEXT = 128
_NUM_DRAFTS = 5  # of the choices that are timed
_VOCAB_SIZES = (8192, 128_256)


class Scope(NamedTuple):
    """Which calls of a model are measured.

    Attributes:
      widths: tokens of a row, behind 128 others.
      contexts: tokens before a call on one.
      batch_sizes: rows of a call on one token each.
      repeats: measurements of each.
    """

    widths: tuple[int, ...]
    contexts: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    repeats: int


FULL = Scope((1, 2, 3, 4, 6, 8, 16), (1024, 4096, 8191), (4, 16), 15)
QUICK = Scope((1, 6, 16), (4096,), (16,), 5)


class Line(NamedTuple):
    """One measured part.

    Attributes:
      name: what it is.
      seconds: measured.
      num_bytes: read and written at least; None where nothing is known.
      operations: done at least; None where nothing is known.
      least_seconds: that these take; None where nothing is known.
      ratio: of the seconds to those of the model's call on one token, or of a round's to those of a
        plain step, measured by turns; None for what is neither.
      expected_ratio: foretold by the parts; None where it is not.
      product_seconds: of the products in it; None where they are not measured.
      attention_seconds: of the attention in it; None where it is not measured.
      elementwise_seconds: of its norms, rotations, gates and choice; None where they are not
        measured.
    """

    name: str
    seconds: float
    num_bytes: float | None = None
    operations: float | None = None
    least_seconds: float | None = None
    ratio: float | None = None
    expected_ratio: float | None = None
    product_seconds: float | None = None
    attention_seconds: float | None = None
    elementwise_seconds: float | None = None

    def on(self, machine: Machine) -> Self:
        """Returns the line with the least seconds that a machine needs."""
        if self.num_bytes is None or self.operations is None:
            return self
        least = max(self.num_bytes / machine.bandwidth, self.operations / machine.flop_rate)
        return self._replace(least_seconds=least)

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
    scope: Scope = FULL,
) -> Iterator[tuple[Machine, list[Line]]]:
    """Measures the machine, calls of the target and of the draft, and rounds; says what it does.

    The machine is measured before and after; in the end the better figures count.

    Args:
      target: the target.
      draft: the draft model, if there is one.
      generators: methods of generating, by name.
      options: of their drafters.
      scope: which calls.

    Yields:
      After each line the machine and all lines so far, and once more at the end.
    """
    dtype = str(target.params["embedding"].dtype)
    machine = measure_machine(dtype)
    parts = [call_lines(target, "target", scope)]
    parts.append(round_lines(target, draft, generators, options, scope.repeats))
    if draft is not None:
        parts.append(call_lines(draft, "draft", scope))
    parts.append(choice_lines(target.config.vocab_size))
    lines = []
    for line in itertools.chain(*parts):
        print(f"{line.name}: {1e3 * line.seconds:.3g} ms", file=sys.stderr, flush=True)
        lines.append(line)
        yield machine, [line.on(machine) for line in lines]
    machine = Machine(*map(max, machine, measure_machine(dtype)))
    yield machine, [line.on(machine) for line in lines]


def call_lines(model: LoadedModel, role: str, scope: Scope = FULL) -> Iterator[Line]:
    """Yields calls of a model: by width, by context, by batch size, and of a prefill.

    Args:
      model: the target or the draft.
      role: its name in the lines.
      scope: which calls.
    """
    most = model.config.max_seq_len
    middle = min(_CONTEXT, most // 2)
    shapes = [CallShape(width, middle, 1) for width in scope.widths]
    shapes += [CallShape(1, context, 1) for context in scope.contexts]
    shapes += [CallShape(1, middle, batch_size) for batch_size in scope.batch_sizes]
    shapes = [shape for shape in shapes if shape.context + shape.width <= most]
    itemsize = model.params["embedding"].dtype.itemsize
    cost = CallCost(model.config, quantization=model.quantization, float_bytes=itemsize)
    one_token = math.nan
    for shape, turns in time_parts(model, shapes, scope.repeats):
        one_token = statistics.median(turn.first.call for turn in turns)
        parts = typical_parts(turns)
        yield Line(
            f"{role}: call on {shape.width} tokens, {shape.context} before, "
            f"{shape.batch_size} rows",
            parts.call,
            *_work(cost, shape),
            ratio=statistics.median(turn.ratio for turn in turns),
            expected_ratio=statistics.median(turn.expected_ratio for turn in turns),
            product_seconds=parts.products,
            attention_seconds=parts.attention,
            elementwise_seconds=parts.elementwise,
        )
    for width in prefill_widths(model.params["embedding"]):
        seconds = time_calls(model, width, context=0)
        work = _work(cost, CallShape(width, 0, 1), num_logits=1)
        name = f"{role}: prefill of {width} tokens"
        yield Line(name, seconds, *work, ratio=seconds / one_token)


def _work(cost: CallCost, shape: CallShape, num_logits: int | None = None) -> tuple[float, float]:
    """Returns a call's bytes and operations.

    Args:
      cost: of the model.
      shape: of the call.
      num_logits: tokens of each row that the head sees; None for all.
    """
    width, context, batch_size = shape
    num_bytes = cost.call_bytes(width, context=context, batch_size=batch_size)
    operations = cost.call_operations(width, context=context, batch_size=batch_size)
    if num_logits is not None:
        head = cost.config.vocab_size * cost.config.embed_dim
        operations -= 2 * head * (width - num_logits) * batch_size
    return num_bytes, operations


def choice_lines(vocab_size: int) -> Iterator[Line]:
    """Yields what follows a call: distributions, acceptance and the choice of tokens, by
    vocabulary.

    Args:
      vocab_size: of the target.
    """
    for ids in (vocab_size, *(other for other in _VOCAB_SIZES if other != vocab_size)):
        for num_drafts in (0, _NUM_DRAFTS):
            methods: dict[str, dict[str, Any]] = {"T = 0": {"temperature": 0.0}}
            methods["T = 1"] = {"temperature": 1.0}
            if ids == vocab_size:
                methods["T = 1, filters"] = {"temperature": 1.0, "has_filters": True}
            if ids == vocab_size and num_drafts:
                methods["T = 1, drafts with a distribution"] = {
                    "temperature": 1.0,
                    "has_distribution": True,
                }
            for title, options in methods.items():
                seconds = time_choice(ids, num_drafts, **options)
                name = f"choice among {ids} ids, {num_drafts} drafts, {title}"
                yield Line(name, seconds)


def round_lines(
    target: LoadedModel,
    draft: LoadedModel | None,
    generators: Mapping[str, Generator],
    options: DrafterOptions,
    repeats: int,
) -> Iterator[Line]:
    """Yields rounds of methods of generating, T = 0: drafting, the whole, and the host beside it.

    What a round costs beside a plain step is foretold by its drafting, its call and its choice.

    Args:
      target: the target.
      draft: the draft model, if there is one.
      generators: by name, with the numbers of drafts that are of interest.
      options: of their drafters.
      repeats: measurements of each round.
    """
    for name, generator in generators.items():
        number, drafter = generator.num_draft_tokens, generator.drafter
        if number > 0:
            own_draft = draft if needs_draft_model(drafter) else None
            own = without_unread(drafter, options)
            for one, turns in time_rounds(target, own_draft, drafter, own, number, repeats):
                parts = typical_parts(turns)
                foretold = statistics.median(turn.expected_ratio for turn in turns)
                if one.num_drafts > 0:
                    drafting = max(parts.drafting, 0.0)  # a difference of two times
                    yield Line(f"{name}: {one.drafter} drafts {one.num_drafts}", drafting)
                yield Line(
                    f"{name}: a round of {one.drafter}, {one.num_drafts} drafts",
                    parts.whole,
                    ratio=statistics.median(turn.ratio for turn in turns),
                    expected_ratio=None if one.begins_call else foretold,
                )
        seconds = host_seconds(generator)
        if seconds is not None:
            yield Line(f"{name}: the host, a round", seconds)


def format_lines(lines: list[Line], machine: Machine) -> str:
    """Returns a table."""
    width = max(len(line.name) for line in lines)
    titles = ["MB", "GFLOP", "least ms", "measured ms", "share", "products", "attention",
              "elementwise", "calls on 1", "foretold"]  # fmt: skip
    rows = [
        f"{machine.bandwidth / 1e9:.1f} GB/s and {machine.flop_rate / 1e9:.0f} GFLOP/s by the "
        "products of this program",
        " ".join([f"{'':<{width}}", *(f"{title:>11}" for title in titles)]),
    ]
    for line in lines:
        cells = [
            _cell(line.num_bytes, 1e-6, ".1f"),
            _cell(line.operations, 1e-9, ".2f"),
            _cell(line.least_seconds, 1e3, ".2f"),
            _cell(line.seconds, 1e3, ".3f"),
            _cell(line.share, 1, ".0%"),
            _cell(line.product_seconds, 1e3, ".2f"),
            _cell(line.attention_seconds, 1e3, ".2f"),
            _cell(line.elementwise_seconds, 1e3, ".2f"),
            _cell(line.ratio, 1, ".2f"),
            _cell(line.expected_ratio, 1, ".2f"),
        ]
        rows.append(
            " ".join([f"{line.name:<{width}}", *(f"{cell:>11}" for cell in cells)]).rstrip()
        )
    if any(line.share is not None and line.share > 1 for line in lines):
        rows.append("a share above 100 %: the machine was slower while its limit was measured")
    return "\n".join(rows)


def _cell(value: float | None, unit: float, form: str) -> str:
    return "" if value is None else format(unit * value, form)
