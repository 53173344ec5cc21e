"""The library for the tests of it."""

import os

import pytest

from jspec import native
from jspec.native import build


@pytest.fixture
def library():
    """Fails where a compiler is there and the library is not; skips only where there is none."""
    if build._compiler() is None or os.environ.get("JSPEC_NATIVE") == "0":
        pytest.skip("no C++ compiler, or switched off")
    assert native.is_available()
