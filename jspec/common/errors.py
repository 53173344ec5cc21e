"""The errors that a user can mend, checks that raise them, and lines on standard error."""

import contextlib
import dataclasses
import operator
import sys
from collections.abc import Collection, Iterator
from typing import Any


def say(text: object) -> None:
    """Prints a line on standard error, at once."""
    print(text, file=sys.stderr, flush=True)


class InputError(ValueError):
    """Bad input: one line that says what was expected and what came.

    The programs print it without a traceback and exit with status 2.
    """


class WorkdirError(InputError):
    """A work directory that is damaged or cannot be written: nothing more can be kept."""


def describe_error(error: Exception) -> str:
    """Returns an error in one line of at most 500 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


@contextlib.contextmanager
def prefixed_errors(name: str) -> Iterator[None]:
    """Puts "NAME: " before the message of an `InputError` from within."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raises an `InputError` unless a value is a number from `low` to `high`, both included."""
    check_number(name, value)
    if not low <= value <= high:
        raise InputError(f"expected {name} from {low} to {high}, got {value}")


def check_count(name: str, value: int, low: int, high: int) -> None:
    """Raises an `InputError` unless a value is a whole number from `low` to `high`."""
    check_range(name, whole_number(name, value), low, high)


def check_number(name: str, value: Any) -> None:
    """Raises an `InputError` unless a value is a number, of any type."""
    try:
        if isinstance(value, str | bytes):  # float() would parse them
            raise TypeError
        float(value)
    except OverflowError:
        raise InputError(f"expected {name} to be a number that a float can hold") from None
    except TypeError:
        raise InputError(f"expected {name} to be a number, got {value!r}") from None


def check_numbers(options: Any) -> None:
    """Raises an `InputError` if a field of type `int` or `float`, or None, holds something else."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value is None and field.type in (int | None, float | None):
            continue
        if field.type in (int, int | None):
            whole_number(field.name, value)
        elif field.type in (float, float | None):
            check_number(field.name, value)


def whole_number(name: str, value: object, otherwise: str = "") -> int:
    """Returns a whole number of any integer type but bool as an int.

    Raises:
      InputError: it is none; `otherwise` says what else would have been accepted.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InputError(
            f"expected {name} to be a whole number{otherwise}, got {value!r}"
        ) from None


def check_among(name: str, value: object, known: Collection[object]) -> None:
    """Raises an `InputError` unless a value is one of the known ones."""
    if value not in known:
        raise InputError(f"expected {name} among {', '.join(map(str, known))}; got {value!r}")


def check_type(name: str, value: object, kind: type | tuple[type, ...]) -> None:
    """Raises an `InputError` unless a value is of a class, or of one of several."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        expected = " or a ".join(
            "text" if expected_kind is str else expected_kind.__name__ for expected_kind in kinds
        )
        article = "an" if expected[0] in "AEIO" else "a"
        raise InputError(f"expected {name} to be {article} {expected}, got {value!r}")
