"""What the rest of jspec needs to know of the device, by purpose rather than by name."""

import contextlib
import datetime
import logging
import os
import pathlib
import platform
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.backend import backends, clear_backends
from jax.typing import DTypeLike

from jspec.common.errors import InputError, say
from jspec.common.processes import version_of
from jspec.kernels import library
from jspec.kernels.backend import asked_kernels, backend, may_be_native

_START = logging.getLogger("jax._src.xla_bridge")  # what JAX says when it starts
_HINT = re.compile(r" \((?:set JAX_PLATFORMS|you may need).*")  # at the end of its errors


_FEW_TOKENS = 64
_PACKAGES = ("jspec", "jax", "jaxlib", "flax", "numpy", "transformers", "torch")


class TimedProducts(NamedTuple):
    """Products to measure the default device by: a kernel of `num_bytes`, which no cache holds, for
    the rate of reading weights; and `rows` of `width` inputs and outputs, bound by arithmetic, for
    the rate of operations. They take rows of `rows_dtype` without a conversion.
    """

    num_bytes: int
    rows: int
    width: int
    rows_dtype: DTypeLike


def timed_products(kernel_dtype: DTypeLike) -> TimedProducts:
    """Returns the products by which the default device is measured with kernels of that type."""
    if backend() == "cpu":
        # The C++ reads float32 rows, whatever the kernel's type.
        return TimedProducts(256 << 20, 512, 2048, jnp.float32)
    return TimedProducts(2 << 30, 8192, 8192, kernel_dtype)


def is_as_fast_as_one(num_tokens: int) -> bool:
    """Returns whether a call on that many tokens takes about as long as a call on a token."""
    # Where weights are read at the full bandwidth of memory, a few hundred products of each are
    # free. It is a guess: no device has measured it.
    return backend() != "cpu" and num_tokens <= _FEW_TOKENS


def devices_per_memory() -> int:
    """Returns how many of a process's devices share a memory: on a CPU all, which are virtual."""
    return jax.local_device_count() if backend() == "cpu" else 1


def prefers_unrolled_loops() -> bool:
    """Returns whether a short loop of small operations is better written out.

    On a GPU the turns of a loop are what costs. On CPU operations are machine code to compile.
    """
    return backend() != "cpu"


def describe_device() -> dict[str, str | None]:
    """Returns JAX's names for the default device, and the C++ library's fingerprint or None."""
    check_device()
    kind = jax.devices()[0].device_kind
    native = library.cpp_recipe().fingerprint() if library.is_available() else None
    return {"backend": jax.default_backend(), "device": kind, "native": native}


def environment() -> dict[str, Any]:
    """Returns date, device, processor, C++ library and versions."""
    return {
        "date": datetime.date.today().isoformat(),
        **describe_device(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in _PACKAGES},
    }


def _processor() -> str:
    """Returns the processor's name, from Linux where it is Linux."""
    with contextlib.suppress(OSError):
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
        if match := re.search(r"^model name\s*: (.+)$", text, re.MULTILINE):
            return match[1].strip()
    return platform.processor() or platform.machine()


def check_device() -> None:
    """Starts JAX, unless it has started, on the devices that JAX_PLATFORMS names.

    Where it names none, and JAX cannot use what is there, as a GPU whose driver is too old for
    JAX's wheels, one line says why, and the CPU is taken.

    Raises:
      InputError: JAX_PLATFORMS or JSPEC_KERNELS names what is not there, or JSPEC_NATIVE is
        neither 0 nor 1.
    """
    asked_kernels()
    may_be_native()
    problems: list[str] = []

    def hear(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            error = record.exc_info[1] if record.exc_info else None  # of a plugin
            causes = filter(None, (error, error and error.__cause__))
            problems.append(": ".join(map(str, causes)) or record.getMessage())
        return record.levelno < logging.WARNING

    asked = jax.config.values["jax_platforms"]
    _START.addFilter(hear)
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:  # jax raises either where there is no GPU
        problems.insert(0, str(error))
        if asked:
            expected, reason = ", ".join(_find_platforms(asked)), _first_reason(problems)
            why = f" ({reason})" if reason else ""
            raise InputError(f"expected JAX_PLATFORMS among {expected}; got {asked}{why}") from None
        jax.config.update("jax_platforms", "cpu")
    finally:
        _START.removeFilter(hear)
    if problems:
        name = jax.default_backend().upper()
        say(f"jspec: it goes on with the {name}: {_first_reason(problems)}")


def _first_reason(problems: Sequence[str]) -> str:
    return _HINT.sub("", " ".join(next(filter(None, problems), "").split()))[:200]


def _find_platforms(asked: str) -> list[str]:
    """Returns what JAX_PLATFORMS could name here; what it does name stays as it is."""
    jax.config.update("jax_platforms", None)
    try:
        return sorted(backends())
    except (AssertionError, RuntimeError):  # a plugin that is installed does not work
        return ["cpu"]
    finally:
        jax.config.update("jax_platforms", asked)
        clear_backends()  # or what was found now would be taken by the next call
