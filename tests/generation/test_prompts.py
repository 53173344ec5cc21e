"""Prompts from JSONL."""

import io
import sys
import types

import pytest

from jspec.common.errors import InputError
from jspec.generation.prompts import read_prompts

BROKEN_LINES = {
    b"{oops": "broken JSON (Expecting property name enclosed in double quotes at column 2)",
    b"\xff\xfe": "expected UTF-8",
    b'{"text": "x"}': 'a text "prompt" or a list "turns", got {"text": "x"}',
    b'{"prompt": ""}': '"prompt" as a text that is not empty; got ""',
    b'{"prompt": 5}': '"prompt" as a text that is not empty; got 5',
    b'{"prompt": "\\ud800"}': "expected UTF-8",
    b'{"turns": []}': '"turns" as a list of texts, none empty; got []',
    b'{"turns": [""]}': '"turns" as a list of texts, none empty; got [""]',
    b'{"turns": ["a", 5]}': 'got ["a", 5]',
    b'["prompt"]': "expected an object",
    b"null": "got null",
    b'"' + b"x" * 1000 + b'"': "x...",
    b"[" * 100_000: "broken JSON",
}


def test_prompts_and_turns(tmp_path):
    """Guards against Spec-Bench's files refused, and against a last line without its end."""
    path = tmp_path / "p.jsonl"
    text = '{"prompt": "a\\nb"}\n\n  \n{"turns": ["c", "d"], "question_id": 1}\r\n{"prompt": "é"}'
    path.write_bytes(text.encode())
    assert [one.turns for one in read_prompts(str(path))] == [("a\nb",), ("c", "d"), ("é",)]


def test_a_category_may_be_given(tmp_path):
    """Spec-Bench's lines carry one; a number is as good a name as any."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "category": "qa"}\n{"turns": ["b"], "category": 7}\n')
    assert [one[:2] for one in read_prompts(str(path))] == [("a", "qa"), ("b", "7")]


def test_a_byte_order_mark_is_no_part_of_the_json(tmp_path):
    """Guards against files of editors that begin UTF-8 with a mark."""
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n')
    assert [one[:2] for one in read_prompts(str(path))] == [("a", None)]


def test_standard_input(monkeypatch):
    """Guards against "-" taken for a file's name."""
    stdin = types.SimpleNamespace(buffer=io.BytesIO(b'{"prompt": "a"}\n{"prom'))
    monkeypatch.setattr(sys, "stdin", stdin)
    prompts = read_prompts("-")
    assert next(prompts).text == "a"
    with pytest.raises(InputError, match=r"^standard input:2: "):
        next(prompts)


@pytest.mark.parametrize("line", BROKEN_LINES, ids=lambda line: repr(line[:20]))
def test_a_broken_line_is_named_and_what_came_before_is_there(tmp_path, line):
    """Guards against a message without file and line, and against losing the good prompts."""
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "b"}\n' + line + b'\n{"prompt": "d"}\n')
    prompts = read_prompts(str(path))
    assert [next(prompts).text, next(prompts).text] == ["a", "b"]
    with pytest.raises(InputError) as caught:
        next(prompts)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert BROKEN_LINES[line] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_files(tmp_path):
    """Guards against a traceback for a missing file or a folder."""
    for path, reason in ((tmp_path / "none.jsonl", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(InputError, match=reason):
            list(read_prompts(str(path)))
