"""Ways of generating that differ in the number of drafts alone: one line of a figure."""

import json
import re
from collections.abc import Mapping
from typing import Any

_NUMBER = re.compile(r"[^0-9A-Za-z]+(\d+|auto)$")


def families(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Returns the number of drafts of each way, by family and label, rising.

    Plain decoding and numbers that adapt ("auto") belong to none.

    Args:
      methods: of a config, by their labels.
    """
    members: dict[str, dict[str, int]] = {}
    for label, method in methods.items():
        number = method.get("num_draft_tokens")
        if method.get("drafter") != "none" and isinstance(number, int):
            rest = {key: value for key, value in method.items() if key != "num_draft_tokens"}
            members.setdefault(json.dumps(rest, sort_keys=True), {})[label] = number
    named: dict[str, dict[str, int]] = {}
    for own in members.values():
        name = _name_of(list(own))
        name = next(iter(own)) if name in named else name
        named[name] = dict(sorted(own.items(), key=lambda item: item[1]))
    return named


def widest(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Returns the way with the most drafts of each family, by the family's name."""
    return {name: list(own)[-1] for name, own in families(methods).items()}


def _name_of(labels: list[str]) -> str:
    stripped = {_NUMBER.sub("", label) for label in labels}
    return stripped.pop() if len(stripped) == 1 else labels[0]
