"""A number of draft tokens that adapts: the numbers to choose from, and what their rounds cost."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jspec.common import processes
from jspec.common.errors import InputError, say
from jspec.common.json_lines import read_json
from jspec.common.memory import tree_bytes
from jspec.common.progress import Progress
from jspec.common.user_cache import cache_dir, keep, read_kept
from jspec.generation.costs import (
    LONGEST_MEASURED,
    AcceptanceRates,
    RoundCosts,
    contexts_of,
    make_batch,
    measure_costs,
    measure_rates,
    texts_for,
)
from jspec.generation.engine import Engine
from jspec.generation.paged_batch import PagedBatch
from jspec.generation.result import Result
from jspec.generation.rows import Row
from jspec.kernels import environment
from jspec.sampling.settings import COLDEST, Switches
from jspec.speculation.control import FREE_STEPS, Control, drafters_of
from jspec.speculation.types import Drafter, ModelParams
from jspec.weights.resolver import LoadedModel

AUTO = "auto"
_T = TypeVar("_T")
_METHOD = 6  # version of the measurement: what another version measured is measured again
_NUMBERS = (0, 1, 3, 7)  # few, as a verify call is compiled for each
MOST_DRAFT_TOKENS = _NUMBERS[-1]
_NUM_MOMENTS = 8  # of the answer, for which a row's choice is computed again
_MOST_TRIED = 1 + FREE_STEPS  # plain steps of a first round that is tried; see `Control`
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


@dataclasses.dataclass(eq=False)
class KnownCosts:
    """Costs of a Generator's rounds: given, or measured as far as they are needed, and kept.

    They are kept in the user's cache by what `make_key` returns (names and options of models,
    drafter and rule), machine and sizes. Of several processes all have the first one's.

    Attributes:
      engine: the programs that are timed.
      target: the target model.
      params: parameters of target and drafter, as they are now.
      make_key: returns what tells these costs from others on this machine; called once the kernels
        are chosen.
      batch_size: the most rows of a Generator's batch.
      max_seq_len: the most tokens of any text.
      given: costs that nothing is measured beside.

    Raises:
      InputError: the given costs are not those of the engine's drafters and numbers.
    """

    engine: Engine
    target: LoadedModel
    params: ModelParams
    make_key: Callable[[], dict[str, Any]]
    batch_size: int
    max_seq_len: int
    given: RoundCosts | None = None

    def __post_init__(self) -> None:
        if self.given is not None:
            check_costs(self.given, self.engine)
        self._of_batch = self._of_one_row = self.given

    @property
    def known(self) -> RoundCosts | None:
        """The costs that tokens may depend on, as far as they have been measured or given."""
        return self._of_one_row or self._of_batch

    def of_batch(self, length: int) -> RoundCosts | None:
        """Returns the costs as far as texts of at most `length` tokens need them.

        Those of longer texts are measured when they are needed, beside what is known: a short
        text's choices stay the same. None where the number of drafts is fixed, and none are given.
        """
        if self.engine.numbers and not self._covers(self._of_batch, length):
            self._of_batch = self._recall(self.batch_size, length)
        return self._of_batch

    def of_one_row(self, length: int) -> RoundCosts | None:
        """Returns the costs of rounds of one row, by which sampled rows choose in any batch."""
        if self.batch_size == 1:
            return self.of_batch(length)
        if not self._covers(self._of_one_row, length):
            self._of_one_row = self._recall(1, length)
        return self._of_one_row

    def add_to(self, row: Row) -> Row:
        """Returns the row with the costs by which it chooses its numbers of drafts, if it does.

        Where its tokens depend on these numbers, the costs are those of one row in any batch.
        """
        if not self.engine.numbers:
            return row
        is_greedy = row.settings.temperature < COLDEST and self.engine.is_lossless
        if is_greedy or self.engine.is_coupled:
            costs = self.of_batch(row.max_length)
            alone = self._of_one_row or costs
        else:
            costs = alone = self.of_one_row(row.max_length)
        assert costs is not None
        assert alone is not None
        context = self.engine.capacity_for(row.max_length)  # of the row alone, not of its batch
        measured = None
        if costs.decided:
            accepted, decided = np.array([costs.accepted, costs.decided], np.float32)
            measured = accepted, decided, costs.answer_tokens
        seconds = costs.at(context), alone.at(context), costs.reading_at(context)
        return row._replace(costs=seconds, measured=measured)

    def know_all(self, pages: PagedBatch | None = None) -> None:
        """Has the costs of all rounds known, unless costs were given: measured with these rows.

        For rows with pages texts must be the same whatever the costs: they are other costs than
        those of a Generator.
        """
        if not self.engine.numbers or self.given is not None:
            return
        if self.max_seq_len <= 2 * self.engine.num_draft_tokens + 6:
            pages = None  # they have no room for the text that is measured
        self._of_batch = self._recall(self.batch_size, self.max_seq_len, pages)
        if self.batch_size > 1:
            self._of_one_row = self._recall(1, self.max_seq_len, pages)

    def measure(self) -> RoundCosts | None:
        """Measures what rounds cost on this machine: a plain step, and rounds with drafts.

        With a fixed number of drafts that number is measured beside 0; with "auto", all that it
        chooses from, in seconds, and about as long to compile. Plain decoding has none.
        """
        engine, params = self.engine, self.params
        if engine.drafter is None:
            return None
        if not engine.numbers:
            numbers = 0, engine.num_draft_tokens
            engine = Engine(self.target, engine.drafter, engine.rule, numbers, params.draft)
        texts = texts_for(engine.drafter, self.target.tokenizer)
        rows = engine, params, self.batch_size
        measured = [
            measure_costs(make_batch(*rows, context), context, self.batch_size, texts=texts)
            for context in contexts_of(engine, self.max_seq_len)
        ]
        return functools.reduce(RoundCosts.followed_by, measured)

    def _covers(self, costs: RoundCosts | None, length: int) -> bool:
        """Returns whether costs were given, or measured for texts of that length."""
        if costs is None or self.given is not None:
            return costs is not None
        return contexts_of(self.engine, length)[-1] <= costs.contexts[-1]

    def _recall(self, num_rows: int, length: int, pages: PagedBatch | None = None) -> RoundCosts:
        """Returns the costs of that many rows from the user's cache; measures missing ones.

        With pages the rows are the first ones of theirs, one program for texts of any length, and
        the accepted drafts of costs that are known already are taken.
        """
        if pages is None:
            sizes = num_rows, self.engine.capacity_for(self.max_seq_len), Switches()
            make_state = functools.partial(self.engine.empty_state.eval_shape, *sizes)
            contexts = contexts_of(self.engine, self.max_seq_len)
        else:
            make_state = pages.joined_state
            contexts = (self.engine.capacity_for(self.max_seq_len),)
        self.engine.await_kernels(self.params, make_state)
        key = self.make_key() | self._machine(num_rows, pages)
        most = self.engine.capacity_for(length)
        num_needed = 1 + sum(context < most for context in contexts[:-1])
        check = functools.partial(check_costs, engine=self.engine)
        path, costs = cache_dir() / "costs.json", None
        rows = "1 row" if num_rows == 1 else f"{num_rows} rows"
        for number in range(1, num_needed + 1):
            what = f"rounds ({rows} of {contexts[number - 1]} slots)"
            name = key | {"contexts": contexts[:number]}
            recall = functools.partial(recall_or_measure, path, name, what=what, check=check)
            measure = functools.partial(
                self._measure_next, num_rows, contexts[number - 1], costs, pages
            )
            costs = costs_of_first(recall, measure)
        assert costs is not None
        return costs

    def _measure_next(
        self, num_rows: int, context: int, shorter: RoundCosts | None, pages: PagedBatch | None
    ) -> RoundCosts:
        """Measures rounds with that many slots, beside those with fewer, if there are any."""
        batch = pages or make_batch(self.engine, self.params, num_rows, context)
        texts = texts_for(self.engine.drafter, self.target.tokenizer)
        show = functools.partial(Progress, num_before=0, unit="timing", in_place=True)
        costs = measure_costs(batch, context, num_rows, show, texts)
        if shorter is not None:
            return shorter.followed_by(costs)
        if jax.process_count() > 1:
            return costs
        if pages is not None and self._of_batch is not None and self._of_batch.decided:
            names = AcceptanceRates._fields
            known = {name: getattr(self._of_batch, name) for name in names}
            return dataclasses.replace(costs, **known)
        rates = measure_rates(batch, num_rows, self.target, self.max_seq_len)
        return dataclasses.replace(costs, **rates._asdict())

    def _machine(self, num_rows: int, pages: PagedBatch | None) -> dict[str, Any]:
        """Returns what else costs depend on, and how they are measured."""
        here, engine = environment(), self.engine
        machine = {
            **{name: here[name] for name in _MACHINE},
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
            "method": _METHOD,
            "bytes": [tree_bytes(part) for part in self.params],
            "batch_size": num_rows,
            "rates_within": min(self.max_seq_len, LONGEST_MEASURED),
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
        return machine


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
            say(f"note: {path}: {error}: measuring anew")
    say(f"measuring what {what} cost on this machine, once for these models and settings")
    costs = measure()
    with contextlib.suppress(InputError):  # others have measured meanwhile
        entries = read_json(path)
    keep(path, entries | {name: costs.to_json()}, "costs")
    return costs


def explain_no_drafts(
    result: Result, drafter: Drafter, costs: RoundCosts, context: int
) -> str | None:
    """Returns one line that says, of each drafter, why no round of an answer had drafts.

    What `Control` expects is computed for a few moments of the answer, as for a row that has not
    drafted; of each drafter the moment and the number of drafts count that promise the most.

    Args:
      result: the answer.
      drafter: the engine's, which chose among numbers of drafts.
      costs: those of its rounds.
      context: the cache slots of the answer's row.

    Returns:
      None if a round had drafts, if there was no round, or if the costs do not explain it.
    """
    if not result.stats.rounds or result.stats.num_proposed:
        return None
    control = _rows_at_moments(result, drafter, costs, context)
    num_read = len(result.prompt_token_ids)
    most = min(result.settings.max_new_tokens, context - num_read)
    room = jnp.maximum(most - control.num_emitted, 1)
    reasons = []
    for name in drafters_of(drafter.kinds):
        options = []
        for index, member in enumerate(drafter.kinds):
            if member.drafter == name:
                kind, lag = jnp.full_like(room, index), jnp.full_like(room, num_read)
                seconds = control.seconds_per_token(control.costs, kind, lag, room)
                slowdown = np.asarray(seconds / seconds[:, :1])[:, 1:].min(axis=0)
                tokens = np.asarray(control.expected_tokens(kind, is_proven=False))[0, 1:]
                options += zip(slowdown, costs.numbers[1:], tokens, strict=True)
        always_drafts = any(kind.is_certain for kind in drafter.kinds if kind.drafter == name)
        reasons.append(_reason(name, costs, context, *min(options), always_drafts=always_drafts))
    known = [reason for reason in reasons if reason is not None]
    return f"no drafts: {'; '.join(known)}" if known else None


def _reason(
    name: str,
    costs: RoundCosts,
    context: int,
    slowdown: float,
    number: int,
    tokens: float,
    *,
    always_drafts: bool,
) -> str | None:
    place = costs.drafters.index(name)
    seconds = costs.at(context)[place]
    steps = seconds[costs.numbers.index(number)] / seconds[0]
    unit = "draft" if number == 1 else "drafts"
    a_round = f"with {number} {unit} by {name} a round costs {steps:.2f} plain steps"
    if slowdown > 1:
        has_reading = costs.reading_at(context)[place] > 0
        reading = ", the reading of the prompt included" if has_reading else ""
        return (
            f"{a_round} and gives about {tokens:.2f} tokens, {slowdown:.2f} times as slow as plain "
            f"decoding{reading}"
        )
    if not always_drafts:
        return f"{name} found none"
    return f"{a_round}, too many to try" if steps > _MOST_TRIED else None


def _rows_at_moments(result: Result, drafter: Drafter, costs: RoundCosts, context: int) -> Control:
    """Returns a control whose rows are the answer's at some moments, from its first round on."""
    control = Control.init(_NUM_MOMENTS, kinds=drafter.kinds, numbers=costs.numbers)
    last = max(len(result.token_ids) - 1, 1)
    emitted = jnp.asarray(np.linspace(1, last, _NUM_MOMENTS).round(), jnp.int32)
    control = control.replace(
        costs=jnp.broadcast_to(costs.at(context), control.costs.shape),
        reading=jnp.broadcast_to(costs.reading_at(context), control.reading.shape),
        num_emitted=emitted,
        num_undrafted=emitted,
        owed=jnp.full_like(control.owed, -1e6),  # so that what is assumed of drafts counts
    )
    if not costs.decided:
        return control
    accepted, decided = np.array([costs.accepted, costs.decided], np.float32)
    return control.with_measured(accepted, decided, costs.answer_tokens)
