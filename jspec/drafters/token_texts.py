"""Texts as token ids: answers as the programs write them, lines of JSON with a text, plain text."""

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


def read_token_texts(
    path: str, tokenizer: TokenizerLike, *, with_prompts: bool
) -> Iterator[list[int]]:
    """Yields the token ids of each text of a JSONL file, "-" for standard input.

    Each line has `token_ids`, `with_prompts` after its `prompt_token_ids`, as `python -m
    jspec.generate --output_json` writes; or `text`, `prompt` or a list `turns`, in this order of
    preference, which get no BOS.

    Raises:
      InputError: an unreadable file, or a line with none of these.
    """
    for where, record in read_json_lines(path, "the input"):
        parsed = parse_record(record, where, ("text", "prompt", "turns"))
        if isinstance(parsed, Text):
            yield list(parsed.ids if with_prompts else parsed.answer)
        else:
            yield from (tokenizer.encode(text, add_bos=False) for text in parsed)


def is_json_lines(path: str) -> bool:
    """Returns whether a file of texts has a JSON object in each line, and is no plain text."""
    return path.endswith((".jsonl", ".json"))


def read_plain(path: str) -> str:
    """Returns a file's text; raises an `InputError` if it cannot be read or is not UTF-8."""
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read the texts {path}: {error.strerror}") from None
    except UnicodeError:
        raise InputError(f"{path}: expected UTF-8, got invalid bytes") from None


def parse_record(record: Any, where: str, names: Sequence[str]) -> Text | list[str]:
    """Returns the token ids of a line of JSON, or the plain texts that a field holds instead.

    Raises:
      InputError: neither is there.
    """
    if not isinstance(record, dict):
        raise InputError(f"{where}: expected an object, got {type(record).__name__}")
    if "token_ids" in record:
        parts = {"prompt_token_ids": [], **record}
        for name in ("prompt_token_ids", "token_ids"):
            if not isinstance(parts[name], list) or any(type(i) is not int for i in parts[name]):
                raise InputError(f"{where}: expected {name} to be a list of whole numbers")
        return Text(tuple(parts["prompt_token_ids"]), tuple(parts["token_ids"]))
    value: Any = next((record[name] for name in names if name in record), None)
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise InputError(f"{where}: expected token_ids, or a text in {' or '.join(names)}")
    return [check_unicode(text, where) for text in texts]
