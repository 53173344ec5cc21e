"""What fits: a budget is checked before memory is taken, where a system would kill the process."""

import contextlib
import ctypes
import functools
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jspec.common.errors import InputError

_MEMINFO = pathlib.Path("/proc/meminfo")
_OWN_GROUP = pathlib.Path("/proc/self/cgroup")
_GROUPS = pathlib.Path("/sys/fs/cgroup")
_COMPILING = "/jax/core/compile/"  # how JAX's events begin, of which each stage gives one
_LONG_COMPILATION = 0.1  # seconds, from which on what a stage freed is worth a look


class Room(NamedTuple):
    """The memory of a batch's caches and of what else a row holds.

    Attributes:
      num_rows: of the batch; several need as much again for one more, whose prompt is being read.
      capacity: tokens of each.
      num_bytes: of all.
    """

    num_rows: int
    capacity: int
    num_bytes: int

    def __str__(self) -> str:
        rows = "1 row" if self.num_rows == 1 else f"{self.num_rows} rows and one prompt"
        return f"{rows} of {self.capacity} tokens"


class Budget(NamedTuple):
    """Where answers are computed, and what they need there.

    Attributes:
      device: its name.
      weights: bytes of all models' parameters.
      room: of the caches.
    """

    device: str
    weights: int
    room: Room

    def __str__(self) -> str:
        weights, caches = (f"{size / 1e9:.2f} GB" for size in (self.weights, self.room.num_bytes))
        return f"{self.device}: weights {weights}, caches {caches} ({self.room})"


def device_name() -> str:
    """Returns the default device's kind: cpu, or gpu (NVIDIA H100 80GB HBM3)."""
    device = jax.devices()[0]
    platform, kind = device.platform, device.device_kind
    return platform if kind == platform else f"{platform} ({kind})"


def check_memory(needs: Mapping[str, int], advice: str) -> None:
    """Checks that the default device still has room.

    Args:
      needs: bytes, by what they are for.
      advice: what could be reduced.

    Raises:
      InputError: it has not; the budget, and the advice.
    """
    available, needed = available_bytes(), sum(needs.values())
    if available is None or needed <= available:
        return
    parts = ", ".join(f"{name} {_gigabytes(size)}" for name, size in needs.items())
    raise InputError(
        f"not enough memory: expected {_gigabytes(needed)} to be free ({parts}), got "
        f"{_gigabytes(available)}; {advice}"
    )


def give_back_freed() -> None:
    """Gives memory that was freed back to the system, which glibc would keep for later."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library, or system
        ctypes.CDLL(None).malloc_trim(0)


@functools.cache
def give_back_after_compiling() -> None:
    """From now on gives back what tracing and compiling have freed, which is a lot."""
    jax.monitoring.register_event_duration_secs_listener(_on_event)


def _on_event(event: str, duration_secs: float, **_: str | int) -> None:
    if event.startswith(_COMPILING) and duration_secs > _LONG_COMPILATION:
        give_back_freed()


def tree_bytes(tree: Any) -> int:
    """Returns the size of a pytree's arrays, or of arrays of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB"


def available_bytes() -> int | None:
    """Returns how much more the default device can hold; None where nobody says."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        rooms = [room for room in (_system_bytes(), _group_bytes()) if room is not None]
        return min(rooms, default=None)
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def _system_bytes() -> int | None:
    """Returns the memory and the swap that Linux could give."""
    try:
        lines = [line.split() for line in _MEMINFO.read_text().splitlines()]
    except OSError:
        return None
    kilobytes = {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}
    if "MemAvailable" not in kilobytes:
        return None
    return 1024 * (kilobytes["MemAvailable"] + kilobytes.get("SwapFree", 0))


def _group_bytes() -> int | None:
    """Returns what the process's control group, and those around it, may still take."""
    try:
        lines = [line.split(":", 2) for line in _OWN_GROUP.read_text().splitlines()]
    except OSError:
        return None
    rooms = []
    for _, controllers, path in lines:
        if controllers == "":  # version 2
            base, limit, used = _GROUPS, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):  # version 1
            base, limit = _GROUPS / "memory", "memory.limit_in_bytes"
            used = "memory.usage_in_bytes"
        else:
            continue
        own = base / path.strip("/")
        folders = [own, *own.parents][: len(own.parts) - len(base.parts) + 1]
        rooms += [_room_of(folder, limit, used) for folder in folders]
    return min((room for room in rooms if room is not None), default=None)


def _room_of(folder: pathlib.Path, limit: str, used: str) -> int | None:
    """Returns what one group may still take; files that it holds can be read again."""
    try:
        most = int((folder / limit).read_text())  # no number where there is no limit
        stats = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        files = sum(int(stats.get(name, 0)) for name in ("inactive_file", "active_file"))
        return most - int((folder / used).read_text()) + files
    except (OSError, ValueError):
        return None
