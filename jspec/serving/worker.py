"""The thread that computes: it alone touches the device, and hands out the results."""

import threading
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jspec.common.errors import InputError, describe_error
from jspec.generation.generator import Generator
from jspec.generation.paged_batch import PagedBatch
from jspec.generation.pattern_processor import MAX_STATES
from jspec.generation.request import Request, SamplingParams
from jspec.generation.rows import Row
from jspec.sampling.settings import PROCESSORS, Switches
from jspec.serving.job import Job, Update
from jspec.serving.many_processes import LeadingSlots
from jspec.serving.scheduler import Scheduler
from jspec.serving.slots import BatchSlots

# Everything that a request may ask for, compiled in: a request that asks for less has neutral
# values there, which change none of its tokens.
ALL_SWITCHES = Switches(True, True, True, PROCESSORS, logprobs=True, top_logprobs=True)
PREFILL_BUDGET = 64  # tokens
_IDLE = 2.0  # seconds between two signs of life while there is nothing to do
_NEVER = np.float32(1e9)  # seconds: a round of this cost is never chosen


def make_slots(
    generator: Generator,
    *,
    prefill_budget: int = PREFILL_BUDGET,
    cache_bytes: int | None = None,
    prefix_cache_bytes: int | None = None,
) -> BatchSlots:
    """Returns `generator.batch_size` slots of this process's devices.

    `cache_bytes` is for the pages of keys and values, on each device; None takes enough for all
    slots, or what is free. The prefix cache uses pages that no slot needs, `prefix_cache_bytes` at
    most unless that is None.

    Raises:
      InputError: if there is not enough memory for the slots.
    """
    # Now, by all processes together and before anything else runs: requests only look them up.
    is_coupled = generator.engine.is_coupled
    if not is_coupled:  # then texts depend on the costs, which are those that a Generator measures
        generator.round_costs.know_all()
    switches = ALL_SWITCHES._replace(processors=(*PROCESSORS, *generator.processors))
    compiled = generator.engine, generator.params, generator.compile_notice
    sizes = generator.batch_size, generator.max_seq_len
    batch = PagedBatch(*compiled, *sizes, switches, cache_bytes)
    if is_coupled:
        generator.round_costs.know_all(batch)
    if prefix_cache_bytes is None:
        prefix_cache_bytes = batch.num_pages * sum(batch.page_bytes)
    return BatchSlots(batch, prefix_cache_bytes, prefill_budget)


