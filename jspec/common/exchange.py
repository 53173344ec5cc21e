"""What the processes of a run tell each other; all of them call these functions together."""

import concurrent.futures
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jspec.common.errors import InputError
from jspec.common.processes import is_first

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
