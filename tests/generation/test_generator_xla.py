"""Invariants without the C++ library, as on every GPU: XLA computes everything."""

import os
import subprocess
import sys

import pytest

from tests.cases import slow_unless

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
_QUICK = [
    "speculation/test_greedy_parity.py::test_greedy_output_equals_plain_decoding[prompt_lookup-1]",
    "models/test_cache_properties.py::test_prefill_and_decode_equal_one_full_pass",
]
_OTHERS = [
    "generation/test_generator.py::test_greedy_output_is_plain_decodings[prompt_lookup]",
    "generation/test_generator.py::test_batched_rows_are_strangers[model-3-sampled]",
    "models/test_cache_properties.py::test_rolled_back_tokens_never_happened",
]


@pytest.mark.skipif(os.environ.get("JSPEC_NATIVE") == "0", reason="the others run without it")
@pytest.mark.parametrize("names", [_QUICK, slow_unless(False, _OTHERS)], ids=["quick", "others"])
def test_invariants_hold_without_the_library(names, pytestconfig):
    """Invariants 2 and 3 in float32; the slow ones add the Generator, batches, seeds and rollback."""
    folder = os.path.dirname(os.path.dirname(__file__))
    tests = [os.path.join(folder, name) for name in names]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, "-q", "-n0", f"--rootdir={pytestconfig.rootpath}", *tests],
        env=os.environ | {"JSPEC_NATIVE": "0"}, cwd=pytestconfig.rootpath,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    summary = done.stdout.strip().splitlines()[-1]
    assert "passed" in summary
    assert "skipped" not in summary  # which would be no answer
