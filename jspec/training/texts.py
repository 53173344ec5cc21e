"""Where texts come from: a target's answers, or any text, as token ids."""

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jspec.common.errors import InputError
from jspec.common.json_lines import check_unicode, read_json_lines
from jspec.weights import TokenizerLike


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
        """The token ids of the prompt and then of the answer."""
        return (*self.prompt, *self.answer)


def read_texts(path: str, tokenizer: TokenizerLike, *, vocab_size: int, seq_len: int) -> list[Text]:
    """Returns the texts of a file to train on.

    Each line of a JSONL file has `prompt_token_ids` and `token_ids`, as `scripts/make_answers.py`
    and `python -m jspec.generate --output_json` write, or `text`; lines with `error` are skipped.
    Plain text, there or in another file, is cut into pieces of `seq_len` token ids.

    Raises:
      InputError: an unreadable file, a line with neither, or ids outside the vocabulary.
    """
    if not path.endswith((".jsonl", ".json")):
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
        parsed = _parse(record, where, ("text",))
        if not isinstance(parsed, Text):
            found += [piece for text in parsed for piece in _cut(tokenizer.encode(text), seq_len)]
            continue
        if "prompt_token_ids" not in record:
            raise InputError(f"{where}: expected prompt_token_ids beside token_ids")
        wrong = [i for i in parsed.ids if not 0 <= i < vocab_size]
        if wrong:
            raise InputError(f"{where}: expected ids below {vocab_size}, got {wrong[0]}")
        found.append(parsed)
    return found


def read_token_texts(
    path: str, tokenizer: TokenizerLike, *, with_prompts: bool
) -> Iterator[list[int]]:
    """Yields the token ids of each text of a JSONL file, "-" for standard input, to count n-grams.

    Each line has `token_ids`, `with_prompts` after its `prompt_token_ids`, as `python -m
    jspec.generate --output_json` writes; or `text`, `prompt` or a list `turns`, in this order of
    preference, which get no BOS.

    Raises:
      InputError: an unreadable file, or a line with none of these.
    """
    for where, record in read_json_lines(path, "the input"):
        parsed = _parse(record, where, ("text", "prompt", "turns"))
        if isinstance(parsed, Text):
            yield list(parsed.ids if with_prompts else parsed.answer)
        else:
            yield from (tokenizer.encode(text, add_bos=False) for text in parsed)


def _parse(record: Any, where: str, names: Sequence[str]) -> Text | list[str]:
    """Returns the token ids of a line of JSON, or the plain texts that a field holds instead."""
    if not isinstance(record, dict):
        raise InputError(f"{where}: expected an object, got {type(record).__name__}")
    if "token_ids" in record:
        parts = {"prompt_token_ids": [], **record}
        for name in ("prompt_token_ids", "token_ids"):
            if not isinstance(parts[name], list) or any(type(i) is not int for i in parts[name]):
                raise InputError(f"{where}: expected {name} to be a list of whole numbers")
        return Text(tuple(parts["prompt_token_ids"]), tuple(parts["token_ids"]))
    found: Any = next((record[name] for name in names if name in record), None)
    texts = found if isinstance(found, list) else [found]
    if not all(isinstance(text, str) for text in texts):
        raise InputError(f"{where}: expected token_ids, or a text in {' or '.join(names)}")
    return [check_unicode(text, where) for text in texts]


def _cut(ids: list[int], seq_len: int) -> list[Text]:
    """Cuts a text into pieces; nothing predicts the first token of a piece: it is the prompt."""
    parts = [tuple(ids[first : first + seq_len]) for first in range(0, len(ids), seq_len)]
    return [Text(part[:1], part[1:]) for part in parts if len(part) > 1]


def split(texts: Sequence[Text], num_held_out: int) -> tuple[list[Text], list[Text]]:
    """Returns the texts to train on and the held-out ones, one at least, evenly spaced."""
    held_out = range(0, len(texts), len(texts) // num_held_out)[:num_held_out]
    training = [text for index, text in enumerate(texts) if index not in held_out]
    return training, [texts[index] for index in held_out]
