"""Texts from files: answers as ids, lines with a text, any text; what is held out."""

import json

import pytest

from jspec.common.errors import InputError
from jspec.drafters.token_texts import read_token_texts
from jspec.training.texts import Text, read_texts, split
from jspec.weights.tokenizers.tokenizer import ByteTokenizer
from tests.training.folders import save_texts

TOKENIZER = ByteTokenizer(128, bos_id=1, eos_ids=(0,))
ANSWER = {"prompt_token_ids": [1, 2], "token_ids": [3, 4], "text": "x", "prompt": "y"}


def read(path, seq_len=6):
    return read_texts(str(path), TOKENIZER, vocab_size=128, seq_len=seq_len)


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_answers_come_as_they_were_written(tmp_path):
    """Ids are not cut here, and go before text; lines of failed prompts are skipped."""
    texts = [Text((1, 2), (3,) * 9), Text((), (4,))]
    path = tmp_path / "answers.jsonl"
    save_texts(path, texts)
    with path.open("a") as file:
        file.write('{"error": "too long"}\n\n' + json.dumps(ANSWER))
    assert read(path) == [*texts, Text((1, 2), (3, 4))]


def test_texts_are_cut_into_pieces(tmp_path):
    """All of it once; the first token of a piece is its prompt, and one alone is left out."""
    path = tmp_path / "book.txt"
    path.write_text("abcdefghijkl")
    texts = read(path)
    assert [len(text.answer) for text in texts] == [5, 5]
    assert [i for text in texts for i in text.ids] == [1, *b"abcdefghijkl"][:12]
    lines = write(tmp_path / "lines.jsonl", {"text": "abcdefgh"}, {"text": "xyz"})
    assert read(lines) == [Text((1,), tuple(b"abcde")), Text((b"f"[0],), tuple(b"gh")),
                           Text((1,), tuple(b"xyz"))]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "message"),
    [('{"prompt_token_ids": [1]}', "expected token_ids, or a text"),
     ('{"token_ids": [1]}', "expected prompt_token_ids"),
     ('{"prompt_token_ids": [1], "token_ids": [199]}', "expected ids below 128, got 199"),
     ('{"prompt_token_ids": [-2], "token_ids": [99]}', "expected ids below 128, got -2"),
     ('{"prompt": "Why?"}', "expected token_ids, or a text in text"),
     ("[1]", "expected an object"),
     ("{", "broken JSON")],
)  # fmt: skip
def test_lines_that_are_no_texts_are_refused(tmp_path, line, message):
    path = tmp_path / "answers.jsonl"
    path.write_text('{"prompt_token_ids": [1, 2], "token_ids": [3]}\n' + line + "\n")
    with pytest.raises(InputError, match=rf"answers\.jsonl:2: .*{message}"):
        read(path)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "noise.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(InputError, match=r"noise\.txt: expected UTF-8"):
        read(tmp_path / "noise.txt")
    for name in ("nowhere.txt", "nowhere.jsonl"):
        with pytest.raises(InputError, match=name):
            read(tmp_path / name)


@pytest.mark.parametrize("with_prompts", [True, False])
def test_texts_to_count_in(tmp_path, with_prompts):
    """Ids go before text, text before prompt; a text gets no BOS; turns are their own texts."""
    path = write(
        tmp_path / "i.jsonl", ANSWER, {"token_ids": [5]}, {"text": "ab", "prompt": "c"},
        {"prompt": "d"}, {"turns": ["e", "fg"]},
    )  # fmt: skip
    texts = list(read_token_texts(path, TOKENIZER, with_prompts=with_prompts))
    first = [1, 2, 3, 4] if with_prompts else [3, 4]
    assert texts == [first, [5], [97, 98], [100], [101], [102, 103]]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([1], "expected an object"),
        ({"token_ids": [1, 2.5]}, "token_ids to be a list of whole numbers"),
        ({"token_ids": [1], "prompt_token_ids": None}, "prompt_token_ids to be a list"),
        ({"answer": "a"}, "expected token_ids, or a text in text or prompt or turns"),
        ({"turns": ["a", None]}, "expected token_ids, or a text"),
        ({"text": "\ud800"}, "expected UTF-8"),
    ],
)
def test_broken_lines_are_named(tmp_path, record, message):
    """What came before has been yielded."""
    path = write(tmp_path / "i.jsonl", ANSWER, record)
    texts = read_token_texts(path, TOKENIZER, with_prompts=True)
    assert next(texts) == [1, 2, 3, 4]
    with pytest.raises(InputError, match=rf"i\.jsonl:2: .*{message}"):
        next(texts)


def test_held_out_texts_are_not_trained_on():
    """Evenly spaced, the same in every run."""
    texts = [Text((i,), (i,)) for i in range(10)]
    training, held_out = split(texts, 3)
    assert held_out == [texts[0], texts[3], texts[6]]
    assert sorted(training + held_out) == texts
