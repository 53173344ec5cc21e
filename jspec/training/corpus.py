"""Files of texts: answers of a target, or any text, as token ids."""

import pathlib
from typing import Any

from jspec.common.errors import InputError
from jspec.common.json_lines import check_unicode, read_json_lines
from jspec.training.texts import Text
from jspec.weights import TokenizerLike

_LINES = (".jsonl", ".json")


def read_texts(path: str, tokenizer: TokenizerLike, *, vocab_size: int, seq_len: int) -> list[Text]:
    """Returns the texts of a file.

    Args:
      path: JSONL, or any text, which is cut into pieces. Each line of JSONL has `prompt_token_ids`
        and `token_ids`, as `scripts/make_answers.py` and `python -m jspec.generate --output_json`
        write, or `text`; lines with `error` are skipped.
      tokenizer: the target's, for texts.
      vocab_size: of the target.
      seq_len: ids of a piece at most.

    Raises:
      InputError: an unreadable file, a line with neither, or ids of another vocabulary.
    """
    if not path.endswith(_LINES):
        return _pieces(tokenizer.encode(_read(path)), seq_len)
    texts = []
    for where, record in read_json_lines(path, "the texts"):
        if isinstance(record, dict) and "error" in record:
            continue
        if isinstance(record, dict) and isinstance(record.get("text"), str):
            ids = tokenizer.encode(check_unicode(record["text"], where))
            texts += _pieces(ids, seq_len)
        else:
            texts.append(_read_answer(record, where, vocab_size))
    return texts


def _read(path: str) -> str:
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read the texts {path}: {error.strerror}") from None
    except UnicodeError:
        raise InputError(f"{path}: expected UTF-8, got invalid bytes") from None


def _pieces(ids: list[int], seq_len: int) -> list[Text]:
    """Cuts a text; nothing predicts the first token of a piece: it is the prompt."""
    parts = [tuple(ids[first : first + seq_len]) for first in range(0, len(ids), seq_len)]
    return [Text(part[:1], part[1:]) for part in parts if len(part) > 1]


def _read_answer(record: Any, where: str, vocab_size: int) -> Text:
    ids = [_ids_of(record, name) for name in ("prompt_token_ids", "token_ids")]
    if ids[0] is None or ids[1] is None:
        raise InputError(
            f'{where}: expected lists of ids prompt_token_ids and token_ids, or a text "text"'
        )
    both = [*ids[0], *ids[1]]
    if both and not 0 <= min(both) <= max(both) < vocab_size:
        worst = max(both) if max(both) >= vocab_size else min(both)
        raise InputError(f"{where}: expected ids below {vocab_size}, got {worst}")
    return Text(tuple(ids[0]), tuple(ids[1]))


def _ids_of(record: Any, name: str) -> list[int] | None:
    ids = record.get(name) if isinstance(record, dict) else None
    is_good = isinstance(ids, list) and all(type(value) is int for value in ids)
    return ids if is_good else None
