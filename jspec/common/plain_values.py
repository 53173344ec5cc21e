"""From values as JSON has them to those that a dataclass wants, by its annotations."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.common.errors import InputError, whole_number

_NAMES = {str: "a text", float: "a number", int: "a whole number", bool: "True or False"}


def take_fields(
    prefix: str, plain: Any, defaults: Any, without: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns a dataclass's fields from plain values.

    Args:
      prefix: what comes before their names in messages, such as "estimate.".
      plain: the values by field, as JSON has them.
      defaults: one of the dataclass.
      without: fields of it that may not be given.

    Raises:
      InputError: no group of fields, an unknown field, or a value of another type.
    """
    check_group(prefix.rstrip("."), plain)
    hints = typing.get_type_hints(type(defaults))
    known = [field.name for field in dataclasses.fields(defaults) if field.name not in without]
    check_known(prefix, list(plain), known)
    return {name: cast(prefix + name, value, hints[name]) for name, value in plain.items()}


def check_known(prefix: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Checks names of fields.

    Args:
      prefix: what comes before them, such as "estimate.".
      names: of fields.
      known: those that there are.

    Raises:
      InputError: there is no such field.
    """
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"expected {', '.join(known)}"
            raise InputError(f"the config has no field {prefix + name!r}; {hint}")


def check_group(name: str, value: Any) -> None:
    """Checks that a value is a group of fields.

    Raises:
      InputError: it is none.
    """
    if not isinstance(value, Mapping):
        raise InputError(f"expected {name} to be a group of fields, got {value!r}")


def cast(name: str, value: Any, kind: Any) -> Any:
    """Returns a plain value as an annotation wants it: lists become tuples.

    Args:
      name: of the field, for messages.
      value: as JSON has it.
      kind: the annotation; of a union the first that the value fits.

    Raises:
      InputError: a value of another type.
    """
    if isinstance(kind, types.UnionType):
        return _cast_union(name, value, typing.get_args(kind))
    origin = typing.get_origin(kind) or kind
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise InputError(f"expected {name} to be a list, got {value!r}")
        return tuple(cast(name, one, typing.get_args(kind)[0]) for one in value)
    if dataclasses.is_dataclass(origin) or issubclass(origin, Mapping):
        check_group(name, value)
        return value
    if origin is int:
        return whole_number(name, value)
    if not _is_of(value, origin):
        raise InputError(f"expected {name} to be {_NAMES[origin]}, got {value!r}")
    return origin(value)


def _cast_union(name: str, value: Any, kinds: Sequence[Any]) -> Any:
    if value is None and type(None) in kinds:
        return None
    lists = [kind for kind in kinds if typing.get_origin(kind) is tuple]
    if lists and isinstance(value, list | tuple):
        return cast(name, value, lists[0])
    for kind in kinds:
        if isinstance(kind, type) and _is_of(value, kind):
            return value
    names = ["a list" if kind in lists else _NAMES.get(kind, "None") for kind in kinds]
    raise InputError(f"expected {name} to be {' or '.join(names)}, got {value!r}")


def _is_of(value: Any, kind: type) -> bool:
    """Whether a value is of a type, as people see it: 1 is a number, and True is none."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)
