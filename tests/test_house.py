"""The house rules: how large a room may grow, what may import what, and the words that are used.

The numbers are meant to be raised only with a sentence in the commit that says why.
"""

import pathlib
import re
import subprocess

import grimp
import pytest

ROOT = pathlib.Path(__file__).parents[1]
MAX_LINES_OF_A_FILE = 250
MAX_README_CHARACTERS = 9_000
MAX_ENTRIES = 12  # directly under jspec/, besides the programs
PROGRAMS = {
    "__main__.py", "audit.py", "benchmark.py", "experiment.py", "generate.py", "report.py",
    "serve.py", "train.py",
}  # fmt: skip

# From the bottom to the top: a room imports only rooms before it. The numbers are lines of code.
ROOMS = {
    "common": 1_932,
    "kernels": 5_374,
    "models": 2_206,
    "sampling": 662,
    "weights": 3_490,
    "speculation": 3_376,
    "drafters": 7_000,
    "generation": 4_929,
    "serving": 3_437,
    "training": 2_396,
    "evaluation": 9_033,
}
MAX_LINES = 44_904
MAX_REPORT_LINES = 1_600
TEST_SHARE = 0.7
MIN_COMMENT_SHARE = 0.04
COMMENTED_ROOMS = ("kernels", "models", "speculation", "drafters")
MAX_FOLDERS, MAX_EDGES, MAX_CHAIN = 21, 109, 8

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
    """Returns the Python and C++ files under a folder."""
    return [path for path in sorted(folder.rglob("*")) if path.suffix in {".py", ".cc", ".h"}]


def count_lines(folder: pathlib.Path) -> int:
    """Returns the lines of code under a folder, blank ones and comments included."""
    return sum(len(path.read_text().splitlines()) for path in code_files(folder))


def test_no_room_outgrows_its_budget():
    """Guards against a room that grows because nobody looks."""
    sizes = {room: count_lines(ROOT / "jspec" / room) for room in ROOMS}
    assert {room: size for room, size in sizes.items() if size > ROOMS[room]} == {}
    assert count_lines(ROOT / "jspec") <= MAX_LINES
    assert count_lines(ROOT / "jspec/evaluation/reports") <= MAX_REPORT_LINES


def test_tests_keep_pace_with_the_code():
    """Guards against code that grows without tests."""
    assert count_lines(ROOT / "tests") >= TEST_SHARE * count_lines(ROOT / "jspec")


def test_a_file_can_be_read_whole():
    """Guards against a file that has become several concepts."""
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for folder in ("jspec", "scripts", "configs")
        for path in code_files(ROOT / folder)
        if path.suffix == ".py"
    }
    assert {name: n for name, n in lengths.items() if n > MAX_LINES_OF_A_FILE} == {}


def test_only_programs_lie_loose():
    """Guards against modules without a room."""
    entries = {path.name for path in (ROOT / "jspec").iterdir() if path.name != "__pycache__"}
    assert {name for name in entries if name.endswith(".py")} == {*PROGRAMS, "__init__.py"}
    assert len(entries - PROGRAMS) <= MAX_ENTRIES


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
    return {(one, other) for one, other in pairs if one != other}


def test_imports_point_downwards(imports):
    """Guards against a room that needs one above it: the order of `ROOMS` is that of the layers."""
    order = list(ROOMS)

    def height(folder: str) -> int:
        parts = folder.split(".")
        return order.index(parts[1]) if len(parts) > 1 else len(order)  # programs are on top

    assert {(a, b) for a, b in imports if height(a) < height(b)} == set()


def test_the_graph_of_folders_is_small(imports):
    """Guards against a tangle: few folders, few arrows, no cycle and no long chain of imports."""
    inner = {(a, b) for a, b in imports if a != "jspec"}
    assert len({folder for pair in inner for folder in pair}) <= MAX_FOLDERS
    assert len(imports) <= MAX_EDGES
    assert longest_chain(inner) <= MAX_CHAIN


def longest_chain(edges: set[tuple[str, str]]) -> int:
    """Returns the number of arrows on the longest path; fails where there is a cycle."""
    length = {folder: 0 for pair in edges for folder in pair}
    for _ in length:
        longer = dict(length)
        for importer, imported in edges:
            longer[importer] = max(longer[importer], length[imported] + 1)
        if longer == length:
            return max(length.values())
        length = longer
    pytest.fail("folders of jspec import each other in a cycle")


@pytest.mark.parametrize("room", COMMENTED_ROOMS)
def test_reasons_stand_beside_the_lines(room):
    """Guards against rooms of hard code without comments."""
    lines = [
        line.strip()
        for path in code_files(ROOT / "jspec" / room)
        for line in path.read_text().splitlines()
    ]
    num_comments = sum(line.startswith(("#", "//")) or "  # " in line for line in lines)
    assert num_comments >= MIN_COMMENT_SHARE * len(lines)


def test_the_readme_is_read_in_three_minutes():
    """Guards against a README that becomes a manual."""
    assert len((ROOT / "README.md").read_text()) <= MAX_README_CHARACTERS


@pytest.mark.parametrize("word", WORDS)
def test_words_are_those_of_the_field(word):
    """Guards against words that a reader of English stumbles over; WORDS says what to write."""
    pattern = re.compile(rf"\b(?:{word})\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in prose_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == [], f"write {WORDS[word]}"


def prose_files() -> list[pathlib.Path]:
    """Returns what people read: code, documentation, the README and its neighbours."""
    documents = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "configs").glob("*.py"),
    ]
    return [*code_files(ROOT / "jspec"), *documents]


def test_layers_are_those_of_the_linter():
    """Guards against two orders of the rooms: import-linter's contract has the same one."""
    done = subprocess.run(["lint-imports"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    text = (ROOT / "pyproject.toml").read_text()
    layers = re.findall(r'^  "jspec\.(\w+)",$', text, re.MULTILINE)
    assert layers == list(reversed(ROOMS))
