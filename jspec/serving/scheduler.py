"""Which request runs in which slot, and when: pure Python over the programs of a batch.

In one visit of the device the scheduler ends cancelled and expired requests, reads a budget of
prompt tokens into free slots (so that running answers do not wait for a long prompt), and lets all
slots run some rounds. Where memory runs out, the answer that began last among those of the least
urgent priority is paused; it goes on later from the tokens that it has. The only clock is the one
passed in: equal arrivals give equal schedules.
"""

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from jspec.generation.answer import Answer, Round
from jspec.generation.engine import VisitLength
from jspec.generation.result import RoundCounts
from jspec.serving.job import CANCELLED, EXPIRED, DrainingError, Job, QueueFullError, Update
from jspec.serving.many_processes import LeadingSlots
from jspec.serving.slots import BatchSlots
from jspec.weights.resolver import LoadedModel

_ROUNDS_PER_VISIT = 2  # at least
_MEMORY = 0.9  # what is left of the mean seconds of an answer when another one has ended
_LONGEST_WAIT = 120  # seconds that a client is told to wait, at most


class FairQueue:
    """Requests that wait for a slot, by priority, by the share their key has had, by arrival.

    Among the requests of the smallest `priority`, the key that has been served the fewest tokens
    (prompts and answers together) goes first, with its oldest request. A key that comes anew,
    or again, begins with the count of the least served key that is there: idle keys earn no credit
    (arXiv 2401.00588). With one key the queue is first come, first served.
    """

    def __init__(self) -> None:
        self._waiting: list[Job] = []  # in the order of their arrival
        self._present = Counter[str]()  # requests of each key, waiting or running
        self._served: dict[str, int] = {}  # tokens

    def __len__(self) -> int:
        """Returns how many requests wait."""
        return len(self._waiting)

    def add(self, job: Job) -> None:
        """Lets a request wait."""
        if not self._present[job.key]:
            # Where nobody is there, all begin again.
            least = min((self._served[key] for key in self._present), default=math.inf)
            # Whoever has had no more than that would begin with it anyway.
            self._served = {key: n for key, n in self._served.items()
                            if n > least or self._present[key]}  # fmt: skip
            self._served.setdefault(job.key, int(least) if self._present else 0)
        self._present[job.key] += 1
        self._waiting.append(job)

    def first(self) -> Job:
        """Returns the request whose turn it is, without removing it."""
        return min(self._waiting, key=lambda job: (job.priority, self._served[job.key]))

    def take(self, job: Job) -> None:
        """Removes a request, as it gets a slot."""
        self._waiting.remove(job)

    def put_back(self, job: Job) -> None:
        """Puts a request that was taken back, before all that came after it."""
        self._waiting.insert(0, job)

    def take_all(self, is_meant: Callable[[Job], bool] = lambda job: True) -> list[Job]:
        """Removes the requests that a test picks, and returns them in the order of arrival."""
        taken = [job for job in self._waiting if is_meant(job)]
        for job in taken:
            self._waiting.remove(job)
            self.end(job)
        return taken

    def charge(self, job: Job, num_tokens: int) -> None:
        """Counts tokens that a request which was taken has had."""
        self._served[job.key] += num_tokens

    def end(self, job: Job) -> None:
        """Forgets a request that waits no more, as its answer has ended."""
        self._present -= Counter([job.key])  # keys without any are left out


