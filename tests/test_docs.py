"""The documentation: its links, an API page of every public name, flags that exist."""

import importlib
import inspect
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

import jspec

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), *(ROOT / name for name in ("README.md", "ARCHITECTURE.md"))]
API = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
_CODE = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
_PROGRAM = re.compile(r"python (?:-m jspec\.(\w+)|(scripts/\w+\.py))((?:[^\n\\]|\\\n)*)")


def code_blocks(language):
    """Returns (page, text) of all code in a language."""
    return [
        (page.name, text)
        for page in PAGES
        for kind, text in _CODE.findall(page.read_text())
        if kind == language
    ]


def public_objects():
    """Returns the objects of the API page, the members of its modules included."""
    objects = [pkgutil.resolve_name(name) for name in API]
    modules = [item for item in objects if type(item) is type(jspec)]
    return [*objects, *(value for module in modules for value in vars(module).values())]


def test_every_public_name_stands_in_the_api_page():
    """Guards against a name that users import and that no page explains."""
    objects = public_objects()
    missing = [
        name for name in jspec.__all__ if not any(getattr(jspec, name) is o for o in objects)
    ]
    assert missing == []


@pytest.mark.parametrize("name", API)
def test_the_api_page_is_readable_as_a_file(name):
    """Guards against a page that only the site's generator can fill, or that says what was once."""
    value, short_name = pkgutil.resolve_name(name), name.rpartition(".")[2]
    row = re.search(
        rf"^\| `{short_name}\b[^`]*` \| (.+) \|$", (DOCS / "api.md").read_text(), re.MULTILINE
    )
    assert row is not None
    if inspect.isroutine(value) or isinstance(value, type) or inspect.ismodule(value):
        first = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
        assert row[1] == first, "the row says what the docstring's first paragraph says"


def test_names_in_examples_stand_in_the_api_page():
    """Guides tell users to import them, so they are public; but for the guide to jspec's inside."""
    objects, missing = public_objects(), []
    for page, text in code_blocks("python"):
        for module, names in re.findall(r"^from (jspec[\w.]*) import (.+)$", text, re.MULTILINE):
            for name in [] if page == "add_a_drafter.md" else names.split(", "):
                value = getattr(importlib.import_module(module), name)
                missing += [f"{page}: {name}"] if all(value is not item for item in objects) else []
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """To a file that is there, or to an object of the API page."""
    text = _CODE.sub("", page.read_text())
    files = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert [name for name in files if not (page.parent / name).exists()] == []
    assert [name for name in re.findall(r"\]\[(jspec[\w.]+)\]", text) if name not in API] == []


def test_the_glossary_is_within_reach():
    """From the README, the front page and the pages with which a new user begins."""
    begin = ["index", "tutorial", "run_your_pair", "drafters", "measurements", "write_your_own"]
    pages = [ROOT / "README.md", *(DOCS / f"{name}.md" for name in begin)]
    assert [page.name for page in pages if "glossary.md" not in page.read_text()] == []


# Help of all programs, each after a line with its name. Importing takes a second: it is done once,
# and every program goes on in a copy of the process.
_HELP = """
import os, runpy, sys
import jspec.generation.generator
for program in sys.argv[1:]:
    print("program", program, flush=True)
    if os.fork() == 0:
        sys.argv = [program, "--helpfull"]
        sys.path.insert(0, os.path.dirname(program) or os.getcwd())
        run = runpy.run_path if program.endswith(".py") else runpy.run_module
        try:
            run(program, run_name="__main__")
        except SystemExit as end:  # at once, as giving everything back takes longest
            sys.stdout.flush()
            os._exit(end.code if isinstance(end.code, int) else bool(end.code))
    assert os.waitstatus_to_exitcode(os.wait()[1]) in (0, 1), program
"""


def flags_of(programs):
    """Returns the flags that each program knows."""
    done = subprocess.run([sys.executable, "-c", _HELP, *programs], cwd=ROOT,
                          capture_output=True, text=True, check=True)  # fmt: skip
    parts = re.split(r"^program (\S+)$", done.stdout, flags=re.MULTILINE)[1:]
    known = {}
    for program, text in zip(parts[::2], parts[1::2], strict=True):
        names = re.findall(r"^  --(\[no\])?(\w+)", text, re.MULTILINE)
        known[program] = {name for _, name in names} | {f"no{n}" for no, n in names if no}
    return known


def test_commands_have_flags_that_exist():
    """Guards against a guide that names a flag of yesterday."""
    commands = [
        (page, f"jspec.{module}" if module else script, arguments)
        for page, text in code_blocks("bash")
        for module, script, arguments in _PROGRAM.findall(text)
    ]
    assert len(commands) > 40
    known = flags_of(sorted({program for _, program, _ in commands}))
    assert all(known.values())
    given = [
        (page, program, set(re.findall(r"(?<=\s)--(\w+)", rest)))
        for page, program, rest in commands
    ]
    assert [
        (page, flags - known[program]) for page, program, flags in given if flags - known[program]
    ] == []
