"""Where texts come from: a target's answers, any text, or Python's own docstrings, as token ids."""

import ast
import json
import pathlib
import re
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from jspec.common.errors import InputError
from jspec.common.json_lines import check_unicode, read_json_lines
from jspec.weights import TokenizerLike

_JSON_LINES = (".jsonl", ".json")
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Text(NamedTuple):
    """One prompt and the target's answer to it.

    Attributes:
      prompt: token ids.
      answer: token ids; these are what is learned.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """Returns the token ids of the prompt and then of the answer."""
        return (*self.prompt, *self.answer)


def read_texts(path: str, tokenizer: TokenizerLike, *, vocab_size: int, seq_len: int) -> list[Text]:
    """Returns the texts of a file to train on.

    Args:
      path: JSONL, or plain text, which is cut into pieces. Each line of JSONL has
        `prompt_token_ids` and `token_ids`, as `scripts/make_answers.py` and `python -m
        jspec.generate --output_json` write, or `text`; lines with `error` are skipped.
      tokenizer: the target's, for plain text.
      vocab_size: of the target.
      seq_len: most token ids of a piece.

    Raises:
      InputError: an unreadable file, a line with neither, or ids outside the vocabulary.
    """
    if not path.endswith(_JSON_LINES):
        try:
            text = pathlib.Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot read the texts {path}: {error.strerror}") from None
        except UnicodeError:
            raise InputError(f"{path}: expected UTF-8, got invalid bytes") from None
        return _cut(tokenizer.encode(text), seq_len)
    found = []
    for where, record in read_json_lines(path, "the texts"):
        if isinstance(record, dict) and "error" in record:
            continue
        answer, texts = _parse(record, where, ("text",))
        for text in texts:
            found += _cut(tokenizer.encode(text), seq_len)
        if answer is not None:
            if "prompt_token_ids" not in record:
                raise InputError(f"{where}: expected prompt_token_ids beside token_ids")
            wrong = [i for i in answer.ids if not 0 <= i < vocab_size]
            if wrong:
                raise InputError(f"{where}: expected ids below {vocab_size}, got {wrong[0]}")
            found.append(answer)
    return found


def read_token_texts(
    path: str, tokenizer: TokenizerLike, *, with_prompts: bool
) -> Iterator[list[int]]:
    """Yields the token ids of each text of a JSONL file, to count n-grams in.

    Args:
      path: of the file, or "-" for standard input. Each line is an object with `token_ids` and
        perhaps `prompt_token_ids`, as `python -m jspec.generate --output_json` writes, or with
        `text`, `prompt` or a list `turns`, in this order of preference.
      tokenizer: for plain text; no BOS is added.
      with_prompts: whether `prompt_token_ids` are put before `token_ids`.

    Raises:
      InputError: an unreadable file, or a line with none of these.
    """
    for where, record in read_json_lines(path, "the input"):
        answer, texts = _parse(record, where, ("text", "prompt", "turns"))
        for text in texts:
            yield tokenizer.encode(text, add_bos=False)
        if answer is not None:
            yield list(answer.ids if with_prompts else answer.answer)


def _parse(record: Any, where: str, names: Sequence[str]) -> tuple[Text | None, list[str]]:
    """Returns the token ids of a line of JSON, or the plain texts that a field holds instead."""
    if not isinstance(record, dict):
        raise InputError(f"{where}: expected an object, got {type(record).__name__}")
    if "token_ids" in record:
        parts = {"prompt_token_ids": record.get("prompt_token_ids", [])}
        parts["token_ids"] = record["token_ids"]
        for name, ids in parts.items():
            if not isinstance(ids, list) or any(type(i) is not int for i in ids):
                raise InputError(f"{where}: expected {name} to be a list of whole numbers")
        return Text(*map(tuple, parts.values())), []
    found: Any = next((record[name] for name in names if name in record), None)
    texts = found if isinstance(found, list) else [found]
    if not all(isinstance(text, str) for text in texts):
        raise InputError(f"{where}: expected token_ids, or a text in {' or '.join(names)}")
    return None, [check_unicode(text, where) for text in texts]


def _cut(ids: list[int], seq_len: int) -> list[Text]:
    """Cuts a text into pieces; nothing predicts the first token of a piece: it is the prompt."""
    parts = [tuple(ids[first : first + seq_len]) for first in range(0, len(ids), seq_len)]
    return [Text(part[:1], part[1:]) for part in parts if len(part) > 1]


def write_texts(path: pathlib.Path, texts: Sequence[Text]) -> None:
    """Writes texts as JSONL that `read_texts` reads."""
    lines = (
        json.dumps({"prompt_token_ids": list(text.prompt), "token_ids": list(text.answer)})
        for text in texts
    )
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def split(texts: Sequence[Text], num_held_out: int) -> tuple[list[Text], list[Text]]:
    """Returns the texts to train on and the held-out ones, evenly spaced over the file."""
    every = max(len(texts) // max(num_held_out, 1), 1)
    held_out = set(range(0, len(texts), every)[:num_held_out]) if num_held_out else set()
    training = [text for index, text in enumerate(texts) if index not in held_out]
    return training, [texts[index] for index in sorted(held_out)]


def most_frequent(texts: Sequence[Text], vocab_size: int, size: int) -> Int32[np.ndarray, "u"]:
    """Returns the most frequent token ids of the answers, in rising order.

    Args:
      texts: the texts.
      vocab_size: of the target.
      size: number of ids, u; of equally frequent ones the smaller ids are taken.
    """
    counts = np.zeros([vocab_size], np.int64)
    for text in texts:
        counts += np.bincount(np.array(text.answer, int), minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def read_docstrings(num_bytes: int, folder: pathlib.Path | None = None) -> list[str]:
    """Returns distinct docstrings of Python's standard library, a corpus that every machine has.

    Files come in the order of their paths, without tests and installed packages. One version of
    Python gives the same texts everywhere; another version gives others.

    Args:
      num_bytes: of UTF-8 at most; the first docstring that would exceed it ends the list.
      folder: of Python files; None for the standard library.

    Raises:
      InputError: the folder has fewer bytes of docstrings.
    """
    folder = folder or pathlib.Path(sysconfig.get_paths()["stdlib"])
    texts, total = [], 0
    for text in _iterate_docstrings(folder):
        total += len(text.encode())
        if total > num_bytes:
            return texts
        texts.append(text)
    if total < num_bytes:
        raise InputError(f"expected {num_bytes} bytes of docstrings in {folder}, got {total}")
    return texts


def _iterate_docstrings(folder: pathlib.Path) -> Iterator[str]:
    seen = set()
    for path in sorted(path.relative_to(folder) for path in folder.rglob("*.py")):
        if _NOT_THE_LIBRARY & set(path.parts):
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse((folder / path).read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):  # the library has files that no Python should read
            continue
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, _DOCUMENTED) else None
            # A string of Python may hold half a surrogate pair, which UTF-8 cannot encode.
            if text and text not in seen and not re.search("[\ud800-\udfff]", text):
                seen.add(text)
                yield text
