"""Results on their way to the disk."""

import json
import os
import pathlib

import pytest

from jspec.common.errors import InputError
from jspec.common.json_lines import JsonLinesWriter


def test_records_are_there_as_soon_as_they_are_written(tmp_path):
    """Guards against results lost in a buffer when the program dies."""
    path = tmp_path / "out.jsonl"
    with JsonLinesWriter(str(path)) as writer:
        for number in range(3):
            writer.write({"number": number, "text": "é\n"})
            lines = path.read_text(encoding="utf-8").splitlines()
            assert [json.loads(line)["number"] for line in lines] == list(range(number + 1))


def test_a_run_without_results_leaves_the_old_file(tmp_path):
    """Guards against results of yesterday lost to a mistyped flag today."""
    path = tmp_path / "out.jsonl"
    path.write_text("old")
    with JsonLinesWriter(str(path)):
        pass
    assert path.read_text() == "old"
    with JsonLinesWriter(str(path)) as writer:
        writer.write({"a": 1})
    assert path.read_text() == '{"a": 1}\n'


def test_a_record_grows_and_is_whole_at_every_moment(tmp_path, monkeypatch):
    """Guards against hours of measuring lost, or half a record, where a program is killed."""
    path = tmp_path / "out.jsonl"
    path.write_text("old")
    (tmp_path / "link.jsonl").symlink_to(path)
    writer = JsonLinesWriter(str(tmp_path / "link.jsonl"))
    writer.rewrite({"a": [1]}, is_complete=False)
    assert path.read_text() == '{"a": [1], "is_complete": false}\n'

    def fail(*_, **__):
        assert json.loads(path.read_text())["a"] == [1]
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(pathlib.Path, "write_text", fail)
        with pytest.raises(InputError, match="No space left"):
            writer.rewrite({"a": [1, 2]}, is_complete=False)
    assert json.loads(path.read_text())["a"] == [1]
    writer.rewrite({"a": [1, 2, 3]}, is_complete=True)
    assert json.loads(path.read_text()) == {"a": [1, 2, 3], "is_complete": True}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.jsonl", "out.jsonl"]


def test_what_is_no_file_gets_the_complete_record_alone(tmp_path):
    """Guards against a pipe's name taken by a file, and against records one after another."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with JsonLinesWriter(str(pipe)) as writer:
        writer.rewrite({"a": 1}, is_complete=False)
        writer.rewrite({"a": 2}, is_complete=True)
    assert json.loads(os.read(end, 1000)) == {"a": 2, "is_complete": True}
    os.close(end)


def test_unwritable_outputs_are_refused_at_once(tmp_path):
    """Guards against minutes of work before the first write fails."""
    with pytest.raises(InputError, match="there is no folder"):
        JsonLinesWriter(str(tmp_path / "none" / "out.jsonl"))
    with pytest.raises(InputError, match="it is a folder"):
        JsonLinesWriter(str(tmp_path))
    if os.geteuid():
        tmp_path.chmod(0o500)
        with pytest.raises(InputError, match="permission denied"):
            JsonLinesWriter(str(tmp_path / "out.jsonl"))


def test_an_input_is_no_output(tmp_path):
    """Guards against prompts overwritten by their answers, whatever name the file goes by."""
    path, link = tmp_path / "p.jsonl", tmp_path / "link.jsonl"
    path.write_text("prompts")
    link.symlink_to(path)
    for inputs in ((str(path),), (None, str(link)), ("nowhere", str(tmp_path / "." / "p.jsonl"))):
        with pytest.raises(InputError, match=f"than is read, got {path} for both"):
            JsonLinesWriter(str(path), *inputs)
    with pytest.raises(InputError, match="than is read"):
        JsonLinesWriter(str(link), str(path))
    JsonLinesWriter(str(path), None, "-", "nowhere", str(tmp_path))
    with pytest.raises(InputError, match="got - for standard output"):
        JsonLinesWriter("-")


def test_standard_input_is_no_output(tmp_path):
    """Guards against `--prompts_file=- --output_json=FILE < FILE`."""
    path = tmp_path / "p.jsonl"
    path.write_text("prompts")
    kept = os.dup(0)
    try:
        with path.open() as file:
            os.dup2(file.fileno(), 0)
        with pytest.raises(InputError, match="than is read"):
            JsonLinesWriter(str(path), "-")
    finally:
        os.dup2(kept, 0)
        os.close(kept)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_line():
    """Guards against a traceback, from writing or from closing what could not be written."""
    with (
        pytest.raises(InputError, match="No space left"),
        JsonLinesWriter("/dev/full") as writer,
    ):
        writer.write({"a": 1})
