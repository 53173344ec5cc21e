"""The lines of metrics of a run, and the same for TensorBoard."""

import contextlib
import json
import operator
import pathlib
import shutil
import time
from collections.abc import Iterator, Sequence
from typing import Any, Self

from jspec.errors import InputError

METRICS = "metrics.jsonl"
_EVENTS = "tensorboard"


class Journal:
    """`metrics.jsonl`, a line an entry; lines of steps that will be done again are dropped.

    A context: at its end the files are closed.
    """

    def __init__(self, workdir: pathlib.Path, step: int) -> None:
        """Opens the file for a run that goes on after `step`.

        Raises:
          InputError: it cannot be written.
        """
        self._path = workdir / METRICS
        kept = [record for record in read_journal(workdir) if record["step"] <= step]
        try:
            partial = self._path.with_suffix(".partial")
            partial.write_text("".join(map(_line, kept)), encoding="utf-8")
            partial.replace(self._path)
            self._events = _Events(workdir / _EVENTS, kept)
        except OSError as error:
            raise self._refusal(error) from None

    def write(self, record: dict[str, Any]) -> None:
        """Adds an entry, which has `step`.

        Raises:
          InputError: it cannot be written.
        """
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line(record))
            self._events.add(record)
        except OSError as error:
            raise self._refusal(error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._events.close()

    def _refusal(self, error: OSError) -> InputError:
        return InputError(
            f"cannot write {self._path}: {error.strerror}; the same command goes on from the last "
            "checkpoint"
        )


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"


def read_journal(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the entries of a run, up to a line that a kill has torn."""
    path = workdir / METRICS
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
            operator.index(record["step"])
        except (ValueError, KeyError, TypeError):
            break
        kept.append(record)
    return kept


class _Events:
    """An event file of all entries; nothing where tensorboardX is not installed.

    It is written anew by every run: the lines of metrics are what counts. tensorboardX's
    SummaryWriter writes in a thread whose end on a full disk it would wait for without end; its
    EventsWriter writes at once.
    """

    def __init__(self, folder: pathlib.Path, records: Sequence[dict[str, Any]]) -> None:
        self._writer = None
        try:
            from tensorboardX.event_file_writer import EventsWriter
        except ImportError:
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._writer = EventsWriter(str(folder / "events"))
        for record in records:
            self.add(record)

    def add(self, record: dict[str, Any]) -> None:
        """Adds all numbers of an entry."""
        if self._writer is None:
            return
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        for name, value in scalars(record):
            event = Event(wall_time=time.time(), step=record["step"], summary=scalar(name, value))
            self._writer.write_event(event)
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            with contextlib.suppress(OSError):  # a full disk, which has been told of
                self._writer.close()


def scalars(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields the numbers of an entry by names like "held_out/acceptance/0"."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, list):
            yield from scalars(dict(zip(map(str, range(len(value))), value, strict=True)),
                               f"{prefix}{name}/")  # fmt: skip
        elif prefix or name != "step":
            yield f"{prefix}{name}", float(value)
