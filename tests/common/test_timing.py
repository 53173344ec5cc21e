"""Turns of loops are timed together, and loops by turns; progress takes a line, or few."""

import io

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common import progress, timing
from jspec.common.progress import Progress
from jspec.common.timing import (
    least_seconds,
    seconds_each,
    seconds_in_turn,
    timed,
    with_first,
)


@pytest.fixture
def clock(monkeypatch):
    """Returns a clock in a list: it moves only where a test says so."""
    seconds = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: seconds[0])
    return seconds


def make_loop(clock, begin, seconds, calls, name="it"):
    """Returns a loop that notes its numbers of turns, and takes some seconds to begin."""

    def loop(num_turns):
        calls.append((name, int(num_turns)))
        clock[0] += begin + seconds * int(num_turns)
        return num_turns

    return loop


def test_a_loop_less_its_beginning_is_what_its_turns_take(clock):
    assert seconds_each(make_loop(clock, 5, 0.01, [])) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(1.0, 1), (0.0101, 11), (0.001, 32), (1e-4, 64), (1e-6, 8192)]
)
def test_turns_are_as_many_as_can_be_timed(seconds, expected, clock):
    """An eighth of a second at most, 32 at most, but at least five milliseconds."""
    calls = []
    assert seconds_each(make_loop(clock, 0, seconds, calls), repeats=1) == pytest.approx(seconds)
    assert [count for _, count in calls[-2:]] == [1 + expected, 1]


def test_loops_take_turns_and_change_their_order(clock):
    """Each is timed by itself, less its beginning."""
    calls = []
    loops = {
        "a": make_loop(clock, 5, 0.25, calls, "a"),
        "b": make_loop(clock, 1, 0.5, calls, "b"),
    }
    turns = list(seconds_in_turn(loops, repeats=3))
    assert turns == [{"a": pytest.approx(0.25), "b": pytest.approx(0.5)}] * 3
    assert [list(turn) for turn in turns] == [["a", "b"]] * 3
    timed = [name for name, _ in calls[-12:]]
    assert timed == ["a", "a", "b", "b", "b", "b", "a", "a", "a", "a", "b", "b"]


def test_only_the_first_number_is_replaced():
    array = with_first(jnp.ones([2, 3]), jnp.float32(7))
    np.testing.assert_array_equal(array, [[7, 1, 1], [1, 1, 1]])


def test_what_is_timed_has_finished_and_is_returned(clock):
    """Guards against the time of a call that has only been handed to the device."""

    class Result:
        is_there = False

        def block_until_ready(self):
            clock[0] += 2
            self.is_there = True
            return self

    def do():
        clock[0] += 1
        return Result()

    seconds, result = timed(do)
    assert (seconds, result.is_there) == (3, True)


def test_the_fastest_run_counts_less_its_beginning(clock):
    """Guards against compilation, a busy moment or the call of a loop in a machine's limits."""
    slow = iter([50, 90, 0, 0, 3, 0, 0, 2, *[1] * 20])

    def loop(num_turns):
        clock[0] += 7 + 0.25 * int(num_turns) + next(slow)
        return num_turns

    assert least_seconds(loop, repeats=6) == pytest.approx(0.25)


def test_a_loop_goes_on_from_where_it_was():
    """Each turn sees the constants and what the one before it left."""
    loop = timing.TurnLoop(lambda step, total: total + step, jnp.float32(2), jnp.float32(1))
    assert float(loop(jnp.int32(3))) == 7
    assert float(loop(jnp.int32(1))) == 9


class Terminal(io.StringIO):
    """What a program takes for a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def ticks(monkeypatch):
    times = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: times[-1])
    return times


def show_all(ticks):
    shown = Progress(30, 0, "timing", in_place=True)
    for count in range(1, 31):
        ticks.append(100.0 + count / 2)
        shown.show(count)


def test_a_terminal_has_one_line(monkeypatch, ticks):
    """Guards against a screen of progress, and a line that is left unfinished."""
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    show_all(ticks)
    text = terminal.getvalue()
    assert text.count("\n") == 1
    assert text.startswith("\r1 of 30 timings\033[K\r2 of 30 timings\033[K")
    assert text.endswith("\r30 of 30 timings\033[K\n")


def test_elsewhere_there_are_a_few_lines(monkeypatch, ticks):
    """Guards against control characters in a file, and a line for each timing."""
    monkeypatch.setattr("sys.stderr", file := io.StringIO())
    show_all(ticks)
    lines = file.getvalue().splitlines()
    assert lines == [f"{count} of 30 timings" for count in (1, 11, 21, 30)]
