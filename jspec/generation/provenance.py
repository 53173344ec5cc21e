"""Where and with what a measurement was made."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess
from typing import Any

from jspec import kernels

_PACKAGES = ("jspec", "jax", "jaxlib", "flax", "numpy", "transformers", "torch")


def environment() -> dict[str, Any]:
    """Returns date, device, processor, C++ library and versions."""
    return {
        "date": datetime.date.today().isoformat(),
        **kernels.describe_device(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """Returns the processor's name, from Linux where it is Linux."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def git_state() -> dict[str, Any] | None:
    """Returns the commit of the checkout that jspec runs from, and whether files differ from it.

    None where it runs from no checkout.
    """
    here = pathlib.Path(__file__)

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(here.parent), *arguments], capture_output=True, check=True, text=True
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # a checkout of something else is none
        return {
            "commit": git("rev-parse", "HEAD"),
            "is_dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.CalledProcessError):
        return None
