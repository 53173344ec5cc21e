"""The mutation run: its list fits today's code, and it tells what noticed a mistake."""

import ast
import functools
import json
import pathlib
import runpy
import types

import pytest

from jspec.common.errors import InputError

ROOT = pathlib.Path(__file__).parents[2]
mutate = types.SimpleNamespace(**runpy.run_path(str(ROOT / "scripts/mutate.py")))

RIGHT = """
def count(n):
    i = 0
    while i < n:
        i += 1
    return i
"""
TESTS = """
import pytest
from counting import count

@pytest.mark.parametrize("place", ["here, there"])
def test_count(place):
    assert count(3) == 3
"""
FEWEST = 60


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Returns a folder with one module and its test, which needs none of pytest's plugins."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "counting.py").write_text(RIGHT)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_counting.py").write_text(TESTS)
    return tmp_path


def mistake(was, becomes, function="count"):
    tests = "tests/test_counting.py"
    return {
        "file": "counting.py", "function": function, "was": was, "becomes": becomes, "tests": tests
    }  # fmt: skip


def test_the_copy_has_what_tests_may_read(tmp_path):
    """Guards against tests that fail without any mistake, as a document is missing."""
    mutate.copy_project(tmp_path)
    shown = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    left_out = {"runs", "site", "build", "dist", "__pycache__"}
    expected = {name for name in shown - left_out if not name.endswith(".egg-info")}
    assert {path.name for path in tmp_path.iterdir()} == expected
    assert (tmp_path / "docs/add_a_drafter.md").exists()


def test_every_mistake_can_be_made_today():
    """Guards against a list that the code has left: a text that is gone, a test that was moved."""
    mistakes = mutate.read_mistakes(ROOT / "tests/mistakes.toml", ROOT)
    assert len(mistakes) >= FEWEST
    places = {test.split("::")[0] for each in mistakes for test in each["tests"].split()}
    assert [place for place in sorted(places) if not (ROOT / place).exists()] == []
    assert [each for each in mistakes if each["was"] == each["becomes"]] == []
    made = [tuple(each[key] for key in ("file", "function", "was", "becomes")) for each in mistakes]
    assert len(set(made)) == len(made)
    for each in mistakes:
        ast.parse(mutate.with_mistake((ROOT / each["file"]).read_text(), each))


@pytest.mark.parametrize(
    ("was", "function"), [("i += 2", "count"), ("i", "count"), ("return i", "other")]
)
def test_what_is_replaced_occurs_once_in_its_function(project, was, function):
    """Guards against a mistake that is not made, or is made in other places too."""
    path = project / "mistakes.toml"
    lines = [f'{key} = "{value}"' for key, value in mistake(was, "j", function).items()]
    path.write_text("\n".join(["[[mistake]]", *lines]))
    with pytest.raises(InputError, match="once, got"):
        mutate.read_mistakes(path, project)


LAID_OUT = """
class A:
    def total(self, n):
        return sum(n, 1.0)

class B:
    def total(self, n):
        # What sum(n, 1.0) gives.
        return sum(
            n,  # the numbers
            1.0,
        )
    def title(self):
        return "sum(n, 1.0) # 1"

begin = 1
"""


def test_a_mistake_is_found_whatever_the_layout():
    """Guards against entries that break when code is reformatted, or moved within its function.

    Comments, line breaks and trailing commas are no tokens; a string is a single token. What other
    functions say does not count, and without a function the whole module does.
    """
    entry = mistake("sum(n, 1.0)", "sum(n)", "B.total")
    changed = mutate.with_mistake(LAID_OUT, entry)
    assert "        return sum(n)\n    def title" in changed
    assert changed.count("return sum(n, 1.0)") == 1
    for function, expected in {"A.total": 1, "B": 1, "B.title": 0, "": 2, "total": 0}.items():
        assert len(mutate.occurrences(LAID_OUT, entry | {"function": function})) == expected
    for was in ("su(n, 1.0)", "sum(n, 1)", "sum(n 1.0)", '"sum(n'):
        assert mutate.occurrences(LAID_OUT, entry | {"was": was}) == []
    assert mutate.with_mistake(LAID_OUT, mistake("begin=1", "begin = 2", ""))[-10:] == "begin = 2\n"


@pytest.mark.parametrize(
    ("was", "becomes", "limit", "expected"),
    [("return i", "return i + 1", 60, "tests/test_counting.py::test_count[here, there]"),
     ("i += 1", "i += 0", 3, "time limit"), ("i < n", "i != n", 60, None)],
)  # fmt: skip
def test_what_notices_a_mistake_is_named(project, was, becomes, limit, expected):
    """A wrong result, a loop that never ends, and a mistake that survives; each is undone."""
    assert mutate.notice(mistake(was, becomes), project, limit=limit) == expected
    assert (project / "counting.py").read_text() == RIGHT


def test_a_mistake_must_leave_code_that_runs(project):
    """A file that cannot be read any more is no mistake of the kind that tests should notice."""
    with pytest.raises(InputError, match="expected tests that run"):
        mutate.notice(mistake("return i", "return ("), project, limit=20)
    assert (project / "counting.py").read_text() == RIGHT


def test_tests_must_pass_without_a_mistake(project):
    """Guards against a test that fails anyway: it would notice every mistake."""
    tests = ["tests/test_counting.py"]
    seconds = mutate.measure(tests, project)
    assert list(seconds) == tests
    (project / "counting.py").write_text(RIGHT.replace("i < n", "i <= n"))
    with pytest.raises(InputError, match="pass without any mistake"):
        mutate.measure(tests, project)


def test_the_limit_follows_from_the_seconds_without_a_mistake():
    """A folder, a file, and one test of a file, whose limit is that of the file."""
    seconds = {"tests/a/test_x.py": 10.0, "tests/a/test_y.py": 1.0, "tests/b/test_z.py": 100.0}
    limits = [mutate.limit_of([test], seconds) for test in ("tests/a", "tests/a/test_y.py::test")]
    assert limits == [60 + 4 * 11, 60 + 4 * 1]


def test_results_are_kept_of_what_was_noticed_and_has_not_changed(project, tmp_path):
    """Guards against a survivor, or an entry that was changed since, that is not run again."""
    first, second, third = mistake("a", "b"), mistake("c", "d"), mistake("e", "f")
    path = tmp_path / "results.json"
    read = functools.partial(mutate.read_results, str(path), root=project)
    assert read([first]) == []
    digest = mutate.digest_of(first, project)
    noticed = first | {"noticed_by": "time limit", "seconds": 1.0, "digest": digest}
    survivor = second | {"noticed_by": None, "seconds": 1.0, "digest": digest}
    changed = noticed | third | {"becomes": "g"}
    path.write_text(json.dumps({"mistakes": [noticed, survivor, changed]}))
    assert read([first, second, third]) == [noticed]
    for name in ("counting.py", "tests/test_counting.py"):
        right = (project / name).read_text()
        (project / name).write_text(right + "\n")
        assert read([first]) == [], "its code or its tests have changed"
        (project / name).write_text(right)
    path.write_text(json.dumps({"mistakes": [first]}))
    with pytest.raises(InputError, match="expected results of a mutation run"):
        read([first])
