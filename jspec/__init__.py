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

_NAMES = {
    "jspec.common.errors": "InputError",
    "jspec.drafters": "BuiltDrafter DrafterEntry DrafterOptions DrafterSpec register_drafter",
    "jspec.generation.generator": "Generator",
    "jspec.generation.request": "Request SamplingParams",
    "jspec.generation.result": "Chunk Result Stats",
    "jspec.sampling.settings": "Processor",
    "jspec.speculation.acceptance": "RuleOptions register_rule",
    "jspec.speculation.distributions": "Categorical Gaussian",
    "jspec.speculation.functions": "Speculation speculate",
    "jspec.speculation.types": "AcceptanceRule Proposal Verdict",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

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
