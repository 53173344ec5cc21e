"""Acceptance rules by name."""

from collections.abc import Mapping

from jspec.errors import InputError
from jspec.speculation.acceptance import coupled, greedy, rejection
from jspec.speculation.types import AcceptanceRule

RULES: Mapping[str, AcceptanceRule] = {
    "greedy": greedy.RULE,
    "rejection": rejection.RULE,
    "coupled": coupled.RULE,
}


def get_rule(name: str) -> AcceptanceRule:
    """Returns the rule of that name.

    Raises:
      InputError: no such rule.
    """
    if name not in RULES:
        raise InputError(f"expected an acceptance rule among {', '.join(RULES)}; got {name!r}")
    return RULES[name]


__all__ = ["RULES", "get_rule"]
