"""The scheduler on a simulated device and a virtual clock: who runs when, and how it ends."""

import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.generation.answer import Round
from jspec.generation.request import Request, SamplingParams
from jspec.generation.result import RoundCounts, TokenLogprob
from jspec.generation.rows import Row
from jspec.serving.job import DrainingError, Job, QueueFullError
from jspec.serving.prefix_tree import PrefixTree
from jspec.serving.scheduler import Scheduler
from tests.tiny_models import make_model

_CHUNK, _ROUND = 0.5, 1.0  # virtual seconds
_WIDTH = 8  # tokens of a chunk


class Simulation:
    """Slots whose answers are the letters after their seeds, two tokens a round, one drafted.

    They have memory for `memory` tokens in all.
    """

    usage = 0.0

    def __init__(self, num_slots, *, memory=10**9, **options):
        self.memory, self.held = memory, {}
        self.moment, self.rows, self.states = 0.0, range(num_slots), {}
        self.most_at_once, self.log, self.tree = 0, [], PrefixTree(0)
        self.reading, self.runs = None, []  # runs: moments at which the device ran rounds
        options = {"max_queue": 100, "rounds_per_visit": 2, "prefill_budget": _WIDTH} | options
        self.scheduler = Scheduler(self, make_model(), 1, clock=lambda: self.moment, **options)

    def begin(self, row, request, saved=None):
        assert row not in self.states, "a slot is filled while its answer goes on"
        assert self.reading is None, "two prompts are read at once"
        if not self._hold(row, len(request.prompt) + 2):
            return None
        self.reading = [row, request, 0]
        self.saved = saved
        self.most_at_once = max(self.most_at_once, len(self.states) + 1)
        return 0

    def read(self, row):
        assert self.reading[0] == row
        _, request, begin = self.reading
        self.moment += _CHUNK
        self.reading[2] = min(begin + _WIDTH, len(request.prompt))
        count = self.reading[2] - begin
        if self.reading[2] < len(request.prompt):
            return count, None
        self.reading = None
        if self.saved is not None:
            self.states[row] = self.saved
            seed, num_prompt, num_tokens = self.saved
            expected = [97 + (seed + i) % 26 for i in range(num_tokens - 1)]
            assert request.prompt[num_prompt:] == expected, "not all tokens but the newest"
            return count, Round([])
        self.states[row] = [request.settings.seed, len(request.prompt), 0]
        return count, Round(self._next(row, 1))

    def _hold(self, row, count):
        if sum(self.held.values()) - self.held.get(row, 0) + count > self.memory:
            return False
        self.held[row] = count
        return True

    def reserve(self, row, num_rounds, is_extra=False):
        _, num_prompt, num_tokens = self.states[row]
        return self._hold(row, num_prompt + num_tokens + 2 * num_rounds)

    def pause(self, row):
        is_read = self.reading is not None and self.reading[0] == row
        saved = self.saved if is_read else self.states.get(row)
        self.finish(row)
        return saved

    def run(self, num_rounds):
        self.runs.append(self.moment)
        self.moment += _ROUND * num_rounds
        self.last = num_rounds
        return _ROUND * num_rounds

    def rounds(self, row):
        for _ in range(self.last):
            tokens = self._next(row, 2)
            yield Round(tokens, [TokenLogprob(-1.0, -2.0)] * 2, RoundCounts(2, 1, "toy"))

    def finish(self, row, answer=(), text=()):
        del self.held[row]
        if self.reading is not None and self.reading[0] == row:
            self.reading = None
        else:
            del self.states[row]

    def _next(self, row, count):
        seed, _, begin = self.states[row]
        self.states[row][2] += count
        return [97 + (seed + begin + i) % 26 for i in range(count)]

    def job(self, seed=0, length=6, priority=0, deadline=None, key="", num_prompt=2, **settings):
        settings = SamplingParams(seed=seed, max_new_tokens=length, **settings)
        prompt = [1] * num_prompt
        row = Row(settings, prompt, (0,), num_prompt + length)
        request = Request(prompt, settings)
        return Job(request, row, self.log.append, priority, deadline, key)

    def step(self):
        updates = list(self.scheduler.step())
        for update in updates:
            update.job.on_update(update)
        return updates

    def run_all(self, arrivals=()):
        """Submits each (moment, job) in its time; returns (moment, seed, tokens) as they come."""
        arrivals, seen = list(arrivals), []
        while arrivals or self.scheduler.is_busy:
            while arrivals and (arrivals[0][0] <= self.moment or not self.scheduler.is_busy):
                self.moment = max(self.moment, arrivals[0][0])
                self.scheduler.submit([arrivals.pop(0)[1]])
            for update in self.step():
                settings = update.job.request.settings
                seen.append((update.moment, settings.seed, update.chunk.token_ids))
        return seen

    def results(self):
        """Returns the results by seed; each answer ends once."""
        results = [update.chunk.result for update in self.log if update.chunk.result is not None]
        by_seed = {result.settings.seed: result for result in results}
        assert len(by_seed) == len(results)
        return by_seed


