"""Where downloads and compiled programs are kept."""

import os

import pytest

from jspec.common.errors import InputError
from jspec.common.user_cache import cache_dir


def test_variables_come_before_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JSPEC_CACHE", raising=False)
    assert cache_dir() == tmp_path / "jspec"
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


def test_without_a_home_folder_it_says_what_to_set(monkeypatch):
    """As in a container whose user has no name."""

    for name in ("JSPEC_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what Python does without one
    with pytest.raises(InputError, match=r"expected \$JSPEC_CACHE or \$HOME"):
        cache_dir()
