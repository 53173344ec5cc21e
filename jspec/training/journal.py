"""The lines of metrics of a run, and the same for TensorBoard."""

import json
import operator
import pathlib
import time
from typing import Any

from jspec.errors import InputError
from jspec.training.events import first_record, scalars_of, scalars_record

METRICS = "metrics.jsonl"
_EVENTS = "tensorboard/events.out.tfevents.0"


class Journal:
    """`metrics.jsonl`, a line an entry, and TensorBoard's file of the same numbers.

    Entries of steps that will be done again are dropped; TensorBoard's file is made anew from the
    others.
    """

    def __init__(self, workdir: pathlib.Path, step: int) -> None:
        """Opens the files for a run that goes on after `step`.

        Raises:
          InputError: they cannot be written.
        """
        self._lines, self._events = workdir / METRICS, workdir / _EVENTS
        kept = [record for record in read_journal(workdir) if record["step"] <= step]
        try:
            self._events.parent.mkdir(exist_ok=True)
            _replace(self._lines, b"".join(map(_line, kept)))
            _replace(self._events, first_record(time.time()) + b"".join(map(_event, kept)))
        except OSError as error:
            raise self._refusal(error) from None

    def write(self, record: dict[str, Any]) -> None:
        """Adds an entry, which has `step`.

        Raises:
          InputError: it cannot be written.
        """
        try:
            for path, content in ((self._lines, _line(record)), (self._events, _event(record))):
                with path.open("ab") as file:
                    file.write(content)
        except OSError as error:
            raise self._refusal(error) from None

    def _refusal(self, error: OSError) -> InputError:
        return InputError(
            f"cannot write {self._lines}: {error.strerror}; the same command goes on from the "
            "last checkpoint"
        )


def read_journal(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the entries of a run, up to a line that a kill has torn."""
    path = workdir / METRICS
    kept = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
            operator.index(record["step"])
        except (ValueError, KeyError, TypeError):
            break
        kept.append(record)
    return kept


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"


def _event(record: dict[str, Any]) -> bytes:
    return scalars_record(record["step"], time.time(), dict(scalars_of(record)))


def _replace(path: pathlib.Path, content: bytes) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    partial.replace(path)
