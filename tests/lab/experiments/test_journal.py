"""Lines that are there or are not; progress and times for people."""

import errno
import os

import pytest

from jspec.common import progress
from jspec.common.errors import WorkdirError
from jspec.common.journal import Journal
from jspec.common.progress import Progress, format_seconds
from tests.programs import read_lines


def test_what_others_append_is_read_once(tmp_path):
    """Guards against lines read twice, or missed because somebody else wrote them."""
    first, second = (Journal(tmp_path / "j") for _ in range(2))
    assert first.read() == []
    assert first.append({"a": "é\n"}) == [{"a": "é\n"}]
    assert second.append({"b": 2}) == [{"a": "é\n"}, {"b": 2}]
    assert first.append({"c": 3}) == [{"b": 2}, {"c": 3}]
    assert second.read() == [{"c": 3}]
    assert second.read() == []
    assert len((tmp_path / "j").read_bytes().splitlines()) == 3


@pytest.mark.parametrize("torn", [b'{"cell": "x", "rec', b'{"a": 1', b'{"a": \n', b"3\n"])
def test_a_torn_last_line_is_cut_off(tmp_path, capsys, torn):
    """Guards against results lost with the line that a killed process left unfinished."""
    path = tmp_path / "j"
    path.write_bytes(b'{"a": 1}\n{"b": 2}\n' + torn)
    journal = Journal(path)
    assert journal.read() == [{"a": 1}, {"b": 2}]
    assert path.read_bytes() == b'{"a": 1}\n{"b": 2}\n'
    assert "its last line is torn" in capsys.readouterr().err
    with path.open("ab") as file:  # by a process that is killed while we work
        file.write(torn)
    assert journal.append({"c": 3}) == [{"c": 3}]
    assert Journal(path).read() == [{"a": 1}, {"b": 2}, {"c": 3}]


def test_what_comes_after_is_cut_off(tmp_path):
    """Guards against records of work that is done again, and against a torn line among them."""
    path = tmp_path / "j"
    path.write_bytes(b'{"a": 1}\n{"b": 2}\n{"c": 3}\n{"d')
    journal = Journal(path)
    journal.cut(2)
    assert journal.append({"e": 5}) == [{"e": 5}]
    assert read_lines(path) == [{"a": 1}, {"b": 2}, {"e": 5}]
    journal.cut(9)
    assert len(read_lines(path)) == 3


@pytest.mark.parametrize("broken", [b"{oops", b"", b"[]"])
def test_a_broken_line_in_the_middle_is_an_error_that_names_it(tmp_path, broken):
    """Guards against results thrown away because of one damaged line, and against silence."""
    path = tmp_path / "j"
    content = b'{"a": 1}\n' + broken + b'\n{"c": 3}\n'
    path.write_bytes(content)
    with pytest.raises(WorkdirError, match=r"j:2: expected a JSON object, got a broken line"):
        Journal(path).read()
    assert path.read_bytes() == content


def test_a_file_that_became_shorter_is_an_error(tmp_path):
    """Guards against going on in a file that somebody has replaced."""
    journal = Journal(tmp_path / "j")
    journal.append({"a": 1})
    (tmp_path / "j").write_bytes(b"")
    with pytest.raises(WorkdirError, match="has been cut off by someone else"):
        journal.append({"b": 2})


@pytest.mark.parametrize("num_written", [0, 5])
def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, num_written):
    """Guards against half a line that stays, and against a traceback."""
    path, write, space = tmp_path / "j", os.write, [num_written]
    journal = Journal(path)
    journal.append({"a": 1})

    def fill(file, content):
        if not space[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count, space[0] = write(file, content[: space[0]]), 0
        return count

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fill)
        with pytest.raises(
            WorkdirError, match=r"cannot write .*: No space left on device; what was"
        ):
            journal.append({"b": 2})
    assert path.read_bytes() == b'{"a": 1}\n'
    assert journal.append({"b": 2}) == [{"b": 2}]
    assert read_lines(path) == [{"a": 1}, {"b": 2}]


def test_an_error_of_the_disk_is_one_too(tmp_path, monkeypatch):
    """Guards against a result believed to be kept that the disk refused only afterwards."""

    def fail(file):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    journal = Journal(tmp_path / "j")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(WorkdirError, match="Input/output error"):
        journal.append({"a": 1})
    assert (tmp_path / "j").read_bytes() == b""
    with pytest.raises(WorkdirError, match="cannot write"):
        Journal(tmp_path / "none" / "j").read()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(59, "59 s"), (60, "1 min"), (3540, "59 min"), (3660, "1 h 01 min")],
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
