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
    from jspec.sampling.settings import Processor
    from jspec.speculation.acceptance import RuleOptions, register_rule
    from jspec.speculation.distributions import Categorical, Gaussian
    from jspec.speculation.functions import Speculation, speculate
    from jspec.speculation.types import AcceptanceRule, Proposal, Verdict

_HOMES = {
    "AcceptanceRule": "jspec.speculation.types",
    "BuiltDrafter": "jspec.drafters",
    "DrafterEntry": "jspec.drafters",
    "DrafterOptions": "jspec.drafters",
    "DrafterSpec": "jspec.drafters",
    "Categorical": "jspec.speculation.distributions",
    "Gaussian": "jspec.speculation.distributions",
    "Generator": "jspec.generation.generator",
    "InputError": "jspec.common.errors",
    "Chunk": "jspec.generation.result",
    "Processor": "jspec.sampling.settings",
    "Proposal": "jspec.speculation.types",
    "Request": "jspec.generation.request",
    "Result": "jspec.generation.result",
    "RuleOptions": "jspec.speculation.acceptance",
    "SamplingParams": "jspec.generation.request",
    "Speculation": "jspec.speculation.functions",
    "Stats": "jspec.generation.result",
    "Verdict": "jspec.speculation.types",
    "register_drafter": "jspec.drafters",
    "register_rule": "jspec.speculation.acceptance",
    "speculate": "jspec.speculation.functions",
}

__all__ = [
    "AcceptanceRule",
    "BuiltDrafter",
    "Categorical",
    "Chunk",
    "DrafterEntry",
    "DrafterOptions",
    "DrafterSpec",
    "Gaussian",
    "Generator",
    "InputError",
    "Processor",
    "Proposal",
    "Request",
    "Result",
    "RuleOptions",
    "SamplingParams",
    "Speculation",
    "Stats",
    "Verdict",
    "register_drafter",
    "register_rule",
    "speculate",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("jspec")
    if name not in _HOMES:
        raise AttributeError(f"module 'jspec' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
