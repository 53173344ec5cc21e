"""The error that a user can mend."""


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
