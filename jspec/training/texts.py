"""Reads texts to train on, a target's answers or any text, as token ids."""

from collections.abc import Sequence

from jspec.common.errors import InputError
from jspec.common.json_lines import read_json_lines
from jspec.drafters.token_texts import Text, is_json_lines, parse_record, read_plain
from jspec.weights import TokenizerLike


def read_texts(path: str, tokenizer: TokenizerLike, *, vocab_size: int, seq_len: int) -> list[Text]:
    """Returns the texts of a file to train on.

    Each line of a JSONL file has `prompt_token_ids` and `token_ids`, as `scripts/make_answers.py`
    and `python -m jspec.generate --output_json` write, or `text`; lines with `error` are skipped.
    Plain text, there or in another file, is cut into pieces of `seq_len` token ids.

    Raises:
      InputError: an unreadable file, a line with neither, or ids outside the vocabulary.
    """
    if not is_json_lines(path):
        return _cut(tokenizer.encode(read_plain(path)), seq_len)
    gathered = []
    for where, record in read_json_lines(path, "the texts"):
        if isinstance(record, dict) and "error" in record:
            continue
        parsed = parse_record(record, where, ("text",))
        if not isinstance(parsed, Text):
            gathered += [
                piece for text in parsed for piece in _cut(tokenizer.encode(text), seq_len)
            ]
            continue
        if "prompt_token_ids" not in record:
            raise InputError(f"{where}: expected prompt_token_ids beside token_ids")
        wrong = [i for i in parsed.ids if not 0 <= i < vocab_size]
        if wrong:
            raise InputError(f"{where}: expected ids below {vocab_size}, got {wrong[0]}")
        gathered.append(parsed)
    return gathered


def _cut(ids: list[int], seq_len: int) -> list[Text]:
    """Cuts a text into pieces; nothing predicts the first token of a piece: it is the prompt."""
    parts = [tuple(ids[first : first + seq_len]) for first in range(0, len(ids), seq_len)]
    return [Text(part[:1], part[1:]) for part in parts if len(part) > 1]


def split(texts: Sequence[Text], num_held_out: int) -> tuple[list[Text], list[Text]]:
    """Returns the texts to train on and the held-out ones, one at least, evenly spaced."""
    held_out = range(0, len(texts), len(texts) // num_held_out)[:num_held_out]
    training = [text for index, text in enumerate(texts) if index not in held_out]
    return training, [texts[index] for index in held_out]