def random_arrivals(simulation, count=60):
    rng = np.random.default_rng(0)
    moments = np.cumsum(rng.exponential(1.5, count))
    lengths = rng.integers(1, 20, count)
    return [
        (float(moment), simulation.job(seed, int(length)))
        for seed, (moment, length) in enumerate(zip(moments, lengths, strict=True))
    ]


def test_the_same_arrivals_give_the_same_schedule():
    """Guards against a schedule that depends on anything but arrivals; another order differs."""
    seen = []
    for is_swapped in (False, False, True):
        simulation = Simulation(4)
        arrivals = random_arrivals(simulation)
        if is_swapped:
            first, second = arrivals[:2]
            arrivals[:2] = [(first[0], second[1]), (second[0], first[1])]
        seen.append(simulation.run_all(arrivals))
    assert seen[0] == seen[1]
    assert seen[0] != seen[2]


def test_every_answer_is_whole_and_in_its_own_words():
    """Guards against slots that mix answers, stay empty while others wait, or overflow."""
    simulation = Simulation(4)
    arrivals = random_arrivals(simulation)
    simulation.run_all(arrivals)
    assert simulation.most_at_once == 4
    assert simulation.states == {}
    results = simulation.results()
    assert len(results) == len(arrivals)
    for seed, result in results.items():
        length = result.settings.max_new_tokens
        assert result.text == "".join(chr(97 + (seed + i) % 26) for i in range(length))
        assert result.finish_reason == "length"
    starts = [job.started for _, job in arrivals]
    assert starts == sorted(starts), "first come, first served"


def test_where_memory_runs_out_the_last_answer_waits_and_goes_on_where_it_was():
    """Guards against answers that lose or repeat tokens, that wait for ever, or that end early."""
    simulation = Simulation(4, memory=60)
    arrivals = [(float(n), simulation.job(n, 20 + n, num_prompt=9)) for n in range(12)]
    simulation.run_all(arrivals)
    assert simulation.scheduler.num_paused > 3
    assert simulation.held == {}
    results = simulation.results()
    assert len(results) == len(arrivals)
    for seed, result in results.items():
        assert result.text == "".join(chr(97 + (seed + i) % 26) for i in range(20 + seed))
    first = next(update for update in simulation.log if update.chunk.result)
    assert first.job is arrivals[0][1], "the first one is never paused"


def test_the_least_urgent_answer_is_paused_first():
    simulation = Simulation(3, memory=40, prefill_budget=100)
    jobs = [simulation.job(n, 30, priority) for n, priority in enumerate((5, 0, 1))]
    simulation.scheduler.submit(jobs)
    while not simulation.scheduler.num_paused:
        simulation.step()
    assert jobs[0].paused is not None
    assert [job.paused for job in jobs[1:]] == [None, None]


