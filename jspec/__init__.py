"""Speculative decoding for JAX that keeps exactly the target's distribution.

Names are imported when they are first used: `import jspec` alone costs next to nothing.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jspec.common.errors import InputError
    from jspec.drafters import (
        BuiltDrafter,
        DrafterEntry,
        DrafterOptions,
        DrafterSpec,
        register_drafter,
    )
    from jspec.generation.generator import Generator
    from jspec.generation.request import Request, SamplingParams
    from jspec.generation.result import Chunk, Result, Stats
    from jspec.sampling.processors import Processor
    from jspec.speculation.acceptance import RuleOptions, register_rule
    from jspec.speculation.acceptance.types import AcceptanceRule, Proposal, Verdict

_HOMES = {
    "AcceptanceRule": "jspec.speculation.acceptance.types",
    "BuiltDrafter": "jspec.drafters",
    "DrafterEntry": "jspec.drafters",
    "DrafterOptions": "jspec.drafters",
    "DrafterSpec": "jspec.drafters",
    "Generator": "jspec.generation.generator",
    "InputError": "jspec.common.errors",
    "Chunk": "jspec.generation.result",
    "Processor": "jspec.sampling.processors",
    "Proposal": "jspec.speculation.acceptance.types",
    "Request": "jspec.generation.request",
    "Result": "jspec.generation.result",
    "RuleOptions": "jspec.speculation.acceptance",
    "SamplingParams": "jspec.generation.request",
    "Stats": "jspec.generation.result",
    "Verdict": "jspec.speculation.acceptance.types",
    "register_drafter": "jspec.drafters",
    "register_rule": "jspec.speculation.acceptance",
}

__all__ = [
    "AcceptanceRule",
    "BuiltDrafter",
    "Chunk",
    "DrafterEntry",
    "DrafterOptions",
    "DrafterSpec",
    "Generator",
    "InputError",
    "Processor",
    "Proposal",
    "Request",
    "Result",
    "RuleOptions",
    "SamplingParams",
    "Stats",
    "Verdict",
    "register_drafter",
    "register_rule",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("jspec")
    if name not in _HOMES:
        raise AttributeError(f"module 'jspec' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
