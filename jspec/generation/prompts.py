"""Prompts from a JSONL file."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from jspec.common.errors import InputError
from jspec.common.json_lines import check_unicode, read_json_lines

_MOST_SHOWN = 60


class Prompt(NamedTuple):
    """One line of a prompts file.

    Attributes:
      text: the prompt.
      category: what kind of request it is; None where the line does not say.
      later_turns: what the user goes on to say, one text after each answer.
    """

    text: str
    category: str | None = None
    later_turns: tuple[str, ...] = ()

    @property
    def turns(self) -> tuple[str, ...]:
        """All that the user says."""
        return (self.text, *self.later_turns)


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
        text, *later = (check_unicode(turn, where) for turn in _turns_of(record, where))
        category = record.get("category")
        yield Prompt(text, None if category is None else str(category), tuple(later))


def _turns_of(record: Any, where: str) -> list[str]:
    if not isinstance(record, dict) or not record.keys() & {"prompt", "turns"}:
        raise InputError(
            f'{where}: expected an object with a text "prompt" or a list "turns", got '
            f"{_shown(record)}"
        )
    name = "prompt" if "prompt" in record else "turns"
    value = record[name]
    turns = [value] if name == "prompt" else value
    if isinstance(turns, list) and turns and all(isinstance(t, str) and t for t in turns):
        return turns
    expected = "a text that is not empty" if name == "prompt" else "a list of texts, none empty"
    raise InputError(f'{where}: expected "{name}" as {expected}; got {_shown(value)}')


def _shown(value: Any) -> str:
    """Returns a value as it stands in a JSON file; the beginning of a long one."""
    text = json.dumps(value)
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."
