"""Invariants of the Generator without the C++ library, as on every GPU: XLA computes everything."""

import os
import subprocess
import sys

import pytest

# The library is loaded once a process: invariants are tested again in one that must not load
# it.
_PROGRAM = """
import sys
import pytest

status = pytest.main(sys.argv[1:])
from jspec.kernels import library as native

assert not native.is_available()
sys.exit(status)
"""
_NAMES = [
    "generation/test_generator.py::test_greedy_output_is_plain_decodings[prompt_lookup]",
    "generation/test_generator.py::test_batched_rows_are_strangers[model-3-sampled]",
    "models/test_cache_properties.py::test_prefill_and_decode_equal_one_full_pass",
    "models/test_cache_properties.py::test_rolled_back_tokens_never_happened",
]


@pytest.mark.slow  # the library beside what XLA computes: tests/kernels
@pytest.mark.skipif(os.environ.get("JSPEC_NATIVE") == "0", reason="the others run without it")
def test_invariants_hold_without_the_library(pytestconfig):
    """Invariants 2, 3 and 5 in float32, with batches, seeds and rollback."""
    folder = os.path.dirname(os.path.dirname(__file__))
    tests = [os.path.join(folder, name) for name in _NAMES]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, "-q", "-n0", f"--rootdir={pytestconfig.rootpath}", *tests],
        env=os.environ | {"JSPEC_NATIVE": "0"}, cwd=pytestconfig.rootpath,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    summary = done.stdout.strip().splitlines()[-1]
    assert "passed" in summary
    assert "skipped" not in summary  # which would be no answer
