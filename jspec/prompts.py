"""Prompts from a JSONL file."""

import json
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from jspec.errors import InputError


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
    name = "standard input" if path == "-" else path
    try:
        file = sys.stdin.buffer if path == "-" else open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise InputError(f"cannot read the prompts file {path}: {error.strerror}") from None
    with file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _parse(line, f"{name}:{number}")
        except OSError as error:
            raise InputError(f"cannot read the prompts file {path}: {error.strerror}") from None


def _parse(line: bytes, where: str) -> Prompt:
    try:
        record = json.loads(line.decode("utf-8-sig"))
        prompt = _prompt_of(record)
        if not isinstance(prompt, str) or not prompt:
            raise InputError(f'{where}: expected an object with a text "prompt" or a list "turns"')
        prompt.encode("utf-8")  # JSON can spell half a character
    except InputError:
        raise
    except UnicodeError:
        raise InputError(f"{where}: expected UTF-8, got invalid bytes") from None
    except ValueError as error:
        raise InputError(f"{where}: expected a JSON object, got broken JSON ({error})") from None
    except RecursionError:
        raise InputError(f"{where}: expected a JSON object, got broken JSON (nested)") from None
    category = record.get("category")
    return Prompt(prompt, None if category is None else str(category))


def _prompt_of(record: Any) -> Any:
    if not isinstance(record, dict):
        return None
    if "prompt" in record:
        return record["prompt"]
    turns = record.get("turns")
    return turns[0] if isinstance(turns, list) and turns else None