def test_an_answer_that_is_paused_can_be_cancelled_and_keeps_its_text():
    simulation = Simulation(2, memory=24)
    jobs = [simulation.job(seed, length=15) for seed in range(2)]
    simulation.scheduler.submit(jobs)
    while jobs[1].paused is None:
        simulation.step()
    simulation.scheduler.cancel(jobs[1])
    simulation.run_all()
    results = simulation.results()
    assert results[1].finish_reason == "cancelled"
    assert results[1].text.startswith("bcd")
    assert results[0].text == "abcdefghijklmno"


def test_a_smaller_priority_goes_first():
    simulation = Simulation(1)
    jobs = [simulation.job(seed, priority=priority) for seed, priority in enumerate((0, 5, -1, 0))]
    simulation.scheduler.submit(jobs)
    simulation.run_all()
    assert sorted(range(4), key=lambda i: jobs[i].started) == [2, 0, 3, 1]


def test_origins_log_probabilities_and_counts_belong_to_the_tokens():
    """Guards against colours that are shifted: the prefill's token, then (draft, own) a round."""
    simulation = Simulation(1)
    simulation.scheduler.submit([simulation.job(length=6, logprobs=True)])
    first, second, third = simulation.step() + simulation.step()
    assert (first.is_drafted, first.rounds) == ([False], [])
    assert second.is_drafted == [True, False, True, False]
    assert second.logprobs == [TokenLogprob(-1.0, -2.0)] * 4
    assert second.rounds == [RoundCounts(2, 1, "toy")] * 2
    assert (third.is_drafted, third.chunk.token_ids) == ([True], [97 + 5])
    assert third.rounds == [RoundCounts(1, 1, "toy")], "drafts past the end do not count"
    assert third.chunk.result.stats.rounds == (*second.rounds, *third.rounds)


def test_the_queue_has_an_end():
    """Free slots count as room; requests are taken all or none; room comes back."""
    simulation = Simulation(2, max_queue=1)
    scheduler = simulation.scheduler
    with pytest.raises(QueueFullError, match=r"at most 3 more answers .* got 4"):
        scheduler.submit([simulation.job(seed) for seed in range(4)])
    assert not scheduler.is_busy
    scheduler.submit([simulation.job(seed, length=60) for seed in range(3)])
    with pytest.raises(QueueFullError) as caught:
        scheduler.submit([simulation.job(9)])
    assert caught.value.retry_after >= 1
    simulation.step()
    simulation.step()
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    simulation.run_all()
    scheduler.submit([simulation.job(seed) for seed in range(10, 13)])
    assert len(simulation.results()) == 3


def test_who_is_sent_away_is_told_when_there_may_be_room():
    """The mean seconds of an answer for each that waits, over the slots; two minutes at most."""
    simulation = Simulation(2, max_queue=1)
    for seed in range(60):
        simulation.run_all([(simulation.moment, simulation.job(seed, length=21))])
    seconds = _CHUNK + 2 * 5 * _ROUND  # four tokens a visit, after the first one
    for length, expected in ((21, 2 * seconds), (4000, 120)):
        simulation.run_all([(simulation.moment, simulation.job(99 + length, length=length))])
        jobs = [simulation.job(seed) for seed in range(200 + length, 204 + length)]
        simulation.scheduler.submit(jobs[:3])
        with pytest.raises(QueueFullError) as caught:
            simulation.scheduler.submit(jobs[3:])
        assert caught.value.retry_after == expected
        simulation.run_all()


@pytest.mark.parametrize("is_running", [False, True])
def test_a_cancelled_request_leaves_within_one_visit(is_running):
    simulation = Simulation(1)
    jobs = [simulation.job(seed, length=1000) for seed in range(2)]
    simulation.scheduler.submit(jobs)
    simulation.step()
    simulation.scheduler.cancel(jobs[0 if is_running else 1])
    simulation.step()
    (result,) = simulation.results().values()
    assert result.finish_reason == "cancelled"
    assert len(result.token_ids) == (5 if is_running else 0)
    assert simulation.scheduler.num_running == 1
    assert simulation.scheduler.num_waiting == 0
    assert (jobs[1].started is not None) == is_running


