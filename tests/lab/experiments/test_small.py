"""Progress and times for people."""

import pytest

from jspec.common import progress
from jspec.common.progress import Progress, format_seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (60, "1 min"), (3540, "59 min"), (3660, "1 h 01 min")],
)
def test_format_seconds(seconds, text):
    """Guards against times that nobody can read."""
    assert format_seconds(seconds) == text


def test_progress_is_a_line_now_and_then(monkeypatch, capsys):
    """Guards against a line for each of thousands of cells, and against none at the end."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    shown = Progress(100, 40)
    for count in range(41, 101):
        clock[0] += 1
        shown.show(count, num_failed=int(count > 90))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "41 of 100 cells, about 59 s left"
    assert lines[1] == "46 of 100 cells, about 54 s left"
    assert lines[-1] == "100 of 100 cells, 1 failed"
    assert len(lines) == 13
    Progress(1, 0, "token").show(1, num_failed=0)
    assert capsys.readouterr().err == "1 of 1 token\n"
