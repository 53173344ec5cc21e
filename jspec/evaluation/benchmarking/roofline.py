"""How near a model's calls come to what the machine allows, and what a round is made of.

The least time of a call is the longer of two: reading its bytes at the machine's bandwidth, and
doing its operations at the machine's rate (the roofline of Williams et al., 2009,
doi:10.1145/1498765.1498785). Bandwidth and rate are measured with the products of a model; bytes
and operations are those of `CallCost`.

A wider call costs more long before its operations take as long as its bytes, because the two get in
each other's way. How many calls on one token it costs is therefore predicted from the parts that
grow with it, each measured by itself: its products, its attention, and its elementwise work, the
choice of tokens included. The rest is taken to cost what it costs in a call on one token. Rounds
are those that `auto` measures (`generation.calibration`); drafting is what they take beside the
call and the choice.
"""

import itertools
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jspec.common.timing import seconds_each
from jspec.evaluation.analysis.call_cost import CallCost
from jspec.evaluation.analysis.machine import Machine, measure_machine
from jspec.evaluation.benchmarking.call_parts import CallShape, time_call, time_parts
from jspec.evaluation.benchmarking.outcome import Outcome
from jspec.evaluation.benchmarking.roofline_table import Line, format_lines
from jspec.evaluation.benchmarking.round_parts import choice_loop, host_seconds
from jspec.generation.calibration import PROMPT_TOKENS
from jspec.generation.costs import RoundCosts
from jspec.generation.generator import Generator
from jspec.kernels import prefill_widths
from jspec.weights.resolver import LoadedModel

_CONTEXT = 128
_NUM_DRAFTS = 5  # of the choices that are timed
_VOCAB_SIZES = (8192, 128_256)


class Scope(NamedTuple):
    """Which calls of a model are measured.

    Attributes:
      widths: tokens of a row, after 128 others.
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


def measure_roofline(
    target: LoadedModel,
    draft: LoadedModel | None,
    generators: Mapping[str, Generator],
    scope: Scope = FULL,
) -> Iterator[Outcome]:
    """Measures the machine, calls of the target and of the draft, and rounds.

    The machine is measured before and after; the better figures count.

    Args:
      target: the target.
      draft: the draft model, if there is one.
      generators: methods of generating, by name.
      scope: which calls.

    Yields:
      After each line the machine and all lines so far, and once more at the end.
    """
    dtype = str(target.params["embedding"].dtype)
    machine = measure_machine(dtype)
    parts = [call_lines(target, "target", scope)]
    parts.append(round_lines(generators))
    if draft is not None:
        parts.append(call_lines(draft, "draft", scope))
    parts.append(choice_lines(target.config.vocab_size))
    lines = []
    for line in itertools.chain(*parts):
        print(f"{line.name}: {1e3 * line.seconds:.3g} ms", file=sys.stderr, flush=True)
        lines.append(line)
        yield _outcome(lines, machine)
    machine = Machine(*map(max, machine, measure_machine(dtype)))
    yield _outcome(lines, machine)


def _outcome(lines: list[Line], machine: Machine) -> Outcome:
    lines = [line.on(machine) for line in lines]
    record = {"machine": machine._asdict(), "lines": [line.to_json() for line in lines]}
    return Outcome(record, format_lines(lines, machine))


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
    for shape, (call, *own), ratio, expected, first in time_parts(model, shapes, scope.repeats):
        one_token = first
        name = (
            f"{role}: call on {shape.width} tokens, {shape.context} before, {shape.batch_size} rows"
        )
        yield Line(name, call, *_work(cost, shape), None, ratio, expected, *own)
    for width in prefill_widths(model.params["embedding"]):
        seconds = time_call(model, width, context=0)
        work = _work(cost, CallShape(width, 0), num_logits=1)
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
    """Yields what follows a call, by vocabulary: distributions, acceptance, choice of tokens.

    Args:
      vocab_size: of the target.
    """
    for ids in (vocab_size, *(other for other in _VOCAB_SIZES if other != vocab_size)):
        for num_drafts in (0, _NUM_DRAFTS):
            kinds: dict[str, dict[str, Any]] = {"T = 0": {"temperature": 0.0}}
            kinds["T = 1"] = {"temperature": 1.0}
            if ids == vocab_size:
                kinds["T = 1, filters"] = {"temperature": 1.0, "has_filters": True}
            if ids == vocab_size and num_drafts:
                kinds["T = 1, drafts with a distribution"] = {
                    "temperature": 1.0,
                    "has_distribution": True,
                }
            for title, options in kinds.items():
                seconds = seconds_each(choice_loop(ids, num_drafts, **options))
                yield Line(f"choice among {ids} ids, {num_drafts} drafts, {title}", seconds)


def round_lines(generators: Mapping[str, Generator]) -> Iterator[Line]:
    """Yields rounds of methods of generating, T = 0: drafting, the whole, and the host beside it.

    Drafting is the round without the target's call and the choice of tokens. Of a drafter whose
    proposal computes some of the target's layers, from which the call goes on, that says nothing.

    Args:
      generators: by name, with the numbers of drafts that are of interest.
    """
    for name, generator in generators.items():
        costs = generator.measure_costs()
        if costs is not None:
            yield from _rounds_of(name, generator, costs)
        seconds = host_seconds(generator)
        if seconds is not None:
            yield Line(f"{name}: the host, a round", seconds)


def _rounds_of(name: str, generator: Generator, costs: RoundCosts) -> Iterator[Line]:
    target = generator.target

    def seconds_beside(number: int) -> float:
        choice = choice_loop(target.config.vocab_size, number, temperature=0.0)
        return time_call(target, number + 1, PROMPT_TOKENS) + seconds_each(choice)

    beside = {number: seconds_beside(number) for number in costs.numbers}
    by_drafter = dict(zip(costs.drafters, costs.seconds[0], strict=True))
    yield Line(f"{name}: a round without drafts", by_drafter[costs.drafters[0]][0], ratio=1.0)
    for drafter, (plain, *others) in by_drafter.items():
        for number, whole in zip(costs.numbers[1:], others, strict=True):
            drafting = max(whole - beside[number], 0.0)  # a difference of two times
            yield Line(f"{name}: {drafter} drafts {number}", drafting)
            title = f"{name}: a round of {drafter}, {number} drafts"
            yield Line(title, whole, ratio=whole / plain)
