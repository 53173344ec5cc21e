"""The fields of a dataclass from values as JSON has them, checked against its annotations."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.common.errors import InputError

_NAMES = {
    str: "a text",
    float: "a number",
    int: "a whole number",
    bool: "True or False",
    tuple: "a list",
    types.NoneType: "None",
}
_GROUP = "a group of fields"


def read_fields(
    kind: type, plain: Any, prefix: str = "", *, without: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the fields of a dataclass that plain values give.

    Args:
      kind: the dataclass.
      plain: the values by field, as JSON has them.
      prefix: comes before the fields' names in messages, such as "estimate.".
      without: fields that may not be given.

    Raises:
      InputError: no group of fields, an unknown field, or a value of another type.
    """
    plain = cast(prefix.rstrip("."), plain, Mapping)
    hints = typing.get_type_hints(kind)
    known = [field.name for field in dataclasses.fields(kind) if field.name not in without]
    check_known(prefix, list(plain), known)
    return {name: cast(prefix + name, value, hints[name]) for name, value in plain.items()}


def check_known(prefix: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raises an `InputError` for the first name that is not known; it suggests a known name."""
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"expected {', '.join(known)}"
            raise InputError(f"the config has no field {prefix + name!r}; {hint}")


def cast(name: str, value: Any, kind: Any) -> Any:
    """Returns a plain value as an annotation wants it: lists become tuples, whole numbers floats.

    Of a union that is the first type that the value fits.

    Raises:
      InputError: a value of another type; `name` is the field's.
    """
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    origins = [typing.get_origin(member) or member for member in kinds]
    for member, origin in zip(kinds, origins, strict=True):
        if origin is tuple and isinstance(value, list | tuple):
            (item_kind, *_) = typing.get_args(member)
            return tuple(cast(name, item, item_kind) for item in value)
        fits = int | float if origin is float else origin
        is_bool = isinstance(value, bool)  # as people see it, 1 is a number, and True is none
        if origin in _NAMES and is_bool == (origin is bool) and isinstance(value, fits):
            return float(value) if origin is float else value
        if origin not in _NAMES and isinstance(value, Mapping):  # a dataclass, or a mapping
            return value
    expected = " or ".join(_NAMES.get(origin, _GROUP) for origin in origins)
    raise InputError(f"expected {name} to be {expected}, got {value!r}")
