"""Prompts from a JSONL file."""

from collections.abc import Iterator
from typing import Any

from jspec.errors import InputError
from jspec.json_lines import check_unicode, read_json_lines


def read_prompts(path: str) -> Iterator[str]:
    """Yields the prompts of a JSONL file, line by line, as they are asked for.

    Args:
      path: of the file, or "-" for standard input. Each line is an object with `prompt`, or with
        Spec-Bench's `turns`, of which the first is the prompt. Empty lines are skipped.

    Raises:
      InputError: an unreadable file or a broken line, by file and line; what came before it has
        been yielded.
    """
    for where, record in read_json_lines(path, "the prompts file"):
        prompt = _prompt_of(record)
        if not isinstance(prompt, str) or not prompt:
            raise InputError(f'{where}: expected an object with a text "prompt" or a list "turns"')
        yield check_unicode(prompt, where)


def _prompt_of(record: Any) -> Any:
    if not isinstance(record, dict):
        return None
    if "prompt" in record:
        return record["prompt"]
    turns = record.get("turns")
    return turns[0] if isinstance(turns, list) and turns else None
