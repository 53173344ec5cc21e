"""Texts from files: answers as ids, lines with a text, any text."""

import json

import pytest

from jspec.common.errors import InputError
from jspec.training.corpus import read_texts
from jspec.training.texts import Text, write_texts
from jspec.weights.tokenizers.byte_tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer(128, bos_id=1, eos_ids=(0,))


def read(path, seq_len=6):
    return read_texts(str(path), TOKENIZER, vocab_size=128, seq_len=seq_len)


def test_answers_come_as_they_were_written(tmp_path):
    """Ids are not cut here; lines of failed prompts are skipped."""
    texts = [Text((1, 2), (3,) * 9), Text((), (4,))]
    path = tmp_path / "answers.jsonl"
    write_texts(path, texts)
    with path.open("a") as file:
        file.write('{"error": "too long"}\n\n')
    assert read(path) == texts


def test_texts_are_cut_into_pieces(tmp_path):
    """All of it once; the first token of a piece is its prompt, and one alone is left out."""
    path = tmp_path / "book.txt"
    path.write_text("abcdefghijkl")
    ids = [1, *b"abcdefghijkl"]
    found = read(path)
    assert [len(text.answer) for text in found] == [5, 5]
    assert [i for text in found for i in (*text.prompt, *text.answer)] == ids[:12]
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"text": "abcdefgh"}) + "\n" + json.dumps({"text": "xyz"}) + "\n")
    assert read(lines) == [Text((1,), tuple(b"abcde")), Text((b"f"[0],), tuple(b"gh")),
                           Text((1,), tuple(b"xyz"))]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "message"),
    [('{"prompt_token_ids": [1]}', "expected lists of ids"),
     ('{"prompt_token_ids": [1], "token_ids": [true]}', "expected lists of ids"),
     ('{"prompt_token_ids": [1], "token_ids": [199]}', "expected ids below 128, got 199"),
     ('{"prompt_token_ids": [-2], "token_ids": [99]}', "expected ids below 128, got -2"),
     ('{"text": 3}', 'or a text "text"'),
     ("[1]", "expected lists of ids"),
     ("{", "broken JSON")],
)  # fmt: skip
def test_lines_that_are_no_texts_are_refused(tmp_path, line, message):
    """By file and line."""
    path = tmp_path / "answers.jsonl"
    path.write_text('{"prompt_token_ids": [1, 2], "token_ids": [3]}\n' + line + "\n")
    with pytest.raises(InputError, match=rf"answers\.jsonl:2: .*{message}"):
        read(path)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    """By name."""
    (tmp_path / "noise.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(InputError, match=r"noise\.txt: expected UTF-8"):
        read(tmp_path / "noise.txt")
    for name in ("nowhere.txt", "nowhere.jsonl"):
        with pytest.raises(InputError, match=name):
            read(tmp_path / name)
