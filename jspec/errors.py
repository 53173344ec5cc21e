"""The error that a user can mend."""

import operator
from collections.abc import Collection


class InputError(ValueError):
    """Bad input: one line saying what was expected and what came.

    The programs print it without a traceback and exit with status 2.
    """


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Checks a number.

    Raises:
      InputError: it is not from `low` to `high`.
    """
    if not low <= value <= high:
        raise InputError(f"expected {name} from {low} to {high}, got {value}")


def whole_number(name: str, value: object, otherwise: str = "") -> int:
    """Returns a value that counts something.

    Args:
      name: what it is.
      value: a whole number of any type but bool.
      otherwise: what else would have done, for the message.

    Raises:
      InputError: it is none.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        expected = f"a whole number{otherwise}"
        raise InputError(f"expected {name} to be {expected}, got {value!r}") from None


def check_among(name: str, value: object, known: Collection[object]) -> None:
    """Checks a name.

    Raises:
      InputError: there is no such one.
    """
    if value not in known:
        raise InputError(f"expected {name} among {', '.join(map(str, known))}; got {value!r}")
