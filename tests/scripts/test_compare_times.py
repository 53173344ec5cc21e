"""scripts/compare_times.py: each estimate meets what was measured of the same program."""

import json
import pathlib
import subprocess
import sys

from scripts.compare_times import compare
from tests.programs import check_refusal

ROOT = pathlib.Path(__file__).parents[2]


def record(target, draft=None, **seconds):
    """Returns a record of rounds; underscores of names are spaces."""
    lines = [{"name": name, "seconds": one} for name, one in seconds.items()]
    return {"device": "H100", "flags": {"target": target, "draft": draft}, "lines": lines}


MEASURED = [
    record("other", **{"jspec plain: a round without drafts": 9.0}),
    record(
        "big", "small",
        **{
            "target: call on 1 tokens, 128 before, 1 rows": 0.001,
            "target: call on 1 tokens, 4096 before, 1 rows": 0.002,
            "target: call on 1 tokens, 128 before, 16 rows": 0.003,
            "target: call on 16 tokens, 128 before, 1 rows": 0.004,
            "target: prefill of 256 tokens": 0.005,
            "jspec prompt_lookup:4: a round without drafts": 0.006,
            "jspec prompt_lookup:4: a round of prompt_lookup, 4 drafts": 0.007,
            "jspec model:4: model drafts 4": 0.5,
            "jspec model:4: a round of model, 4 drafts": 0.008,
            "draft: call on 6 tokens, 128 before, 1 rows": 0.5,
        },
    ),
]  # fmt: skip


def estimate(program, drafter="none", draft=None, **changes):
    """Returns what the compiler's tool writes of a program."""
    settings = {"target": "big", "draft": draft, "drafter": drafter, "num_draft_tokens": 4}
    own = {"program": program, "device": "h100", "batch_size": 1, "estimated_us": 2000.0}
    return own | {"settings": settings} | changes


def test_a_program_meets_its_own_line():
    expected = {
        ("call:1", "none", None): 1e3,
        ("call:16", "none", None): 4e3,
        ("prefill:256", "none", None): 5e3,
        ("run", "none", None): 6e3,
        ("run", "prompt_lookup", None): 7e3,
        ("run", "model", "small"): 8e3,
        ("run", "model", "another"): None,
        ("call:6", "none", None): None,
        ("run", "eagle", None): None,
    }
    for program, microseconds in expected.items():
        found = compare(estimate(*program), MEASURED)
        assert found["measured_us"] == microseconds, program
        assert found["ratio"] == (microseconds and microseconds / 2000)
        assert found["measured_on"] == (microseconds and "H100")
    assert compare(estimate("call:1", batch_size=16), MEASURED)["measured_us"] == 3e3


def test_a_folders_table_is_printed_and_kept(tmp_path):
    """With date and hardware; a folder without records is refused in a line."""

    def call():
        command = [sys.executable, "scripts/compare_times.py", str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    assert "expected estimate-*.jsonl and rounds-*.jsonl" in check_refusal(*call())
    lines = [json.dumps(estimate("run")), json.dumps(estimate("call:6"))]
    (tmp_path / "estimate-big.jsonl").write_text("\n".join(lines))
    (tmp_path / "rounds-big.jsonl").write_text("\n".join(map(json.dumps, MEASURED)))
    status, output, errors = call()
    assert (status, errors) == (0, "")
    assert output.splitlines()[1].split() == ["run", "of", "big,", "none", "h100", "2,000", "6,000",
                                              "3.00"]  # fmt: skip
    assert output.splitlines()[2].split()[-2:] == ["-", "-"]
    written = json.loads((tmp_path / "roofline.jsonl").read_text())
    assert [line["ratio"] for line in written["lines"]] == [3.0, None]
    assert {"date", "versions", "device"} <= set(written)
