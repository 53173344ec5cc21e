"""Several processes of one run, on JAX's own runtime: all run the same program on the same input.

Process 0 coordinates them and speaks. The others print errors alone. Where a process is missing or
lost, JAX's C++ ends the others with a page of text: here it becomes one line, and status 2.
"""

import concurrent.futures
import contextlib
import ctypes
import importlib.metadata
import io
import json
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jspec.common.errors import InputError, check_count, describe_error

PATIENCE = 20  # seconds until processes that do not come are missing
HEARTBEAT = 20  # seconds without a sign of life after which a process is lost
_MARGIN = 10  # seconds in which JAX tells of a loss
_OWN = [0]  # the number of this process
_TITLE = ["this process"]  # what its errors call it
_HANDLERS: list[object] = []  # of C++'s aborts, which must live as long as the process
_LIBRARIES = "jspec", "jax", "jaxlib"
# What JAX says before it ends a process, and what that means.
_REASONS = {
    r"CoordinationService/RegisterTask": f"not all processes have come within {PATIENCE} s, or two "
    "have the same --process_id",
    r"(\d+) unexpectedly tried to connect": "a second process came as process {}",
    r"stopped sending heartbeats\):\s+(\d[\d,\s]*)\n": "process {} of the run was lost",
    r"Failed to send RPC to coordination service": "process 0 of the run was lost",
}
_LOST = re.compile(r"\b(gloo|nccl|peer|coordination)\b", re.IGNORECASE)  # in an error


def is_first() -> bool:
    """Returns whether this process is the one that speaks, as that of a run of one process is."""
    return _OWN[0] == 0


def is_loss(error: Exception) -> bool:
    """Returns whether this is what JAX says of a process that is gone."""
    cause = error.__cause__ or error
    # Of a collective it raises either, at once.
    is_of_jax = isinstance(cause, RuntimeError | ValueError) and not isinstance(cause, InputError)
    return is_of_jax and _LOST.search(str(cause)) is not None


@contextlib.contextmanager
def joined(
    coordinator: str | None, number: int | None, process_id: int | None, flags: Mapping[str, str]
) -> Iterator[None]:
    """Joins the processes of a run; at its end it waits for the others.

    After an error it does not: one line says what is wrong, and the process ends with status 2.

    Args:
      coordinator: HOST:PORT at which process 0 is reached; None, and so the next two, where JAX
        finds a cluster that says it.
      number: of processes.
      process_id: number of this process, from 0.
      flags: the values that all processes must be given alike, as texts.
    """
    host, port = _check(coordinator, number, process_id)
    sys.stdout.flush()
    output, errors, log = _take_streams()
    _end_at_aborts(errors, log)
    if process_id is not None:
        _take_part(process_id, number, output, errors)
    try:
        if process_id:
            _await(host, port)
        elif port:
            _check_free(host, port)
        # Programs that run at once may wait for each other's sums: on CPUs one ends before another.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        try:
            jax.distributed.initialize(
                coordinator, number, process_id, initialization_timeout=PATIENCE,
                heartbeat_timeout_seconds=HEARTBEAT, shutdown_timeout_seconds=PATIENCE,
            )  # fmt: skip
        except ValueError as error:  # what it was not told
            raise InputError(f"expected a cluster that JAX knows, such as SLURM: {error}") from None
        process_id = jax.process_index()
        _take_part(process_id, jax.process_count(), output, errors)
        _compare(dict(flags) | {name: version_of(name) or "unknown" for name in _LIBRARIES})
        yield
        jax.distributed.shutdown()
        return
    except Exception as error:
        if is_loss(error):
            time.sleep(HEARTBEAT + _MARGIN)  # JAX will end the process, and name what was lost
            said = f"a process of the run was lost: {describe_error(error)}"
        elif isinstance(error, InputError):
            said = str(error)
        elif isinstance(error, RuntimeError):  # of JAX, perhaps
            said = describe_error(error)
        elif process_id == 0:
            raise
        else:
            traceback.print_exc(file=errors)  # a process that is not the first has no other voice
            errors.flush()
            os._exit(1)  # at once: what JAX does at the end of a program would wait for the others
    _end(said, errors)


def _take_part(process_id: int, number: int | None, output: TextIO, errors: TextIO) -> None:
    """Names this process, and lets it speak if it is the first."""
    _OWN[0], _TITLE[0] = process_id, f"process {process_id} of {number}"
    silence = open(os.devnull, "w")  # noqa: SIM115
    sys.stdout, sys.stderr = (output, errors) if process_id == 0 else (silence, silence)


def _check(coordinator: str | None, number: int | None, process_id: int | None) -> tuple[str, int]:
    """Returns the coordinator's host and port; raises InputError if a value is out of range."""
    if coordinator is None or number is None or process_id is None:
        return "", 0
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"expected coordinator as HOST:PORT, got {coordinator!r}")
    check_count("num_processes", number, 1, 4096)
    check_count("process_id", process_id, 0, number - 1)
    return host, int(port)


