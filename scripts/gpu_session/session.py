"""Steps one after another, each within its seconds, and a journal of all that they find.

A step runs in its own thread. Where it raises, or its time is over, the next one begins: a
thread that does not come back (XLA compiles, a kernel hangs) is abandoned, and writes nothing more.
"""

import concurrent.futures
import contextlib
import dataclasses
import datetime
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from jspec.common.errors import describe_error
from jspec.common.journal import Journal, Record

ROOT = pathlib.Path(__file__).parents[2]
MOST_COMPILATIONS = 12  # at a time: XLA uses more than one core for each
_NO_TIME = "the time of this call is over"
_LEAST_SECONDS = 3.0  # with which a step is begun
LATE = "it did not end in time"
_GRACE = 2.0  # seconds in which a step may notice that its time is over


class OutOfTime(Exception):
    """The time of a step is over."""


class LeftOut(Exception):
    """A step cannot be run here; the text says why."""


class Step(NamedTuple):
    """One step of the plan.

    Attributes:
      name: in the journal.
      part: 1 or 2; each part fits into one call.
      seconds: for which it runs at most; what the steps before it have saved comes on top. A step
        of none runs in saved time alone.
      run: does it; returns what is decided by it, in a line.
      needs_right_rounds: whether it is left out while rounds are known to be wrong.
    """

    name: str
    part: int
    seconds: int
    run: "Callable[[Work], str]"
    needs_right_rounds: bool = False


class Child:
    """A module of this package in its own process, which prints JSON, an object a line."""

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
                self._lines.put(None)  # it has ended for later calls, too
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
            return LATE
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


class Session:
    """What the steps share.

    Attributes:
      is_rehearsal: whether models are tiny and figures mean nothing.
      records: all lines of the journal, those of earlier calls included.
      shared: what steps of one call leave for later ones, such as a process in the background.
    """

    def __init__(self, journal: Journal, begin: float, *, is_rehearsal: bool) -> None:
        """`begin` is when the program started, by `time.monotonic`."""
        self._journal, self._begin, self.is_rehearsal = journal, begin, is_rehearsal
        self.records: list[Record] = journal.read()
        self.shared: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._call = 1 + sum(record["kind"] == "call" for record in self.records)

    def elapsed(self) -> float:
        """Returns the seconds since the program started."""
        return time.monotonic() - self._begin

    def write(self, kind: str, line: str, /, **values: Any) -> None:
        """Writes a line to the journal, at once, and one for people to standard output."""
        moment = datetime.datetime.now().isoformat("T", "seconds")
        record = {"kind": kind, "call": self._call, "at": moment, **values}
        with self._lock:
            self._journal.append(record)
            self.records.append(record)
        print(f"{self.elapsed():5.0f} s  {line}", flush=True)

    def figures(self, step: str, name: str) -> list[Record]:
        """Returns what a step has recorded under a name, in this call or earlier."""
        return [
            record
            for record in self.records
            if (record["kind"], record.get("step"), record.get("name")) == ("figure", step, name)
        ]

    def outcome(self, step: str) -> Record | None:
        """Returns how a step ended when it was run last; None if it never was."""
        ends = [
            record for record in self.records if record["kind"] == "step" and record["step"] == step
        ]
        return ends[-1] if ends else None

    def close(self) -> None:
        """Ends the processes that no step has ended."""
        for shared in self.shared.values():
            if isinstance(shared, Child):
                shared.end()

    def verdict(self) -> str:
        """Returns what the step `seeds` found of rounds; "unknown" before it."""
        verdicts = self.figures("seeds", "verdict")
        return verdicts[-1]["verdict"] if verdicts else "unknown"


