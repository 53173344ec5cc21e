"""What a process may use and has set up: one core, 64-bit types, no C++ library."""

import os
import subprocess
import sys

import jax
import pytest

from jspec.common.errors import InputError
from tests.tiny_models import make_generator

# The affinity is set first: XLA looks for the number of cores once.
_PROGRAM = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import dataclasses, sys
from jspec.drafters import DrafterOptions
from jspec.generation.request import Request, SamplingParams
from tests.tiny_models import CONFIG, make_generator, make_model
request = Request(list(b"say it once"), SamplingParams(max_new_tokens=20))
options = {"drafter_options": DrafterOptions(pattern="[a-z ]+")} if "pattern" in sys.argv else {}
one_layer = make_model(dataclasses.replace(CONFIG, num_layers=1))
for drafter in ("none", sys.argv[1]):
    generator = make_generator(drafter, one_layer, **(options if drafter != "none" else {}))
    print(generator.generate(request).token_ids)
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system sets no affinity")
@pytest.mark.parametrize(
    "drafter",
    [
        "prompt_lookup",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("suffix", "recycle", "pattern")),
    ],
)
def test_a_drafter_that_may_find_nothing_answers_on_one_core(drafter):
    """Its programs have a call without drafts, and so empty arrays.

    Guards against an XLA that converts them in another order there, and then knows no function in
    C++: "No registered implementation for untyped custom call".
    """
    command = [sys.executable, "-c", _PROGRAM, drafter]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    plain, drafted = done.stdout.splitlines()
    assert len(plain.split(",")) == 20
    assert drafted == plain


def test_64_bit_types_are_refused_in_one_line():
    message = "expected jax_enable_x64 to be off for a Generator"
    with jax.enable_x64(True), pytest.raises(InputError, match=message):
        make_generator("none")


# The library is loaded once a process: invariants are tested again in one that must not load
# it.
_INNER = """
import sys
import pytest

status = pytest.main(sys.argv[1:])
from jspec.kernels import library as native

assert not native.is_available()
sys.exit(status)
"""
_INVARIANTS = [
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
    tests = [os.path.join(folder, name) for name in _INVARIANTS]
    done = subprocess.run(
        [sys.executable, "-c", _INNER, "-q", "-n0", f"--rootdir={pytestconfig.rootpath}", *tests],
        env=os.environ | {"JSPEC_NATIVE": "0"}, cwd=pytestconfig.rootpath,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    summary = done.stdout.strip().splitlines()[-1]
    assert "passed" in summary
    assert "skipped" not in summary  # which would be no answer