def make_scheduler(
    generator: Generator,
    *,
    max_queue: int,
    rounds_per_visit: int | None,
    prefill_budget: int = PREFILL_BUDGET,
    cache_bytes: int | None = None,
    prefix_cache_bytes: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Scheduler:
    """Returns a scheduler of slots, see `make_slots`, whose programs are compiled.

    Of several processes only the first makes it; the others `follow` it.

    Raises:
      InputError: if there is not enough memory for the slots.
    """
    local_slots = make_slots(
        generator, prefill_budget=prefill_budget, cache_bytes=cache_bytes,
        prefix_cache_bytes=prefix_cache_bytes,
    )  # fmt: skip
    slots = local_slots if jax.process_count() == 1 else LeadingSlots(local_slots)
    scheduler = Scheduler(
        slots, generator.target, generator.num_draft_tokens, max_queue=max_queue,
        rounds_per_visit=rounds_per_visit, prefill_budget=prefill_budget, clock=clock,
    )  # fmt: skip
    # So that no client waits for a compiler: prompts with chunks of each width.
    longest = generator.max_seq_len - 1
    for length in {min(2, longest), min(generator.engine.warm_up_length, longest)}:
        ids = [token % generator.target.config.vocab_size for token in range(length)]
        is_short = length == 2  # of which the logits of every token are computed, too
        request = Request(ids, SamplingParams(2, logprobs=is_short, prompt_logprobs=is_short))
        scheduler.submit([Job(request, make_row(generator, request), lambda update: None)])
        while scheduler.is_busy:
            for _ in scheduler.step():
                pass
    slots.run(0)  # where all answers ended with their first tokens
    slots.clear()
    return scheduler


def check_pattern(generator: Generator, pattern: str | None, *, is_schema: bool = False) -> None:
    """Makes the tables of a pattern, so that the thread that computes need not.

    Raises:
      InputError: they cannot be made; for a schema the message does not show the expression.
    """
    if pattern is None:
        return
    try:
        settings = SamplingParams(pattern=pattern)
        generator.pattern_processor.init(settings, prompt=[], stop_ids=[], vocab_size=0)
    except InputError as error:
        if not is_schema or "tokenizer" in str(error) or "spell" in str(error):
            raise
        raise InputError(
            "expected a smaller JSON schema, with fewer or shorter strings (maxLength) and without "
            f"open objects, got one whose expression is too large: {MAX_STATES - 1} states at most"
        ) from None


def make_row(
    generator: Generator,
    request: Request,
    most_drafts: int | None = None,
    drafter: str | None = None,
) -> Row:
    """Returns a request in the form that the engine takes.

    Args:
      generator: what will answer it.
      request: a prompt of token ids, and settings.
      most_drafts: maximum number of drafts in each of its rounds; 0 decodes plainly. None leaves
        the number to it.
      drafter: the one of its drafters that may propose; "none" decodes plainly, and None
        leaves the choice to it.

    Raises:
      InputError: the models cannot answer it, another drafter, or fewer drafts or none where the
        generator's number is fixed.
    """
    row = generator.round_costs.add_to(generator.make_row(request))
    number = generator.num_draft_tokens
    most = number if most_drafts is None else most_drafts
    if drafter in (None, generator.drafter) and most >= number:
        return row
    if row.costs is None:
        own = f"num_draft_tokens {number} and drafter {generator.drafter!r}"
        got = (
            f"num_draft_tokens {most_drafts}" if most < number else f"drafter {str(drafter)[:60]!r}"
        )
        raise InputError(
            f"expected in speculation this server's own {own}, which are fixed, or a server with "
            f"--num_draft_tokens=auto; got {got}"
        )
    assert generator.costs is not None
    names = generator.costs.drafters
    if drafter not in (None, "none", *names):
        known = ", ".join(("none", *names))
        raise InputError(f"expected a speculation.drafter among {known}, got {drafter[:60]!r}")
    # By drafter and number; no drafts are always allowed.
    numbers = np.array(generator.engine.numbers)
    is_own = np.array([drafter in (None, name) for name in names])[:, None]
    is_allowed = (numbers == 0) | (is_own & (numbers <= most))
    *rounds, reading = row.costs
    together, alone = (np.where(is_allowed, seconds, _NEVER) for seconds in rounds)
    return row._replace(costs=(together, alone, reading))


class Worker:
    """Steps the scheduler in its own thread, as long as there is anything to do.

    Attributes:
      error: what has ended the thread, in one line; None while it runs.
      cause: that error itself.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        observe: Callable[[Update], object],
        on_failure: Callable[[], object],
    ) -> None:
        """Nothing runs before `start`.

        Args:
          scheduler: what is stepped.
          observe: called with every update, in the thread.
          on_failure: called in the thread, once, if the device fails.
        """
        self.scheduler = scheduler
        self.error: str | None = None
        self.cause: Exception | None = None
        self._observe, self._on_failure = observe, on_failure
        self._wake, self._is_stopped = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="jspec-worker", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Takes requests in, all or none; raises what `Scheduler.submit` does."""
        self.scheduler.submit(jobs)
        with self._wake:
            self._wake.notify()

    def stop(self) -> None:
        """Ends the thread after the visit in progress."""
        with self._wake:
            self._is_stopped = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                is_awake = lambda: self._is_stopped or self.scheduler.is_busy  # noqa: E731
                self._wake.wait_for(is_awake, _IDLE)
            if self._is_stopped:
                return
            try:
                if not self.scheduler.is_busy:
                    self.scheduler.slots.keep_alive()
                for update in self.scheduler.step():
                    self._tell(update)
            except Exception as error:  # of the device: no memory left, for one
                self.error, self.cause = describe_error(error), error
                for update in self.scheduler.abandon(self.error):
                    self._tell(update)
                self._on_failure()
                return

    def _tell(self, update: Update) -> None:
        self._observe(update)
        update.job.on_update(update)
