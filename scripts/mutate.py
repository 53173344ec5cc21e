"""Makes one deliberate mistake after another, and runs the tests that must notice it.

    python scripts/mutate.py                       # all of tests/mistakes.toml, about an hour
    python scripts/mutate.py --only=noise.py       # those in files whose path contains this text

Each mistake replaces one text of one file, in a copy of the project. The tests named beside it run
until one fails. A mistake that survives ends the program with status 1: a test is missing.
"""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from typing import Any

from absl import flags

from jspec.common import cli
from jspec.common.errors import InputError, check_count

_ROOT = pathlib.Path(__file__).parents[1]
_LIST = _ROOT / "tests" / "mistakes.toml"
_PARTS = ("jspec", "tests", "configs", "scripts", "benchmarks", "pyproject.toml", "README.md")

_ONLY = flags.DEFINE_string("only", "", "Only mistakes in files whose path contains this text.")
_OUTPUT = flags.DEFINE_string("output", None, "A JSON file for the results.")
_TIMEOUT = flags.DEFINE_integer("timeout", 600, "Seconds that the tests of one mistake may take.")


def read_mistakes(path: pathlib.Path) -> list[dict[str, str]]:
    """Returns the list, each entry with the keys file, was, becomes and tests.

    Raises:
      InputError: a text to replace does not occur exactly once in its file.
    """
    mistakes = tomllib.loads(path.read_text())["mistake"]
    for mistake in mistakes:
        count = (_ROOT / mistake["file"]).read_text().count(mistake["was"])
        if count != 1:
            raise InputError(f"{mistake['file']}: expected {mistake['was']!r} once, got {count}")
    return mistakes


def is_noticed(mistake: dict[str, str], copy: pathlib.Path, timeout: int) -> bool:
    """Makes a mistake in the copy, runs its tests, and undoes it."""
    path = copy / mistake["file"]
    right = path.read_text()
    path.write_text(right.replace(mistake["was"], mistake["becomes"]))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:randomly"]
    try:
        done = subprocess.run(
            [*command, *mistake["tests"].split()], cwd=copy, timeout=timeout, capture_output=True
        )
    except subprocess.TimeoutExpired:
        return True  # a loop that never ends is noticed, too
    finally:
        path.write_text(right)
    return done.returncode == 1


def run(only: str, timeout: int) -> list[dict[str, Any]]:
    """Returns the mistakes whose file matches, with whether each was noticed, and in how long."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        for part in _PARTS:
            source = _ROOT / part
            if source.is_dir():
                shutil.copytree(source, copy / part)
            elif source.exists():
                shutil.copy(source, copy / part)
        for mistake in [each for each in read_mistakes(_LIST) if only in each["file"]]:
            start = time.monotonic()
            noticed = is_noticed(mistake, copy, timeout)
            seconds = round(time.monotonic() - start, 1)
            found.append({**mistake, "is_noticed": noticed, "seconds": seconds})
            verdict = "noticed " if noticed else "SURVIVED"
            print(
                f"{verdict} {seconds:6.1f} s  {mistake['file']}: {mistake['becomes']}", flush=True
            )
    return found


def main() -> None:
    """Runs the list, and writes what survived."""
    check_count("timeout", _TIMEOUT.value, 1, 10**6)
    found = run(_ONLY.value, _TIMEOUT.value)
    if not found:
        raise InputError(f"expected a file of {_LIST.name} in --only, got {_ONLY.value!r}")
    survivors = [each for each in found if not each["is_noticed"]]
    if _OUTPUT.value is not None:
        pathlib.Path(_OUTPUT.value).write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(found) - len(survivors)} of {len(found)} mistakes were noticed")
    if survivors:
        sys.exit(1)


if __name__ == "__main__":
    cli.run_main(main)
