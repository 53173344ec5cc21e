"""Speculative decoding for JAX that keeps exactly the target's distribution.

Names are imported when they are first used: `import jspec` alone costs next to nothing.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jspec.common.errors import InputError
    from jspec.generation.generator import Generator
    from jspec.generation.request import Request, Settings
    from jspec.generation.result import Piece, Result
    from jspec.generation.stats import Stats

_HOMES = {
    "Generator": "jspec.generation.generator",
    "InputError": "jspec.common.errors",
    "Piece": "jspec.generation.result",
    "Request": "jspec.generation.request",
    "Result": "jspec.generation.result",
    "Settings": "jspec.generation.request",
    "Stats": "jspec.generation.stats",
}

__all__ = ["Generator", "InputError", "Piece", "Request", "Result", "Settings", "Stats"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'jspec' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
