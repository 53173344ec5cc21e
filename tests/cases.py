"""Cases of a test that run every time, and slow ones that are left to `-m slow`."""

import pytest


def slow_unless(is_quick, *values):
    """Returns a case of a test, slow unless it is said to be quick."""
    return pytest.param(*values, marks=() if is_quick else pytest.mark.slow)
