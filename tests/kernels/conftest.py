"""What the tests of kernels need."""

import pytest


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Returns a cache folder of the test's own."""
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path))
    return tmp_path
