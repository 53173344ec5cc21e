"""Makes one deliberate mistake after another, and runs the tests that must notice it.

    python scripts/mutate.py --output=mutation.json   # all of tests/mistakes.toml
    python scripts/mutate.py --only=noise.py          # those in files with this in their path
    python scripts/mutate.py --output=mutation.json --resume   # what is not yet noticed there

Each mistake replaces a few tokens of one function, in a copy of the project: layout, comments and
trailing commas do not matter, nor does what stands elsewhere in the file. The tests named beside it
run until one fails. Before any mistake all of these tests run once: they must pass, and the seconds
that they take limit those of a mistake, which may be a loop that never ends. A mistake that
survives ends the program with status 1: a test is missing. It takes half an hour on two cores.
"""

import ast
import functools
import hashlib
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from absl import flags

from jspec.cli import program as cli
from jspec.common.errors import InputError
from jspec.common.json_lines import read_json
from jspec.common.timing import timed
from jspec.generation.provenance import Recorder

_ROOT = pathlib.Path(__file__).parents[1]
_LIST = _ROOT / "tests" / "mistakes.toml"
# What tests do not read: environments, caches, and what building and running leave behind.
_LEFT_OUT = (".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "site")
# A mistake's tests may take this many seconds, and this many times those without the mistake.
_LEAST_LIMIT, _SLACK = 60, 4
_TIME_LIMIT = "time limit"
# One token of Python, or a comment. Unlike `tokenize` it takes a fragment with half a bracket pair.
_TOKEN = re.compile(
    r'''"""(?:.|\n)*?"""|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|#[^\n]*|\w+(?:\.\d+)?|[^\w\s]'''
)

_ONLY = flags.DEFINE_string("only", "", "Only mistakes in files whose path contains this text.")
_OUTPUT = flags.DEFINE_string("output", None, "Write the results to this file.")
_RESUME = flags.DEFINE_bool(
    "resume", False, "Keep what --output says was noticed, of code and tests that are as they were."
)


def tokens_of(source: str) -> list[re.Match[str]]:
    """Returns the tokens of a piece of Python, without comments and trailing commas."""
    tokens = [token for token in _TOKEN.finditer(source) if token[0][0] != "#"]
    following = [token[0] for token in tokens[1:]]
    return [
        token
        for token, after in itertools.zip_longest(tokens, following)
        if token[0] != "," or after not in (")", "]", "}")
    ]


def function_span(source: str, function: str) -> tuple[int, int]:
    """Returns where the functions or classes of this qualified name begin and end in a module.

    An empty name stands for the whole module. Where the name is defined twice, as an overload is,
    the span is that of the last definition; where it is not defined, it is empty.
    """
    return _spans(source).get(function, (0, 0))


@functools.lru_cache(maxsize=1)
def _spans(source: str) -> dict[str, tuple[int, int]]:
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    spans = {"": (0, len(source))}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}.{child.name}".lstrip(".")
                assert child.end_lineno is not None
                spans[name] = starts[child.lineno - 1], starts[child.end_lineno]
            visit(child, name)

    visit(ast.parse(source), "")
    return spans


def occurrences(source: str, mistake: Mapping[str, str]) -> list[tuple[int, int]]:
    """Returns where the tokens that a mistake replaces begin and end, inside its function."""
    begin, end = function_span(source, mistake["function"])
    tokens = tokens_of(source[begin:end])
    texts = [token[0] for token in tokens]
    wanted = [token[0] for token in tokens_of(mistake["was"])]
    return [
        (begin + tokens[index].start(), begin + tokens[index + len(wanted) - 1].end())
        for index in range(len(tokens) - len(wanted) + 1)
        if texts[index : index + len(wanted)] == wanted
    ]


def with_mistake(source: str, mistake: Mapping[str, str]) -> str:
    """Returns a module with a mistake in it, which can be made in one place."""
    ((begin, end),) = occurrences(source, mistake)
    return source[:begin] + mistake["becomes"] + source[end:]


def read_mistakes(path: pathlib.Path, root: pathlib.Path) -> list[dict[str, str]]:
    """Returns the list, each entry with the keys file, function, was, becomes and tests.

    Raises:
      InputError: what is to be replaced does not occur exactly once in its function under `root`.
    """
    mistakes = [{"function": ""} | entry for entry in tomllib.loads(path.read_text())["mistake"]]
    for mistake in mistakes:
        count = len(occurrences((root / mistake["file"]).read_text(), mistake))
        if count != 1:
            place = f"{mistake['file']}, {mistake['function'] or 'anywhere'}"
            raise InputError(f"{place}: expected {mistake['was']!r} once, got {count}")
    return mistakes


def tests_of(mistake: dict[str, str]) -> list[str]:
    """Returns the folders, files or FILE::TEST that must notice a mistake."""
    return mistake["tests"].split()


def copy_project(folder: pathlib.Path) -> None:
    """Copies the project into a folder, with all that tests may read."""
    ignore = shutil.ignore_patterns(*_LEFT_OUT)
    shutil.copytree(_ROOT, folder, ignore=ignore, dirs_exist_ok=True)


def run_tests(
    tests: Sequence[str], copy: pathlib.Path, *options: str, limit: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs tests in a copy of the project until one fails, for at most `limit` seconds."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", *options, *tests]
    return subprocess.run(
        command,
        cwd=copy,
        timeout=limit,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # The copy's jspec, wherever an installed one may lie.
        env=os.environ | {"PYTHONPATH": str(copy)},
    )


