"""Prompts from a JSONL file."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from jspec.errors import InputError
from jspec.json_lines import check_unicode, read_json_lines


class Prompt(NamedTuple):
    """One line of a prompts file.

    Attributes:
      text: the prompt.
      category: what kind of request it is; None where the line does not say.
    """

    text: str
    category: str | None = None


def read_prompts(path: str) -> Iterator[Prompt]:
    """Yields the prompts of a JSONL file, line by line, as they are asked for.

    Args:
      path: of the file, or "-" for standard input. Each line is an object with `prompt`, or with
        Spec-Bench's `turns`, of which the first is the prompt, and may have a `category`. Empty
        lines are skipped.

    Raises:
      InputError: an unreadable file or a broken line, by file and line; what came before it has
        been yielded.
    """
    for where, record in read_json_lines(path, "the prompts file"):
        prompt = _prompt_of(record)
        if not isinstance(prompt, str) or not prompt:
            raise InputError(f'{where}: expected an object with a text "prompt" or a list "turns"')
        category = record.get("category")
        yield Prompt(check_unicode(prompt, where), None if category is None else str(category))


def _prompt_of(record: Any) -> Any:
    if not isinstance(record, dict):
        return None
    if "prompt" in record:
        return record["prompt"]
    turns = record.get("turns")
    return turns[0] if isinstance(turns, list) and turns else None
