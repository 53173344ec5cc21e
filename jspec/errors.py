"""The error that a user can mend."""


class InputError(ValueError):
    """Bad input: one line saying what was expected and what came.

    The programs print it without a traceback and exit with status 2.
    """
