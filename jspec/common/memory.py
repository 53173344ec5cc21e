"""Memory budgets: checked before memory is taken, because a system that runs out kills the process.

On CPU the free memory is the smaller of what the system and the process's control group can give.
"""

import contextlib
import ctypes
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from jspec.common.errors import InputError
from jspec.common.timing import COMPILE_EVENTS

_OWN_GROUP = pathlib.Path("/proc/self/cgroup")
_GROUPS = pathlib.Path("/sys/fs/cgroup")
# Of malloc.h: M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD.
_KEEP_FREED = {-8: 1, -4: 0, -1: 2**31 - 1, -2: 2**26}
_LONG_COMPILATION = 0.1  # seconds; a shorter stage frees too little to give back


class CacheSize(NamedTuple):
    """The bytes of a batch's caches and of the rest of its rows' states, of `capacity` slots a row.

    A batch of several rows needs memory for one more, whose prompt is being read.
    """

    num_rows: int
    capacity: int
    num_bytes: int

    def __str__(self) -> str:
        rows = "1 row" if self.num_rows == 1 else f"{self.num_rows} rows and one prompt"
        return f"{rows} of {self.capacity} slots"


class Budget(NamedTuple):
    """A device by name, and the bytes that its models' parameters and their caches need there.

    A note says what was chosen for the device.
    """

    device: str
    weights: int
    cache_size: CacheSize
    note: str = ""

    def __str__(self) -> str:
        weights, caches = (
            f"{size / 1e9:.2f} GB" for size in (self.weights, self.cache_size.num_bytes)
        )
        note = f"; {self.note}" if self.note else ""
        return f"{self.device}: weights {weights}, caches {caches} ({self.cache_size}){note}"


def device_name(num_used: int = 1) -> str:
    """Returns the default device's kind: cpu, or gpu (NVIDIA H100 80GB HBM3), and of how many."""
    device, *others = jax.devices()
    platform, kind = device.platform, device.device_kind
    name = platform if kind == platform else f"{platform} ({kind})"
    if num_used > 1:
        return f"{num_used} of {1 + len(others)} devices, {name}"
    return f"{name}, the first of {1 + len(others)}" if others else name


def check_memory(needs: Mapping[str, int], advice: str | Callable[[], str]) -> None:
    """Checks that the default device has enough free memory for needs, bytes by their names.

    A margin must be free beside them.

    Raises:
      InputError: it has not; the message holds the needs, and advice what to reduce.
    """
    if fits(sum(needs.values())):
        return
    needed = dict(needs) | {"margin": _margin(sum(needs.values()))}
    parts = ", ".join(f"{name} {size / 1e9:.3g} GB" for name, size in needed.items())
    free = f"got {(available_bytes() or 0) / 1e9:.3g} GB"
    raise InputError(
        f"not enough memory: expected {sum(needed.values()) / 1e9:.3g} GB to be free ({parts}), "
        f"{free}; {advice if isinstance(advice, str) else advice()}"
    )


def fits(num_bytes: int) -> bool:
    """Returns whether the default device has that much free memory and the margin, if it says."""
    available = available_bytes()
    return available is None or num_bytes + _margin(num_bytes) <= available


def _margin(num_bytes: int) -> int:
    """Returns what stays free: programs take memory, too, and what is free changes."""
    return num_bytes // 50


def give_back_freed() -> None:
    """Returns freed memory to the system; glibc would keep it for later."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """From now on keeps what was freed for whoever needs memory next, in any thread.

    glibc would keep some for each thread: a server whose threads read large requests in turn held
    twice the memory. And it would give larger pieces back at once, such as the temporary arrays of
    a program, which the system then clears anew for every run. See also `give_back_freed`.
    """
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in _KEEP_FREED.items():
            mallopt(option, value)


@functools.cache
def give_back_after_compiling() -> None:
    """From now on returns the memory that tracing and compiling have freed, which is a lot."""

    def on_event(event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith(COMPILE_EVENTS) and duration_secs > _LONG_COMPILATION:
            give_back_freed()

    jax.monitoring.register_event_duration_secs_listener(on_event)


def tree_bytes(tree: Any) -> int:
    """Returns the bytes of a pytree's arrays, or of arrays with the shapes in it."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def available_bytes() -> int | None:
    """Returns how many more bytes the default device can hold; None where this is unknown."""
    import psutil  # 30 ms

    device = jax.local_devices()[0]
    if device.platform == "cpu":
        system = psutil.virtual_memory().available + psutil.swap_memory().free
        return min([system, *_group_bytes()])
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def _group_bytes() -> list[int]:
    """Returns what the process's control group, a container's say, and those around it may take."""
    free = []
    lines = _OWN_GROUP.read_text().splitlines() if _OWN_GROUP.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers == "":  # cgroup v2
            base, limit, used = _GROUPS, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):  # cgroup v1
            base = _GROUPS / "memory"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        innermost = base / path.strip("/")
        for folder in (innermost, *innermost.parents)[: len(innermost.parts) - len(base.parts) + 1]:
            with contextlib.suppress(OSError, ValueError):  # no such file; "max": no limit
                most, in_use = (int((folder / name).read_text()) for name in (limit, used))
                stats = dict(map(str.split, (folder / "memory.stat").read_text().splitlines()))
                # Cached files count as free: they can be read again.
                files = sum(int(stats.get(name, 0)) for name in ("inactive_file", "active_file"))
                free.append(most - in_use + files)
    return free
