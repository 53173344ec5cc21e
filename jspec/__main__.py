"""The console command `jspec PROGRAM --flags`: the same as `python -m jspec.PROGRAM --flags`."""

import ast
import importlib.metadata
import os
import pathlib
import runpy
import sys

_FOLDER = pathlib.Path(__file__).parent
_PROGRAMS = sorted(path.stem for path in _FOLDER.glob("*.py") if path.stem[0] != "_")


def say(text: str) -> None:
    """Prints a line; where that cannot be, as on a full disk, ends with another line."""
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would try again
        print(f"error: standard output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def _usage() -> str:
    """Returns the programs with what each does, the beginning of its docstring."""
    lines = ["usage: jspec PROGRAM [--flags]", ""]
    for name in _PROGRAMS:
        about = ast.get_docstring(ast.parse((_FOLDER / f"{name}.py").read_text("utf-8"))) or ""
        lines.append(f"  {name:<12}{about.partition(':')[0]}")
    more = ["jspec PROGRAM --help lists its usual flags, --helpfull all of them.",
            "jspec --version prints the version."]  # fmt: skip
    return "\n".join([*lines, "", *more])


def main() -> None:
    """Runs the program that the first argument names; without a name, lists them."""
    name, rest = (sys.argv[1:2] or [""])[0], sys.argv[2:]
    if name in _PROGRAMS:
        sys.argv = [sys.argv[0], *rest]
        runpy.run_module(f"jspec.{name}", run_name="__main__", alter_sys=True)
        return
    if name == "--version":
        return say(f"jspec {importlib.metadata.version('jspec')}")
    if name in ("", "--help", "-h", "help"):
        return say(_usage())
    known = f"expected a program among {', '.join(_PROGRAMS)}, --help or --version"
    print(f"error: {known}; got {name!r}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
