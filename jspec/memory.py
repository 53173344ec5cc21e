"""What fits: a budget is checked before memory is taken, where a system would kill the process."""

import contextlib
import ctypes
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from jspec.errors import InputError

_MEMINFO = pathlib.Path("/proc/meminfo")
_OWN_GROUP = pathlib.Path("/proc/self/cgroup")
_GROUPS = pathlib.Path("/sys/fs/cgroup")


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
    """Returns what the process's control group may still take: a container's limit."""
    try:
        (own,) = [line for line in _OWN_GROUP.read_text().splitlines() if line.startswith("0::")]
        folder = _GROUPS / own.removeprefix("0::").lstrip("/")
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        stats = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return int(limit) - used + int(stats.get("inactive_file", 0))  # files can be read again