class Scheduler:
    """Gives slots to requests. `submit`, `cancel` and `drain` may come from any thread.

    Args:
      slots: the device.
      target: the model whose tokenizer and ends the answers have.
      num_draft_tokens: maximum number of drafts a round, for the answers' statistics.
      max_queue: maximum number of requests that wait while all slots are taken.
      rounds_per_visit: number of rounds on the device in a visit; None: as many as take 40 ms,
        from 2 on; 2 while a request waits, or where there is no memory for more.
      prefill_budget: tokens of prompts to read between two visits, for each slot that could run
        and does not; the chunk that reaches this number is the last.
      clock: returns the seconds of a clock.
    """

    def __init__(
        self,
        slots: BatchSlots | LeadingSlots,
        target: LoadedModel,
        num_draft_tokens: int,
        *,
        max_queue: int,
        rounds_per_visit: int | None,
        prefill_budget: int,
        clock: Callable[[], float],
    ) -> None:
        self.clock, self.max_queue = clock, max_queue
        self.slots, self._target, self._num_draft_tokens = slots, target, num_draft_tokens
        self._visit_length = VisitLength(
            rounds_per_visit or _ROUNDS_PER_VISIT, is_fixed=rounds_per_visit is not None
        )
        self._prefill_budget = prefill_budget
        self._lock = threading.Lock()  # of `_waiting` and `_running` as a whole, and `_drained_at`
        self._waiting = FairQueue()
        self._running: dict[int, tuple[Job, Answer]] = {}  # by slot
        self._reading: int | None = None  # the slot among them whose prompt is being read
        self._drained_at: float | None = None
        self._mean_seconds = 1.0  # of an answer, from its slot on
        self.num_paused = 0  # how often an answer has lost its slot so far

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Number of slots that are taken."""
        return len(self._running)

    @property
    def is_busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._waiting or self._running)

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return len(self.slots.rows)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Takes requests in, all or none.

        Raises:
          QueueFullError: the queue is full.
          DrainingError: no request is taken any more.
        """
        with self._lock:
            if self._drained_at is not None:
                raise DrainingError
            num_free = self.num_slots - self.num_running + self.max_queue - self.num_waiting
            if len(jobs) > num_free:
                told = f"expected at most {max(num_free, 0)} more answers to be asked for now, got "
                raise QueueFullError(f"{told}{len(jobs)}: the queue is full", self._retry_after())
            for job in jobs:
                job.submitted = self.clock()
                self._waiting.add(job)

    def cancel(self, job: Job) -> None:
        """Cancels a request; its slot is free after the visit in progress."""
        job.is_cancelled = True

    def drain(self, seconds: float) -> None:
        """Takes no more requests; after this many seconds answers end, or fail if not begun."""
        with self._lock:
            self._drained_at = self.clock() + seconds

    def abandon(self, error: str) -> Iterator[Update]:
        """Ends every answer as failed, for this reason, without touching the device."""
        self.drain(0.0)
        with self._lock:
            running = [*self._running.values()]
            running += [(job, self._begin(job)) for job in self._waiting.take_all()]
            self._running, self._reading = {}, None
        for job, answer in running:
            answer.finish_reason, answer.error = "failed", error
            yield Update(job, answer.take_chunk(), [], [], [], [], self.clock())

    def step(self) -> Iterator[Update]:
        """Makes one visit: ends requests, reads prompts, runs all slots. Yields what is new."""
        yield from self._end_unwanted()
        yield from self._read_prompts()
        num_rounds = self._make_room()
        decoding = [slot for slot in self._running if slot != self._reading]
        if decoding:
            seconds = self.slots.run(num_rounds)
            by_slot = {slot: [*self.slots.rounds(slot)] for slot in decoding}
            self._visit_length.note(seconds, max(map(len, by_slot.values())))
            for slot, rounds in by_slot.items():
                answer = self._running[slot][1]
                num_known = len(answer.rounds)
                answer.add_visit(seconds, rounds)
                yield self._update(slot, rounds, answer.rounds[num_known:])

    def _read_prompts(self) -> Iterator[Update]:
        """Reads on in the prompt that was begun, then in others: a budget for each idle slot."""
        num_idle = min(self.num_waiting, self.num_slots - self.num_running)
        num_left = self._prefill_budget * (num_idle + (self._reading is not None))
        while num_left > 0:
            if self._reading is None and not self._take_next():
                return
            slot = self._reading
            assert slot is not None
            num_read, first = self.slots.read(slot)
            num_left -= num_read
            if first is not None:
                self._reading = None
                if first.token_ids:
                    self._running[slot][1].add_first(first)
                    yield self._update(slot, [first], [])

    def _take_next(self) -> bool:
        """Begins to read the next prompt into a free slot; False without prompt, slot or memory."""
        with self._lock:
            free = [slot for slot in self.slots.rows if slot not in self._running]
            if not free or not self._waiting:
                return False
            job = self._waiting.first()
        row, saved = job.row, None
        if job.paused is not None:
            answer, saved = job.paused
            row = row._replace(prompt=[*row.prompt, *answer.token_ids[:-1]])
        num_cached = self.slots.begin(free[0], row, saved)
        if num_cached is None:
            return False
        with self._lock:
            self._waiting.take(job)
            if job.started is None:
                job.started, job.num_cached = self.clock(), num_cached
                self._waiting.charge(job, len(row.prompt) - num_cached)
            self._running[free[0]] = job, self._begin(job)
            self._reading, job.paused = free[0], None
        return True

    def _make_room(self) -> int:
        """Gives all answers memory for the next visit; pauses the last ones until it is enough.

        Returns:
          The number of rounds of the visit.
        """

        def rank(slot: int) -> tuple[int, float]:
            job = self._running[slot][0]
            return job.priority, job.started or 0.0  # the first time: one that was paused is older

        slots = sorted(self._running, key=rank)
        for slot in list(slots):
            while slot in self._running and slot != self._reading:
                if self.slots.reserve(slot, self._visit_length.least):
                    break
                self._pause(slots.pop())
        least, most = self._visit_length.least, self._visit_length.num_rounds
        if most == least or self._waiting or self._reading is not None:
            return least
        has_room = all(self.slots.reserve(slot, most, is_extra=True) for slot in self._running)
        return most if has_room else least

    def _pause(self, slot: int) -> None:
        """Lets an answer wait that has a slot."""
        saved = self.slots.pause(slot)
        self._reading = None if self._reading == slot else self._reading
        with self._lock:
            job, answer = self._running.pop(slot)
            job.paused = None if saved is None else (answer, saved)
            self._waiting.put_back(job)
            self.num_paused += 1

    def _begin(self, job: Job) -> Answer:
        new = 0, job.request, job.row, self._target, self._num_draft_tokens
        return Answer(*new) if job.paused is None else job.paused[0]

    def _end_unwanted(self) -> Iterator[Update]:
        """Ends the answers that were cancelled or are past their deadlines, waiting or running."""
        moment = self.clock()
        for slot, (job, answer) in list(self._running.items()):
            self._end(job, answer, moment)
            if answer.finish_reason is not None:
                yield self._update(slot, [], [])
        with self._lock:
            ended = self._waiting.take_all(lambda job: self._reason_to_end(job, moment) is not None)
        for job in ended:
            answer = self._begin(job)
            self._end(job, answer, moment)
            yield Update(job, answer.take_chunk(), [], [], [], [], moment)

    def _end(self, job: Job, answer: Answer, moment: float) -> None:
        """Says why an answer ends, if it does; as the server stops, one without a token fails."""
        reason = answer.finish_reason = self._reason_to_end(job, moment)
        if reason == EXPIRED and self._drained_at is not None and not answer.token_ids:
            answer.finish_reason, answer.error = "failed", str(DrainingError())

    def _reason_to_end(self, job: Job, moment: float) -> str | None:
        ends = (job.deadline, self._drained_at)
        limits = [limit for limit in ends if limit is not None]
        reason = EXPIRED if limits and moment >= min(limits) else None
        return CANCELLED if job.is_cancelled else reason

    def _update(self, slot: int, rounds: Sequence[Round], counts: list[RoundCounts]) -> Update:
        """Returns what is new in a slot; a slot whose answer has ended becomes free."""
        job, answer = self._running[slot]
        is_ended = answer.finish_reason is not None
        if is_ended:
            # After an error, what was computed may be no numbers.
            text = [*job.row.prompt, *answer.token_ids] if answer.error is None else []
            self.slots.finish(slot, answer.token_ids if answer.is_whole else (), text)
            self._reading = None if self._reading == slot else self._reading
        chunk, moment = answer.take_chunk(), self.clock()
        # In each round accepted drafts come first. What came after the answer's end is cut off.
        drafted = [
            n < a_round.counts.num_accepted
            for a_round in rounds
            for n in range(len(a_round.token_ids))
        ]
        is_wanted, num_new = job.request.settings.logprobs, len(chunk.token_ids)
        logprobs = [
            of_token for a_round in rounds for of_token in a_round.logprobs or () if is_wanted
        ]
        with self._lock:
            self._waiting.charge(job, num_new)
            if is_ended:
                assert job.started is not None
                self._waiting.end(job)
                del self._running[slot]
                self._mean_seconds += (1 - _MEMORY) * (moment - job.started - self._mean_seconds)
        drafts = [a_round.drafts for a_round in rounds[: len(counts)]]
        return Update(job, chunk, drafted[:num_new], logprobs[:num_new], counts, drafts, moment)

    def _retry_after(self) -> int:
        """Returns the seconds until another waiting request would get a slot, about."""
        expected = self._mean_seconds * (1 + self.num_waiting) / self.num_slots
        return min(max(math.ceil(expected), 1), _LONGEST_WAIT)
