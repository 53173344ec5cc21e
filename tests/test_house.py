"""The house rules: what may import what, the length of the README, and the words that are used."""

import pathlib
import re
import subprocess

import grimp
import pytest

ROOT = pathlib.Path(__file__).parents[1]
MAX_README_CHARACTERS = 9_000
PROGRAMS = {
    "__main__.py", "audit.py", "benchmark.py", "chat.py", "experiment.py", "generate.py",
    "report.py", "serve.py", "train.py", "transcribe.py",
}  # fmt: skip

# From the bottom to the top: a package imports only packages before it.
PACKAGES = (
    "common", "kernels", "models", "sampling", "weights", "speculation", "drafters", "generation",
    "audio", "serving", "training", "lab", "cli",
)  # fmt: skip
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


@pytest.fixture(scope="module")
def imports() -> set[tuple[str, str]]:
    """Returns (importer, imported) for folders of jspec."""
    graph = grimp.build_graph("jspec")

    def folder(module: str) -> str:
        is_folder = ROOT.joinpath(*module.split(".")).is_dir()
        return module if is_folder else module.rsplit(".", 1)[0]

    pairs = {
        (folder(module), folder(imported))
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
    }
    return {(importer, target) for importer, target in pairs if importer != target}


def test_imports_point_downwards(imports):
    """Guards against a package that needs one above it, in the order of `PACKAGES`."""
    order = list(PACKAGES)

    def height(folder: str) -> int:
        parts = folder.split(".")
        return order.index(parts[1]) if len(parts) > 1 else len(order)  # programs are on top

    assert {(a, b) for a, b in imports if height(a) < height(b)} == set()


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


def test_layers_are_those_of_the_linter():
    """Guards against two orders of the packages: import-linter's contract has the same order."""
    done = subprocess.run(["lint-imports"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    text = (ROOT / "pyproject.toml").read_text()
    layers = re.findall(r'^  "jspec\.(\w+)",$', text, re.MULTILINE)
    assert layers == list(reversed(PACKAGES))


def test_no_path_of_one_machine():
    """Guards against a path that only the machine has on which it was written."""
    names = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.sh", "*.toml", "*.yml", "*.ipynb"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    files = [name for name in names if MACHINE_PATHS.search((ROOT / name).read_text())]
    assert [name for name in files if name != "tests/test_house.py"] == []
