"""Acceptance rules by name: which drafts are accepted, and which token follows them."""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from jspec.common.errors import InputError, check_numbers, check_type
from jspec.speculation.types import AcceptanceRule


def _option(default: Any, low: float, high: float) -> Any:
    return dataclasses.field(default=default, metadata={"between": (low, high)})


@dataclasses.dataclass(frozen=True)
class RuleOptions:
    """Options of some rules; the other rules ignore them.

    Each field's metadata says between which values it must be.

    Attributes:
      lenience: for `lenient` and `lenient_argmax`, from 0 to 1; 1 is no lenience.
      typical_epsilon: for `typical`, a probability that is always enough.
      typical_delta: for `typical`, the part of exp(-entropy) that is enough. Both defaults are
        those of Medusa's own code, with delta about the square root of epsilon.
    """

    lenience: float = _option(0.5, 0.0, 1.0)
    typical_epsilon: float = _option(0.09, 0.0, 1.0)
    typical_delta: float = _option(0.3, 0.0, 1.0)

    def __post_init__(self) -> None:
        check_numbers(self)


def _module(name: str) -> Any:
    # Imported when the rule is asked for.
    return importlib.import_module(f"jspec.speculation.acceptance.{name}")


RULES: dict[str, Callable[[RuleOptions], AcceptanceRule]] = {
    "greedy": lambda options: _module("greedy").RULE,
    "rejection": lambda options: _module("rejection").RULE,
    "block": lambda options: _module("block").RULE,
    "coupled": lambda options: _module("coupled").RULE,
    "k_seq": lambda options: _module("k_seq").RULE,
    "lenient": lambda options: _module("lenient").make_rule(options.lenience),
    "lenient_argmax": lambda options: _module("lenient").make_argmax_rule(options.lenience),
    "typical": lambda options: _module("typical").make_rule(
        options.typical_epsilon, options.typical_delta
    ),
}

# For timing only: their output means nothing, so no program that writes text offers them.
TIMING_RULES: Mapping[str, Callable[[RuleOptions], AcceptanceRule]] = {
    "synthetic": lambda options: _module("synthetic").RULE
}

BUILT_IN = frozenset({**RULES, **TIMING_RULES})  # RULES grows with your own


def register_rule(name: str, rule: AcceptanceRule) -> None:
    """Makes a rule of your own known by name, to every program and to `Generator`.

    Example:
      >>> jspec.register_rule("my_rule", RULE)

    Raises:
      InputError: there is another rule of that name, or it is no `AcceptanceRule`.
    """
    check_type("rule", rule, AcceptanceRule)
    if name in {**RULES, **TIMING_RULES} and get_rule(name) is not rule:
        raise InputError(
            f"the acceptance rule {name!r} is already registered: choose another name, or register "
            "nothing and give the AcceptanceRule itself to Generator"
        )
    RULES[name] = lambda options: rule


def get_rule(name: str, options: RuleOptions = RuleOptions()) -> AcceptanceRule:
    """Returns the rule of that name; equal options give the same object.

    Raises:
      InputError: no such rule, or an option of any rule is out of its range.
    """
    known = {**RULES, **TIMING_RULES}
    if name not in known:
        raise InputError(f"expected an acceptance rule among {', '.join(RULES)}; got {name!r}")
    for field in dataclasses.fields(options):
        (low, high), value = field.metadata["between"], getattr(options, field.name)
        if not low <= value <= high:
            title = f"a {field.name.replace('_', ' ')} from {low:g} to {high:g}"
            raise InputError(f"expected {title}; got {value}")
    return known[name](options)


__all__ = ["BUILT_IN", "RULES", "TIMING_RULES", "RuleOptions", "get_rule", "register_rule"]
