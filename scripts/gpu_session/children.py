"""Processes beside the session: started with a time limit, heard line by line, ended as groups."""

import contextlib
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

ROOT = pathlib.Path(__file__).parents[2]


class Child:
    """A module of this package in a process of its own, which prints JSON, an object a line."""

    def __init__(
        self, module: str, arguments: Sequence[str], variables: dict[str, str] | None = None
    ) -> None:
        """Starts it in the repository, with variables besides those of this process."""
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, "-u", "-m", f"scripts.gpu_session.{module}", *arguments]
        # It shares the GPU: it takes the memory that it needs, and no more.
        sharing = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | sharing | {"PYTHONPATH": path} | (variables or {}),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._hearer = threading.Thread(target=self._hear, daemon=True)
        self._hearer.start()

    def _hear(self) -> None:
        output = cast(Any, self._process.stdout)
        for line in output:
            self._lines.put(line)
        self._lines.put(None)

    def tell(self, line: str) -> None:
        """Writes a line to its standard input; nothing if it has ended."""
        with contextlib.suppress(OSError, ValueError):
            stream = cast(Any, self._process.stdin)
            stream.write(line + "\n")
            stream.flush()

    def records(self, deadline: float) -> Iterator[dict[str, Any]]:
        """Yields the objects that it prints, until it ends or the time is over."""
        while True:
            try:
                line = self._lines.get(timeout=max(deadline - time.monotonic(), 0))
            except queue.Empty:
                return
            if line is None:
                return
            with contextlib.suppress(ValueError):  # what a library prints
                record = json.loads(line)
                if isinstance(record, dict):
                    yield record

    def is_running(self) -> bool:
        """Returns whether it has not ended."""
        return self._process.poll() is None

    def problem(self) -> str | None:
        """Returns why it did not end well: its last line of errors; None if it did."""
        if self.is_running():
            return "it did not end in time"
        if self._process.returncode == 0:
            return None
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return (lines or [f"status {self._process.returncode}"])[-1][:300]

    def wait(self, seconds: float) -> None:
        """Waits for its end, that many seconds at most."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(seconds, 0))

    def end(self) -> None:
        """Ends it and what it has started."""
        if self.is_running():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._hearer.join(1)
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(OSError):
                cast(Any, stream).close()
