"""Prompts: from JSONL, and to token ids."""

import io
import sys
import types

import pytest

from jspec.common.errors import InputError
from jspec.generation.prompts import encode_conversation, encode_prompt, read_prompts
from jspec.weights.resolver import load_model
from tests.tiny_models import save_folder, target

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
    """Guards against files of Spec-Bench, and of editors that begin with a mark, refused.

    A category is a text or, as Spec-Bench has it, a number; the last line has no end.
    """
    path = tmp_path / "p.jsonl"
    text = '{"prompt": "a\\nb", "category": "qa"}\n\n  \n{"turns": ["c", "d"], "category": 7}\r\n'
    path.write_bytes((text + '{"prompt": "é"}').encode("utf-8-sig"))
    prompts = list(read_prompts(str(path)))
    assert [prompt.turns for prompt in prompts] == [("a\nb",), ("c", "d"), ("é",)]
    assert [prompt.category for prompt in prompts] == ["qa", "7", None]


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


def test_ids_are_taken_as_they_are():
    """Guards against ids that are encoded once more, and numpy's integers among them."""
    assert encode_prompt(target(), [5, 6], chat=None, system=None) == [5, 6]
    assert encode_prompt(target(), (5,), chat=False, system=None) == [5]


@pytest.mark.parametrize("options", [{"chat": True}, {"system": ""}, {"system": "be kind"}])
def test_ids_with_a_template_are_refused(options):
    """Guards against a system message that is dropped in silence."""
    with pytest.raises(InputError, match="token ids is taken as it is"):
        encode_prompt(target(), [5, 6], **{"chat": None, "system": None} | options)


def test_a_conversation_without_a_template_is_plain_text():
    """Guards against an answer that is left out, or turns glued together; one is a prompt."""
    assert encode_conversation(target(), ["ab"], [], chat=False) == list(b"ab")
    ids = encode_conversation(target(), ["ab", "cd"], ["xy"], chat=None)
    assert ids == list(b"abxy\n\ncd")


def test_a_conversation_in_a_template(tmp_path):
    """Guards against roles mixed up, and a second BOS."""
    template = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}[a]"
    model = load_model(str(save_folder(tmp_path / "tiny", template=template)))
    ids = encode_conversation(model, ["ab", "cd"], ["xy"], chat=None, system="be kind")
    assert model.tokenizer.decode(ids) == "[s]be kind[u]ab[a]xy[u]cd[a]"


def test_an_empty_turn_is_refused():
    """Guards against an answer to nothing."""
    with pytest.raises(InputError, match="expected a prompt, got an empty text"):
        encode_conversation(target(), ["ab", ""], ["xy"], chat=None)
