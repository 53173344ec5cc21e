"""The metrics of a run by step: lines of JSON, and the same for TensorBoard."""

import pathlib
import time
from typing import Any

from jspec.common.errors import InputError
from jspec.common.journal import Journal, Record
from jspec.training.events import first_record, scalars_of, scalars_record

METRICS = "metrics.jsonl"
_EVENTS = "tensorboard/events.out.tfevents.0"


class MetricsLog:
    """`metrics.jsonl`, a line an entry, and TensorBoard's file of the same numbers.

    Entries of steps that will be done again are dropped; TensorBoard's file is made anew from the
    others.
    """

    def __init__(self, workdir: pathlib.Path, step: int) -> None:
        """Opens the files for a run that goes on after `step`.

        Raises:
          InputError: they are damaged, or cannot be written.
        """
        self._journal, self._events = _journal(workdir), workdir / _EVENTS
        kept = [record for record in self._journal.read() if record["step"] <= step]
        self._journal.cut(len(kept))
        self._write_events("wb", first_record(time.time()) + b"".join(map(_event, kept)))

    def write(self, record: Record) -> None:
        """Adds an entry, which has `step`.

        Raises:
          InputError: it cannot be written.
        """
        self._journal.append(record)
        self._write_events("ab", _event(record))

    def _write_events(self, mode: str, content: bytes) -> None:
        try:
            self._events.parent.mkdir(exist_ok=True)
            with self._events.open(mode) as file:
                file.write(content)
        except OSError as error:
            raise InputError(f"cannot write {self._events}: {error.strerror}") from None


def read_metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the entries of a run.

    Raises:
      InputError: they cannot be read.
    """
    return _journal(workdir).read() if (workdir / METRICS).exists() else []


def _journal(workdir: pathlib.Path) -> Journal:
    return Journal(workdir / METRICS)


def _event(record: Record) -> bytes:
    return scalars_record(record["step"], time.time(), dict(scalars_of(record)))