@dataclasses.dataclass
class Work:
    """One step at work.

    Attributes:
      session: whose step it is.
      name: of the step.
      deadline: by `time.monotonic`.
      is_abandoned: whether its time is over, and nothing more is expected of it.
      children: the processes that it has started, which end with it.
    """

    session: Session
    name: str
    deadline: float
    is_abandoned: bool = False
    children: list[Child] = dataclasses.field(default_factory=list)

    @property
    def is_rehearsal(self) -> bool:
        """Whether models are tiny and figures mean nothing."""
        return self.session.is_rehearsal

    def left(self) -> float:
        """Returns the seconds that are left."""
        return self.deadline - time.monotonic()

    def check_time(self) -> None:
        """Raises `OutOfTime` if its time is over; to be called before each thing that is begun."""
        if self.is_abandoned or self.left() <= 0:
            raise OutOfTime

    def record(self, name: str, /, **values: Any) -> None:
        """Writes what was found under a name, and nothing once the step is abandoned."""
        if self.is_abandoned:
            raise OutOfTime
        shown = ", ".join(f"{key} {_shorten(value)}" for key, value in values.items())
        said = f"{self.name}: {name}: {shown}"
        self.session.write("figure", said, step=self.name, name=name, **values)

    def start(self, module: str, *arguments: str, **variables: str) -> Child:
        """Starts a module of this package in a process that ends with the step."""
        child = Child(module, arguments, variables)
        self.children.append(child)
        return child

    def together(
        self, jobs: Mapping[str, Callable[[], Any]], what: str = "compiled", share: float = 0.7
    ) -> dict[str, Any]:
        """Runs jobs in threads, such as programs to be compiled: XLA releases Python's lock.

        Compile large programs in these threads, and run them later: while one thread records a CUDA
        graph, what cuDNN loads in another can fail.

        They have a share of the time that is left, so that what has ended can still be measured.

        Returns:
          What each has returned. Of one that raised, or has not ended in time, the journal says so,
          and it is left out.
        """
        self.check_time()
        pool = concurrent.futures.ThreadPoolExecutor(MOST_COMPILATIONS)
        begin = time.monotonic()
        futures = {name: pool.submit(job) for name, job in jobs.items()}
        concurrent.futures.wait(futures.values(), timeout=max(share * self.left(), 0))
        pool.shutdown(wait=False, cancel_futures=True)
        results = {}
        for name, future in futures.items():
            if not future.done() or future.cancelled():
                self.record("not in time", job=name)
            elif isinstance(error := future.exception(), Exception):
                self.record("failed", job=name, error=describe_error(error)[:300])
            else:
                results[name] = future.result()
        seconds = round(time.monotonic() - begin, 1)
        self.record(what, jobs=len(jobs), ended=len(results), seconds=seconds)
        self.check_time()
        return results


def run_steps(
    session: Session, steps: Sequence[Step], *, until: float, scale: float = 1.0
) -> dict[str, str]:
    """Runs steps that the journal does not have yet, in their order.

    The last one has to end `until` seconds after the start of the program; `scale` is of the steps'
    seconds.

    Returns:
      Why steps are not done, by name: one that failed, was ended, or had no time left.
    """
    planned, problems = 0.0, {}
    for step in steps:
        before = session.outcome(step.name)
        if before is not None and before["outcome"] == "done":
            print(f"{step.name}: is in the journal already: {before['said']}", flush=True)
            continue
        planned += step.seconds * scale
        seconds = min(planned, until) - session.elapsed()
        begin = time.monotonic()
        if step.needs_right_rounds and session.verdict() == "wrong":
            outcome, said = "left out", "rounds are wrong: see the step seeds"
        elif seconds < _LEAST_SECONDS:
            outcome, said = "left out", _NO_TIME
        else:
            if session.verdict() == "graph off":
                os.environ["JSPEC_ONE_GRAPH"] = "0"
            outcome, said = _run_step(session, step, begin + seconds)
        took, limit = round(time.monotonic() - begin, 1), round(max(seconds, 0.0), 1)
        session.write(
            "step", f"== {step.name}: {outcome} in {took} of {limit} s: {said}",
            step=step.name, outcome=outcome, said=said, seconds=took, limit=limit,
        )  # fmt: skip
        if outcome in ("failed", "ended") or (said == _NO_TIME and step.seconds > 0):
            problems[step.name] = said
    return problems


def _run_step(session: Session, step: Step, deadline: float) -> tuple[str, str]:
    work, ends = Work(session, step.name, deadline), []

    def guarded() -> None:
        try:
            ends.append(("done", step.run(work)))
        except OutOfTime:
            ends.append(("ended", "its time was over"))
        except LeftOut as reason:
            ends.append(("left out", str(reason)))
        except Exception as error:  # whatever a step raises stops no other
            ends.append(("failed", describe_error(error)[:500]))

    thread = threading.Thread(target=guarded, name=step.name, daemon=True)
    thread.start()
    thread.join(max(deadline - time.monotonic(), 0) + _GRACE)
    work.is_abandoned = True
    for child in work.children:
        child.end()
    return ends[0] if ends else ("ended", "its time was over, and it did not come back")


def _shorten(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
