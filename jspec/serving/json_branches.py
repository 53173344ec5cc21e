"""Which JSON schemas exclude each other: only then is `oneOf` what `anyOf` is."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def exclude_each_other(schemas: Sequence[Any], resolve: Callable[[Any], Any]) -> bool:
    """Returns whether it is plain that no value satisfies two of these schemas.

    They differ in type or constants, or are of objects that must have one property which does.
    `resolve` returns what a schema refers to.
    """
    pairs = itertools.combinations([resolve(one) for one in schemas], 2)
    return all(_are_apart(one, other, resolve) for one, other in pairs)


def _are_apart(one: Any, other: Any, resolve: Callable[[Any], Any]) -> bool:
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return False
    types = [_types(each) for each in (one, other)]
    if not types[0] & types[1]:
        return True
    mine, theirs = _constants(one), _constants(other)
    if mine is not None and theirs is not None:
        return not mine & theirs
    if types != [{"object"}] * 2:
        return False
    return any(
        exclude_each_other([each["properties"][name] for each in (one, other)], resolve)
        for name in one.get("required", ())
        if name in other.get("required", ())
        and all(name in each.get("properties", {}) for each in (one, other))
    )


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Returns the types that a schema's values may have; an integer is a number, too."""
    found = schema.get("type", ["object", "array", "string", "number", "boolean", "null"])
    found = set(found if isinstance(found, list) else [found])
    constants = _constants(schema)
    if constants is not None:
        found = {kind for kind, _ in constants}
    return {"number" if kind == "integer" else kind for kind in found}


def _constants(schema: Mapping[str, Any]) -> set[tuple[str, Any]] | None:
    """Returns type and value of all that a schema allows; None unless it lists simple values."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    names = {str: "string", bool: "boolean", type(None): "null", int: "number", float: "number"}
    if not isinstance(values, list) or any(type(one) not in names for one in values):
        return None
    return {(names[type(one)], one) for one in values}