def _take_streams() -> tuple[TextIO, TextIO, io.BufferedRandom]:
    """Returns the program's output and errors; C++, which writes there too, gets a file instead."""
    like = {"buffering": 1, "encoding": sys.stdout.encoding, "errors": "replace"}
    output, errors = (os.fdopen(os.dup(stream), "w", **like) for stream in (1, 2))
    log = tempfile.TemporaryFile()  # noqa: SIM115
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    return output, errors, log


def _end_at_aborts(errors: TextIO, log: io.BufferedRandom) -> None:
    """Makes an abort of C++ one line."""

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def on_abort(number: int) -> None:
        log.seek(0)
        text = log.read().decode(errors="replace")
        said = f"ended by JAX: {' '.join(text.split())[:200]}"
        for pattern, reason in _REASONS.items():
            if match := re.search(pattern, text):
                said = reason.format(*(" ".join(group.split()) for group in match.groups()))
        _end(said, errors)

    # Python's own handlers run after the function that was interrupted: of an abort, never.
    ctypes.CDLL(None).signal(signal.SIGABRT, on_abort)
    _HANDLERS.append(on_abort)


def _end(said: str, errors: TextIO) -> None:
    errors.write(f"error: {_TITLE[0]}: {said}\n")
    errors.flush()
    os._exit(2)  # an orderly end would wait for the others


def _check_free(host: str, port: int) -> None:
    """Checks that process 0 can listen; JAX itself ends with a page of text or without any."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            expected = f"a port that is free on this machine in --coordinator={host}:{port}"
            raise InputError(f"expected {expected}: {error.strerror}") from None


def _await(host: str, port: int) -> None:
    """Waits until the coordinator can be reached."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection((host, port), timeout=1).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                reason = error.strerror or error
                raise InputError(
                    f"expected the coordinator, process 0, to answer at {host}:{port} within "
                    f"{PATIENCE} s: {reason}"
                ) from None
        time.sleep(0.2)


def _compare(values: Mapping[str, str]) -> None:
    """Checks that all processes were given the same; raises InputError that names what differs."""
    text = json.dumps(values, sort_keys=True).encode()
    lengths = multihost_utils.process_allgather(np.array([len(text)], np.int32))
    padded = np.frombuffer(text.ljust(int(lengths.max())), np.uint8)
    gathered = np.asarray(multihost_utils.process_allgather(padded)).reshape(-1, padded.size)
    first, *others = (json.loads(row.tobytes()) for row in gathered)
    for number, record in enumerate(others, 1):
        for name in sorted(first.keys() | record.keys()):
            expected, actual = first.get(name), record.get(name)
            if expected != actual:
                raise InputError(
                    f"expected the same flags and versions in all processes, got {name} {expected} "
                    f"in process 0 and {actual} in process {number}"
                )


def version_of(package: str) -> str | None:
    """Returns the version of an installed package; None where it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


_SIGN = 5  # seconds between signs that a call in process 0 goes on
_BUFFER = 4096  # bytes of a short message
_T = TypeVar("_T")


def _is_alone() -> bool:
    """Whether there is one process. Where none has joined another, no device need be there."""
    return not jax.distributed.is_initialized() or jax.process_count() == 1


def least(number: int) -> int:
    """Returns the least of the numbers that the processes of a run call it with."""
    if _is_alone():
        return number
    return int(multihost_utils.process_allgather(np.array([number])).min())


def broadcast(value: Any) -> Any:
    """Returns in all processes what process 0 calls it with; the others call it with None."""
    if _is_alone():
        return value
    data = pickle.dumps(value) if is_first() else b""
    # A buffer of a fixed size, and another for what is longer: few programs are compiled.
    head = len(data).to_bytes(8, "little") + data[: _BUFFER - 8]
    received = _broadcast_bytes(head, _BUFFER)
    size = int.from_bytes(received[:8], "little")
    if size > _BUFFER - 8:
        received += _broadcast_bytes(data[_BUFFER - 8 :], 1 << (size - 1).bit_length())
    return pickle.loads(received[8 : 8 + size])


def of_first(call: Callable[[], _T]) -> _T:
    """Returns in all processes what a call in process 0 returns, or raises its `InputError`.

    It may take long: a collective that nobody joins fails, so the others are told that it goes on.
    """
    if _is_alone():
        return call()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future, outcome = pool.submit(call) if is_first() else None, None
        while outcome is None:
            if future is not None and concurrent.futures.wait([future], _SIGN).done:
                try:
                    outcome = future.result(), None
                except InputError as error:
                    outcome = None, error
            outcome = broadcast(outcome)
    value, error = outcome
    if error is not None:
        raise error
    return value


def fetch(tree: Any) -> Any:
    """Returns arrays on the host of every process, which all call it together."""
    leaves = jax.tree.leaves(tree)
    if all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves):
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)


def _broadcast_bytes(data: bytes, size: int) -> bytes:
    padded = np.frombuffer(data.ljust(size, b"\0"), np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes()
