"""How far a long job has come: lines, or one line of a terminal."""

import io

import pytest

from jspec.common import progress
from jspec.common.progress import Progress


class Terminal(io.StringIO):
    """What a program takes for a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    times = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: times[-1])
    return times


def show_all(clock):
    shown = Progress(30, 0, "timing", in_place=True)
    for count in range(1, 31):
        clock.append(100.0 + count / 2)
        shown.show(count)


def test_a_terminal_has_one_line(monkeypatch, clock):
    """Guards against a screen of progress, and a line that is left unfinished."""
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    show_all(clock)
    text = terminal.getvalue()
    assert text.count("\n") == 1
    assert text.startswith("\r1 of 30 timings\033[K\r2 of 30 timings\033[K")
    assert text.endswith("\r30 of 30 timings\033[K\n")


def test_elsewhere_there_are_a_few_lines(monkeypatch, clock):
    """Guards against control characters in a file, and a line for each timing."""
    monkeypatch.setattr("sys.stderr", file := io.StringIO())
    show_all(clock)
    lines = file.getvalue().splitlines()
    assert lines == [f"{count} of 30 timings" for count in (1, 11, 21, 30)]
