"""Errors of experiments: what ends a run, and what is written down of the others."""

from jspec.common.errors import InputError

_LONGEST = 500


class WorkdirError(InputError):
    """A workdir that is damaged, or that cannot be written: nothing can be kept any more."""


def describe_error(error: Exception) -> str:
    """Returns an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_LONGEST]
