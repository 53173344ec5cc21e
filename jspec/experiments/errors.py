"""The error that ends a run, whatever cell it was in."""

from jspec.errors import InputError


class WorkdirError(InputError):
    """A workdir that is damaged, or that cannot be written: nothing can be kept any more."""