def test_deadlines_end_answers_as_they_are():
    """One runs and keeps what it has, one waits and has nothing, one is in time."""
    simulation = Simulation(1)
    jobs = [
        simulation.job(0, length=100, deadline=4.0),
        simulation.job(1, deadline=3.0),
        simulation.job(2, deadline=100.0),
    ]
    simulation.scheduler.submit(jobs)
    simulation.run_all()
    ends = {seed: (result.finish_reason, len(result.token_ids)) for seed, result in
            simulation.results().items()}  # fmt: skip
    assert ends == {0: ("deadline", 9), 1: ("deadline", 0), 2: ("length", 6)}


def test_draining_ends_what_is_left_and_takes_nothing_new():
    simulation = Simulation(1)
    simulation.scheduler.submit([simulation.job(0, length=1), simulation.job(1, length=500)])
    simulation.scheduler.drain(10.0)
    with pytest.raises(DrainingError):
        simulation.scheduler.submit([simulation.job(2)])
    simulation.run_all()
    assert [result.finish_reason for result in simulation.results().values()] == [
        "length",
        "deadline",
    ]
    assert 10 <= simulation.moment <= 13


def test_an_answer_without_a_token_fails_when_the_time_is_over():
    """One has tokens, one is being read, two wait, one of which nobody waits for."""
    simulation = Simulation(2)
    jobs = [simulation.job(seed, 500, num_prompt=2 if seed == 0 else 400) for seed in range(4)]
    simulation.scheduler.submit(jobs)
    simulation.step()
    assert (simulation.scheduler.num_running, simulation.scheduler.num_waiting) == (2, 2)
    simulation.scheduler.drain(0.0)
    simulation.scheduler.cancel(jobs[3])
    simulation.run_all()
    ends = [
        (result.finish_reason, result.error) for _, result in sorted(simulation.results().items())
    ]
    refused = "failed", str(DrainingError())
    assert ends == [("deadline", None), refused, refused, ("cancelled", None)]


def test_a_long_prompt_does_not_stop_the_others():
    """Between two visits of the device no more than the budget's chunks are read."""
    for budget, most in ((1, 1), (_WIDTH, 1), (3 * _WIDTH, 3)):
        simulation = Simulation(2, prefill_budget=budget)
        simulation.scheduler.submit([simulation.job(0, length=60)])
        simulation.step()
        simulation.scheduler.submit([simulation.job(1, num_prompt=10 * _WIDTH + 1)])
        simulation.run_all()
        gaps = np.diff(simulation.runs) - 2 * _ROUND
        assert max(gaps) == most * _CHUNK
        assert sum(gaps) == 11 * _CHUNK
        lengths = {seed: len(result.token_ids) for seed, result in simulation.results().items()}
        assert lengths == {0: 60, 1: 6}


def test_empty_slots_are_filled_in_one_visit():
    """A budget for each that a request waits for: else most stay empty while prompts come."""
    simulation = Simulation(4, prefill_budget=4)
    simulation.scheduler.submit([simulation.job(seed, length=60) for seed in range(3)])
    simulation.step()
    assert len(simulation.states) == 3
    simulation.scheduler.submit([simulation.job(seed, num_prompt=9) for seed in (3, 4)])
    simulation.step()
    assert len(simulation.states) == 3, "one slot, one budget: less than that prompt"


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_prompt_that_nobody_waits_for_is_not_read_to_its_end(is_cancelled):
    """Its slot is free after the visit, for the next request; the answer has no token."""
    simulation = Simulation(1)
    deadline = None if is_cancelled else 0.5 * _CHUNK
    first = simulation.job(0, num_prompt=100 * _WIDTH, deadline=deadline)
    simulation.scheduler.submit([first, simulation.job(1)])
    simulation.step()
    assert simulation.reading is not None
    if is_cancelled:
        simulation.scheduler.cancel(first)
    simulation.run_all()
    results = simulation.results()
    assert results[0].finish_reason == ("cancelled" if is_cancelled else "deadline")
    assert (results[0].token_ids, len(results[1].token_ids)) == ([], 6)
    assert simulation.moment < 20


