"""Speculative decoding for JAX that keeps exactly the target's distribution.

Names are imported when they are first used: `import jspec` alone costs next to nothing.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jspec.errors import InputError
    from jspec.generator import Generator
    from jspec.request import Piece, Request, Result, Settings
    from jspec.stats import Stats

_HOMES = {
    "Generator": "jspec.generator",
    "InputError": "jspec.errors",
    "Piece": "jspec.request",
    "Request": "jspec.request",
    "Result": "jspec.request",
    "Settings": "jspec.request",
    "Stats": "jspec.stats",
}

__all__ = ["Generator", "InputError", "Piece", "Request", "Result", "Settings", "Stats"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'jspec' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
