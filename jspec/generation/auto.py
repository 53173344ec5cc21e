"""A number of draft tokens that adapts: the numbers to choose from, and what their rounds cost."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from jspec.common import processes
from jspec.common.errors import InputError
from jspec.common.json_lines import read_json
from jspec.common.memory import tree_bytes
from jspec.common.progress import Progress
from jspec.common.user_cache import cache_dir, keep, note, read_kept
from jspec.generation.acceptance_rates import AcceptanceRates, measure_rates
from jspec.generation.costs import RoundCosts, contexts_of, make_batch, measure_costs, texts_for
from jspec.generation.engine import Engine
from jspec.generation.paged_batch import PagedBatch
from jspec.kernels import environment
from jspec.speculation.control import drafters_of
from jspec.speculation.types import Drafter, ModelParams
from jspec.weights.resolver import LoadedModel

AUTO = "auto"
_T = TypeVar("_T")
_METHOD = 6  # version of the measurement: what another version measured is measured again
_TOKENS_OF_RATES = 512  # more change nothing of how acceptance is measured
_NUMBERS = (0, 1, 3, 7)  # few, as a verify call is compiled for each
MOST_DRAFT_TOKENS = _NUMBERS[-1]
_MACHINE = ("backend", "device", "processor", "native", "versions")


def numbers_of(drafter: Drafter) -> tuple[int, ...]:
    """Returns the numbers of drafts to choose from, in increasing order from 0."""
    width = drafter.num_draft_tokens
    return (*(number for number in _NUMBERS if number < width), width)


def parse_num_draft_tokens(text: str) -> int | str:
    """Returns the number of draft tokens that a flag's text asks for, or "auto".

    Raises:
      InputError: the text is neither.
    """
    if text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise InputError(
            f"expected num_draft_tokens to be a whole number or auto, got {text!r}"
        ) from None


def check_costs(costs: RoundCosts, engine: Engine) -> None:
    """Checks that costs are those of the engine's drafters and numbers of drafts.

    Raises:
      InputError: if they are those of others, or if there is nothing to choose.
    """
    if engine.drafter is None or not engine.numbers:
        raise InputError(
            f"expected num_draft_tokens={AUTO!r} and a drafter where costs of rounds are given, "
            f"got a fixed number of drafts, {engine.num_draft_tokens}"
        )
    numbers, drafters = list(engine.numbers), drafters_of(engine.drafter.kinds)
    given = list(costs.numbers), list(costs.drafters)
    if given != (numbers, drafters):
        raise InputError(
            f"expected costs of rounds with {numbers} drafts by {drafters}, got {given[0]} by "
            f"{given[1]}"
        )
    num_kinds = len(engine.drafter.kinds)
    if costs.accepted and len(costs.accepted) != num_kinds:
        raise InputError(
            f"expected costs with accepted drafts of {num_kinds} kinds of proposals, got "
            f"{len(costs.accepted)}"
        )
    if engine.drafter.has_lag and not costs.reading:
        raise InputError(
            "expected costs with the seconds of reading a token (`reading`), as a drafter has "
            "a cache of its own; got none"
        )


def recall_costs(
    engine: Engine,
    params: ModelParams,
    target: LoadedModel,
    key: dict[str, Any],
    *,
    batch_size: int,
    max_seq_len: int,
    length: int,
    pages: PagedBatch | None = None,
    known: RoundCosts | None = None,
) -> RoundCosts:
    """Returns the costs of rounds on this machine from the user's cache; measures missing ones.

    They are kept by `key` (names and options of models, drafter and rule), machine and sizes; the
    other arguments are those of `measure_costs` and `measure_rates`. Of several processes all have
    the first one's.

    Args:
      max_seq_len: the most tokens of any text.
      length: the most tokens of the texts for which they are needed at once. Those of longer texts
        are measured when they are needed, beside what is known: a short text's choices stay the
        same.
      pages: the batch whose rows will answer, for texts of every length: its first `batch_size`
        rows are timed. None: such as a Generator makes.
      known: costs of other numbers of rows, whose accepted drafts, if any, are taken.
    """
    here = environment()
    machine = {
        **{name: here[name] for name in _MACHINE},
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "method": _METHOD,
        "bytes": [tree_bytes(part) for part in params],
        "batch_size": batch_size,
        "rates_within": min(max_seq_len, _TOKENS_OF_RATES),
        "numbers": list(engine.numbers),
    }
    if engine.drafter is not None and engine.drafter.reads_text:
        machine["text"] = "English"
    if engine.layout.shape is not None:
        machine["mesh"] = engine.layout.shape
    if jax.process_count() > 1:
        machine["processes"] = jax.process_count()
    if pages is not None:
        machine["pages"] = len(pages.rows)  # of its programs
    show = functools.partial(Progress, num_before=0, unit="timing", in_place=True)

    def measure(contexts: Sequence[int], shorter: RoundCosts | None) -> RoundCosts:
        batch = pages or make_batch(engine, params, batch_size, contexts[-1])
        texts = texts_for(engine.drafter, target.tokenizer)
        costs = measure_costs(batch, contexts[-1], batch_size, show, texts)
        if shorter is not None:
            return shorter.followed_by(costs)
        if jax.process_count() > 1:
            return costs
        if known is not None and known.decided:
            names = AcceptanceRates._fields
            return dataclasses.replace(costs, **{name: getattr(known, name) for name in names})
        rates = measure_rates(batch, batch_size, target, max_seq_len)
        return dataclasses.replace(costs, **rates._asdict())

    check = functools.partial(check_costs, engine=engine)
    path, costs = cache_dir() / "costs.json", None
    contexts = contexts_of(engine, max_seq_len)
    if pages is not None:  # one program for texts of any length
        contexts = (engine.capacity_for(max_seq_len),)
    num_needed = 1 + sum(context < engine.capacity_for(length) for context in contexts[:-1])
    for number in range(1, num_needed + 1):
        name = key | machine | {"contexts": contexts[:number]}
        rows = "1 row" if batch_size == 1 else f"{batch_size} rows"
        what = f"rounds ({rows} of {contexts[number - 1]} slots)"
        recall = functools.partial(recall_or_measure, path, name, what=what, check=check)
        costs = costs_of_first(recall, functools.partial(measure, contexts[:number], costs))
    assert costs is not None
    return costs


def costs_of_first(recall: Callable[[Callable[[], _T]], _T], measure: Callable[[], _T]) -> _T:
    """Returns what `recall` gives in process 0: clocks differ, and all have to choose alike.

    `recall` takes what measures missing costs. Rounds run on the devices of all processes, so all
    measure if the first one does.
    """
    if jax.process_count() == 1:
        return recall(measure)

    def with_others() -> _T:
        processes.broadcast(None)
        return measure()

    if processes.is_first():
        return processes.broadcast((recall(with_others),))[0]
    while (result := processes.broadcast(None)) is None:
        measure()
    return result[0]


def recall_or_measure(
    path: pathlib.Path,
    key: Mapping[str, Any],
    measure: Callable[[], RoundCosts],
    *,
    what: str = "rounds",
    check: Callable[[RoundCosts], object] = lambda costs: None,
) -> RoundCosts:
    """Returns the costs that a file holds under a key; measures and adds them if they are missing.

    `what` is measured, as a note says. So it does where `check` raises an `InputError`. A corrupt
    file is replaced, with a note on standard error. Where the file cannot be written, every start
    measures again.
    """
    name, entries = json.dumps(key, sort_keys=True), read_kept(path)
    if name in entries:
        try:
            costs = RoundCosts.from_json(entries[name])
            check(costs)
            return costs
        except InputError as error:
            note(f"note: {path}: {error}: measuring anew")
    note(f"measuring what {what} cost on this machine, once for these models and settings")
    costs = measure()
    with contextlib.suppress(InputError):  # others have measured meanwhile
        entries = read_json(path)
    keep(path, entries | {name: costs.to_json()}, "costs")
    return costs