def measure(tests: Sequence[str], copy: pathlib.Path) -> dict[str, float]:
    """Returns the seconds of each test file without any mistake.

    Raises:
      InputError: a test fails, and could therefore notice nothing.
    """
    report = copy / "seconds.xml"
    done = run_tests(tests, copy, f"--junitxml={report}")
    if done.returncode:
        raise InputError(
            f"expected tests that pass without any mistake, got\n{done.stdout[-2000:]}"
        )
    seconds: dict[str, float] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].replace(".", "/") + ".py"
        seconds[file] = seconds.get(file, 0.0) + float(case.attrib["time"])
    return seconds


def limit_of(tests: Sequence[str], seconds: dict[str, float]) -> float:
    """Returns the seconds that tests may take, each a folder, a file or FILE::TEST."""
    roots = tuple(test.split("::")[0] for test in tests)
    return _LEAST_LIMIT + _SLACK * sum(
        taken for file, taken in seconds.items() if file.startswith(roots)
    )


def notice(mistake: dict[str, str], copy: pathlib.Path, limit: float) -> str | None:
    """Makes a mistake in the copy, runs its tests, and undoes it.

    Returns:
      The test that failed, "time limit", or None if the mistake survived.
    """
    path = copy / mistake["file"]
    right = path.read_text()
    path.write_text(with_mistake(right, mistake))
    try:
        done = run_tests(tests_of(mistake), copy, limit=limit)
    except subprocess.TimeoutExpired:
        return _TIME_LIMIT
    finally:
        path.write_text(right)
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    if done.returncode != 1 or failed is None:  # the tests did not even run
        raise InputError(
            f"{mistake['file']}: expected tests that run with {mistake['becomes']!r}, got\n"
            f"{done.stdout[-2000:]}"
        )
    return failed[1]


def digest_of(mistake: dict[str, str], root: pathlib.Path) -> str:
    """Returns a digest of a mistake's file and of its tests."""
    digest = hashlib.sha256((root / mistake["file"]).read_bytes())
    for test in tests_of(mistake):
        path = root / test.split("::")[0]
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def read_results(
    path: str, mistakes: Sequence[dict[str, str]], root: pathlib.Path
) -> list[dict[str, Any]]:
    """Returns what was noticed in an earlier run, of mistakes, files and tests still the same.

    Raises:
      InputError: the file is none that this program writes.
    """
    results = read_json(pathlib.Path(path)).get("mistakes", [])
    if not all(isinstance(result, dict) and "noticed_by" in result for result in results):
        raise InputError(f"{path}: expected results of a mutation run")
    noticed = [result for result in results if result["noticed_by"] is not None]
    keys = mistakes[0].keys()
    same = [result for result in noticed if {key: result.get(key) for key in keys} in mistakes]
    return [result for result in same if result.get("digest") == digest_of(result, root)]


def summary(results: Sequence[dict[str, Any]]) -> str:
    """Returns how many mistakes were noticed, and how many of them only by the time they took."""
    noticed = [result for result in results if result["noticed_by"] is not None]
    num_late = sum(result["noticed_by"] == _TIME_LIMIT for result in noticed)
    return (
        f"{len(noticed)} of {len(results)} mistakes were noticed, {num_late} of them by the time "
        "limit alone"
    )


def run(mistakes: Sequence[dict[str, str]]) -> Iterator[dict[str, Any]]:
    """Prints and yields each mistake with what noticed it, and the seconds that this took."""
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        copy_project(copy)
        seconds = measure(sorted({test for each in mistakes for test in tests_of(each)}), copy)
        print(f"{sum(seconds.values()):.0f} s without any mistake", flush=True)
        for mistake in mistakes:
            limit = limit_of(tests_of(mistake), seconds)
            taken, noticed_by = timed(functools.partial(notice, mistake, copy, limit))
            print(f"{taken:6.1f} s  {mistake['file']}: {mistake['becomes']}  "
                  f"{noticed_by or 'SURVIVED'}", flush=True)  # fmt: skip
            digest = digest_of(mistake, copy)
            yield mistake | {"noticed_by": noticed_by, "seconds": round(taken, 1), "digest": digest}


def main() -> None:
    """Runs the list, and writes what noticed each mistake, and what survived."""
    listed = read_mistakes(_LIST, _ROOT)
    mistakes = [each for each in listed if _ONLY.value in each["file"]]
    if not mistakes:
        raise InputError(f"expected a file of {_LIST.name} in --only, got {_ONLY.value!r}")
    output = _OUTPUT.value
    if _RESUME.value and output is None:
        raise InputError("--resume expects --output, the file of the earlier results")
    recorder = Recorder(output, {"only": _ONLY.value}, str(_LIST))
    results = read_results(output, listed, _ROOT) if output and _RESUME.value else []
    is_old = [{key: each[key] for key in listed[0]} for each in results]
    left = [each for each in mistakes if each not in is_old]
    for result in run(left) if left else ():
        results.append(result)
        recorder.save({"mistakes": results}, is_complete=len(results) == len(listed))
    print(summary(results))
    if any(each["noticed_by"] is None for each in results):
        sys.exit(1)


if __name__ == "__main__":
    cli.run_main(main)
