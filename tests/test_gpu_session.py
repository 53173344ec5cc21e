"""scripts/gpu_session.sh: what it refuses, and a rehearsal without a GPU."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

SCRIPT = pathlib.Path(__file__).parents[1] / "scripts" / "gpu_session.sh"


def call(folder, **variables):
    """Returns the script's status and what it prints."""
    done = subprocess.run(
        ["bash", SCRIPT, folder], env=os.environ | {"PYTHON": sys.executable} | variables,
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"STEPS": "laws rooflne"}, "expected STEPS among"),
        ({"ANSWERS": "answers.jsonl"}, "expected TARGET with ANSWERS"),
        pytest.param(
            {"BACKEND": "gpu"},
            "expected a machine on which JAX's backend is gpu, got cpu",
            marks=pytest.mark.skipif(jax.default_backend() != "cpu", reason="there is one"),
        ),
    ],
)
def test_what_it_refuses(variables, message, tmp_path):
    status, printed = call(tmp_path / "out", **variables)
    assert status == 2
    assert message in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_steps_leave_their_records_and_failures_their_status(tmp_path):
    """One step that works, one that cannot, and one for which no time is left."""
    status, printed = call(
        tmp_path, STEPS="profile drafters quantization", QUANTIZED="random:nothing", LIMIT="400",
        COMPARE_FLAGS="--repeats=0", PAIRS="random:smollm2-135m:1,random:smollm2-135m:1",
    )  # fmt: skip
    assert status == 1
    assert "status 1" in printed.splitlines()[-1]
    record = json.loads((tmp_path / "profile.jsonl").read_text())
    assert record["num_rounds"] > 0
    assert record["lines"][0]["operations"]
    assert printed.count("failed, or ended") == 2
    status, printed = call(tmp_path / "late", STEPS="profile", LIMIT="1")
    assert status == 1
    assert "left out, its time is over" in printed
