"""Altered headers of weight files."""

import numpy as np
import pytest

from tests.weights import fuzz_headers


def test_altered_headers_give_one_line_each():
    """Guards against tracebacks, hangs, and memory taken for lengths that a file only claims.

    A few changes leave a file that loads: another epsilon, a name in another case.
    """
    num_refused = fuzz_headers.fuzz(200, seed=1)
    assert 150 < num_refused < 200


@pytest.mark.slow
def test_ten_thousand_altered_headers():
    """The same, for long."""
    assert 9_000 < fuzz_headers.fuzz(10_000, seed=2) < 10_000


def test_a_traceback_would_be_noticed(tmp_path, monkeypatch):
    """The negative control: a reader that fails in its own words is not taken for a refusal."""

    def load(path):
        np.frombuffer(path.read_bytes()[:3], np.uint64)

    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setattr(fuzz_headers, "load", load)
    with pytest.raises(ValueError, match="buffer size"):
        fuzz_headers._is_loaded(path, 4)
