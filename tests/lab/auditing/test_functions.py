"""The audit of two functions, `python -m jspec.audit --functions=FILE`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.lab.auditing import functions as audited
from jspec.lab.auditing.functions import Functions, check_speculate, read_functions
from jspec.speculation import functions
from jspec.speculation.distributions import Categorical, Gaussian
from jspec.speculation.functions import Rule

TABLE = jax.random.normal(jax.random.key(0), [3, 3])
CATEGORIES = Functions(
    lambda x: Categorical(TABLE[x][::-1]), lambda x: Categorical(TABLE[x]), jnp.int32(0)
)
GAUSSIANS = Functions(
    lambda x: Gaussian(0.9 * x + 1, 1.0), lambda x: Gaussian(jnp.sin(2 * x), 1.0), jnp.float32(0)
)


@pytest.mark.slow
@pytest.mark.parametrize("pair", [CATEGORIES, GAUSSIANS], ids=["categories", "Gaussians"])
def test_right_functions_pass(pair):
    """And the control fails, so that passing means something; see test_program.py, too."""
    checks = {check.name: check for check in check_speculate(pair, 2, 4000)}
    assert list(checks) == ["seeds", "distribution", "negative control", "drafts"]
    assert all(check.has_passed for check in checks.values()), checks


def test_a_wrong_rule_fails(monkeypatch):
    """Guards against an audit that compares g with itself; the other checks pass."""

    def keep_all(targets, drafts, values, keys):
        return jnp.int32(len(values)), functions.draw(
            functions._at(targets, jnp.int32(2)), keys.after
        )

    monkeypatch.setitem(audited.RULES, "rejection", Rule(keep_all, False))
    checks = {check.name: check for check in check_speculate(CATEGORIES, 2, 2000)}
    assert [name for name, check in checks.items() if not check.has_passed] == ["distribution"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("f = g = lambda x: x", "expected f, g and state, got no state"),
        ("f = 1 / 0", "ZeroDivisionError"),
        ("f = g = lambda x: x\nstate = 0", "expected f to give a distribution"),
        ("f = g = lambda x: 1 / 0\nstate = 0", "ZeroDivisionError: division by zero"),
    ],
    ids=str,
)
def test_bad_files_are_one_line(text, message, tmp_path):
    """Each names the file or the function."""
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_functions(str(path))


def test_samples_of_other_dependence_are_told_apart():
    """Guards against a test of each step alone."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(3000, 2))
    joined = values.copy()
    joined[:, 1] = joined[:, 0]
    assert audited.two_sample_p_value(values, rng.normal(size=(3000, 2))) > 1e-4
    assert audited.two_sample_p_value(values, joined) < 1e-6
