"""The house rules: what may import what and when, the README's length, the words that are used."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

import jspec

ROOT = pathlib.Path(__file__).parents[1]
MAX_README_CHARACTERS = 9_000
PROGRAMS = {
    "__main__.py", "audit.py", "benchmark.py", "chat.py", "experiment.py", "generate.py",
    "report.py", "serve.py", "train.py", "transcribe.py",
}  # fmt: skip

# Of the machines on which this was written; no user has them.
MACHINE_PATHS = re.compile(r"/(?:work|farm|root)/")

# What a reader stumbles over, and what to write instead.
WORDS = {
    r"laws?": "distribution",
    r"foretold|foretells?": "predicted",
    r"dear(?:er|est)?": "expensive",
    r"ways": "methods, or whatever they are",
    r"behind": "after",
    r"so many": "this many",
}


def code_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the Python, C++ and CUDA files under a folder."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix in {".py", ".cc", ".h", ".cu", ".cuh"}
    ]


def test_only_programs_lie_loose():
    """Guards against modules without a package."""
    entries = {path.name for path in (ROOT / "jspec").iterdir() if path.name != "__pycache__"}
    assert {name for name in entries if name.endswith(".py")} == {*PROGRAMS, "__init__.py"}


def test_the_readme_is_read_in_three_minutes():
    """Guards against a README that becomes a manual."""
    assert len((ROOT / "README.md").read_text()) <= MAX_README_CHARACTERS


@pytest.mark.parametrize("word", WORDS)
def test_words_are_those_of_the_field(word):
    """Guards against words that a reader of English stumbles over; WORDS says what to write."""
    pattern = re.compile(rf"\b(?:{word})\b", re.IGNORECASE)
    places = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in prose_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert places == [], f"write {WORDS[word]}"


def prose_files() -> list[pathlib.Path]:
    """Returns what people read: code, documentation, the README and its neighbours."""
    documents = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "configs").glob("*.py"),
    ]
    return [*code_files(ROOT / "jspec"), *documents]


def test_imports_point_downwards():
    """Guards against a package that needs one above it, and against one without a layer."""
    done = subprocess.run(["lint-imports"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    text = (ROOT / "pyproject.toml").read_text()
    layers = re.findall(r'^  "jspec\.(\w+)",$', text, re.MULTILINE)
    packages = {path.parent.name for path in (ROOT / "jspec").glob("*/*.py")}
    assert set(layers) == packages


def test_no_path_of_one_machine():
    """Guards against a path that only the machine has on which it was written."""
    names = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.sh", "*.toml", "*.yml", "*.ipynb"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    files = [name for name in names if MACHINE_PATHS.search((ROOT / name).read_text())]
    assert [name for name in files if name != "tests/test_house.py"] == []


_MEASURE = """
import json, sys, time
import jax
begin = time.process_time()
import jspec
seconds = time.process_time() - begin
after_jspec = sorted(sys.modules)
import jspec.generate, jspec.lab.reports.report
print(json.dumps([seconds, after_jspec, sorted(sys.modules)]))
"""


def test_importing_jspec_is_almost_free_and_the_program_imports_what_it_needs():
    """Guards against a slow start: at most 0.3 s after JAX, heavy libraries only where used.

    A report draws its figures with matplotlib, which is loaded only then.
    """
    done = subprocess.run([sys.executable, "-c", _MEASURE], capture_output=True, check=True)
    seconds, after_jspec, after_program = json.loads(done.stdout)
    assert seconds <= 0.3
    heavy = {"transformers", "orbax", "torch", "matplotlib", "huggingface_hub", "gguf",
             "ml_collections"}  # fmt: skip
    assert not {"flax", "tokenizers", *heavy} & set(after_jspec)
    assert not heavy & set(after_program)
    assert "flax" in after_program  # the names are those that a module would have


def test_the_public_names_are_there():
    """Guards against a name in `__all__` whose home has moved."""
    for name in jspec.__all__:
        assert getattr(jspec, name).__module__.startswith("jspec.")
    assert not hasattr(jspec, "no_such_name")