def test_a_key_with_many_requests_does_not_delay_another():
    """20 requests of one key wait when another key comes: its first one is the next."""
    simulation = Simulation(1)
    many = [simulation.job(seed, key="many") for seed in range(20)]
    few = [simulation.job(seed, key="few") for seed in range(20, 23)]
    simulation.scheduler.submit(many)
    for _ in range(9):
        simulation.step()
    simulation.scheduler.submit(few)
    num_started = sum(job.started is not None for job in many)
    simulation.run_all()
    order = sorted(many + few, key=lambda job: job.started)
    places = [order.index(job) - num_started for job in few]
    assert places == [0, 2, 4], "they take turns"


def test_keys_share_by_tokens_and_not_by_requests():
    """One asks for answers five times as long: the other user gets five for one while both wait."""
    simulation = Simulation(1)
    long = [simulation.job(seed, length=48, key="long") for seed in range(10)]
    short = [simulation.job(seed, length=8, key="short") for seed in range(10, 40)]
    simulation.scheduler.submit(long + short)
    simulation.run_all()
    order = sorted(long + short, key=lambda job: job.started)
    among = order[: order.index(short[-1])]
    assert 4 <= len(short) / sum(job in long for job in among) <= 6


def test_a_key_that_was_away_has_saved_nothing_up():
    """Guards against a key that comes late and then has the device for itself."""
    simulation = Simulation(1)
    simulation.scheduler.submit([simulation.job(seed, key="early") for seed in range(30)])
    for _ in range(30):
        simulation.step()
    late = [simulation.job(seed, key="late") for seed in range(30, 50)]
    simulation.scheduler.submit(late)
    simulation.run_all()
    starts = sorted(job.started for job in late)
    assert min(np.diff(starts)) > 3.5, "another key's answer lies between"


def test_keys_that_have_left_are_forgotten():
    """Guards against a server that remembers every user there ever was."""
    simulation = Simulation(2)
    for seed in range(300):
        simulation.scheduler.submit([simulation.job(seed, key=str(seed))])
        simulation.step()
        simulation.step()
    assert len(simulation.scheduler._waiting._served) < 10
    simulation.run_all()
    assert len(simulation.results()) == 300


def test_visits_are_long_where_rounds_are_fast_while_nobody_waits_and_memory_lasts(monkeypatch):
    """Guards against prompts, read a part a visit, that wait for long visits; and early pauses."""
    monkeypatch.setattr(f"{__name__}._ROUND", 0.004)
    simulation = Simulation(1, rounds_per_visit=None, memory=130)
    first, second = simulation.job(0, 120), simulation.job(1, 5)

    def visit():
        simulation.step()
        return simulation.last

    simulation.scheduler.submit([first])
    assert [visit() for _ in range(4)] == [2, 4, 8, 10]
    simulation.scheduler.submit([second])
    assert visit() == 2
    simulation.scheduler.cancel(second)
    lengths = []
    while simulation.scheduler.is_busy:
        lengths.append(visit())
    assert lengths == [10, 10, 10, 2, 2]  # the prompt's tokens, 113, and 20 fit no more
    assert simulation.scheduler.num_paused == 0
    assert len(simulation.results()[0].token_ids) == 120


def test_a_failed_device_fails_every_answer():
    simulation = Simulation(1)
    simulation.scheduler.submit([simulation.job(seed) for seed in range(3)])
    simulation.step()
    for update in simulation.scheduler.abandon("no memory"):
        update.job.on_update(update)
    assert [result.error for result in simulation.results().values()] == ["no memory"] * 3
    assert not simulation.scheduler.is_busy
    with pytest.raises(InputError):
        simulation.scheduler.submit([simulation.job(9)])
