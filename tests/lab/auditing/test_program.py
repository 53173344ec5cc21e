"""The program jspec.audit, from its flags to its exit status.

In its own process: its flags have the names of jspec.generate's. What the slow tests audit is
compiled as users get it, which most other tests' programs are not.
"""

import json

import pytest

from jspec.speculation.acceptance import RULES
from tests.programs import as_users, check_refusal, environment, run, run_many
from tests.tiny_models import save_folder

_CHECKED = "seeds", "caches", "emitted distribution"  # of a rule for temperatures above 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model."""
    return save_folder(tmp_path_factory.mktemp("audit") / "tiny", num_layers=1)


_FLAGS = "--num_rows=1024", "--max_new_tokens=8", "--num_draft_tokens=2"
_LOSSY = "--drafter=prompt_lookup", "--acceptance=lenient", "--lenience=0.2", "--temperature=1.2"
_REFUSED = {
    "--num_rows=0": "error: expected num_rows of at least 1, got 0\n",
    "--temperature=1 --lenience=0.3": "expected lenience with a drafter that drafts and an",
    "--coordinator=localhost:1": "expected an audit in one process, got --coordinator",
    "--functions=f.py": "--num_rows and --output_json with --functions, got --target",
    "--mesh=model:3": "divides the 1 device that is there, got model:3, of 3",
    "--temperature=1 --max_new_tokens=100000": "max_new_tokens below the context of 200 tokens",
}


@pytest.fixture(scope="module")
def outcomes(folder, compile_cache, tmp_path_factory):
    """Returns status, output and errors of an audit of a lossy rule, of a list of the rules, and of
    flags that are refused, all in one process; and the record of the first.
    """
    home = tmp_path_factory.mktemp("home")
    target, path = f"--target={folder}", home / "audit.json"
    lines = [
        [target, *_FLAGS, *_LOSSY, f"--output_json={path}"], ["--list_rules", "--target=nowhere"],
        *([target, *flags.split()] for flags in _REFUSED),
    ]  # fmt: skip
    lossy, rules, *refused = run_many("jspec.audit", lines, env=environment(compile_cache, home))
    return lossy, rules, refused, json.loads(path.read_text())


def test_a_lossy_rule_ends_with_status_1(outcomes):
    """Its distribution is found out, every other line passes, and the record says the same."""
    (status, output, errors), _, _, record = outcomes
    assert status == 1
    assert errors.splitlines() == [f"checking {what}" for what in _CHECKED]
    assert output.startswith("the rule 'lenient' is lossy")
    assert "FAIL  emitted distribution: p = " in output
    assert output.count("FAIL") == 1
    assert "\nNOT lossless: " in output
    assert record["is_lossless"] is False
    assert [check["name"] for check in record["checks"] if not check["has_passed"]] == [
        "emitted distribution"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_lossless_rule_ends_with_status_0(folder, compile_cache, tmp_path, dtype):
    """Every line passes; greedy parity is among them, in both dtypes."""
    flags = *_FLAGS, "--acceptance=rejection", "--temperature=1.2", f"--dtype={dtype}"
    env = as_users(environment(compile_cache, tmp_path))
    status, output, errors = run("jspec.audit", f"--target={folder}", *flags, env=env, timeout=300)
    assert status == 0, output + errors
    assert f", {dtype}, drafter" in output
    assert "FAIL" not in output
    assert output.count("pass  greedy parity") == 2
    assert "\nlossless: " in output


def test_bad_flags_are_one_line(outcomes):
    """Status 2, before a model is loaded, or hours are spent."""
    for outcome, message in zip(outcomes[2], _REFUSED.values(), strict=True):
        assert message in check_refusal(*outcome)


@pytest.mark.slow
def test_two_functions_are_recorded(compile_cache, tmp_path):
    """As they are printed; `--output_json` was ignored."""
    file, path = tmp_path / "mine.py", tmp_path / "audit.json"
    file.write_text(
        "import jax.numpy as jnp\nimport jspec\nstate = jnp.int32(0)\n"
        "f = lambda x: jspec.Categorical(jnp.array([0.0, 1.0]))\n"
        "g = lambda x: jspec.Categorical(jnp.array([1.0, 0.0]) * x)\n"
    )
    flags = [f"--functions={file}", "--num_rows=1024", f"--output_json={path}"]
    env = as_users(environment(compile_cache, tmp_path))
    status, output, errors = run("jspec.audit", *flags, env=env, timeout=300)
    assert status == 0, output + errors
    record = json.loads(path.read_text())
    assert record["is_lossless"] is True
    assert f"\nlossless: {record['subject']} (" in output
    assert output.count("pass  ") == len(record["checks"]) == 4


def test_rules_are_listed_with_their_controls(outcomes):
    """At once: no model is loaded, and nothing is audited."""
    status, output, errors = outcomes[1]
    assert (status, errors) == (0, "")
    title, *lines, last = output.splitlines()
    assert title.split()[:3] == ["rule", "temperature", "lossless"]
    by_name = {line.split()[0]: line for line in lines}
    assert list(by_name) == list(RULES)
    assert by_name["block"].endswith(
        "a flatter target  a prefix kept, no residual, drafts misreported"
    )
    assert "a prefix kept" in by_name["coupled"]
    assert "no residual" not in by_name["coupled"]  # it has none
    assert last.endswith(": a path not moved, depths ignored, siblings seen")
    assert " no " in by_name["lenient"]
