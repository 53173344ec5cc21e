"""The console command `jspec PROGRAM --flags`: the same as `python -m jspec.PROGRAM --flags`."""

import importlib.metadata
import os
import pathlib
import runpy
import sys

_PROGRAMS = sorted(
    path.stem for path in pathlib.Path(__file__).parent.glob("*.py") if path.stem[0] != "_"
)


def say(text: str) -> None:
    """Prints a line; where that cannot be, as on a full disk, ends with one of its own."""
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would try again
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def main() -> None:
    """Runs the program that the first argument names; without one, lists them."""
    name, rest = (sys.argv[1:2] or [""])[0], sys.argv[2:]
    if name in _PROGRAMS:
        sys.argv = [sys.argv[0], *rest]
        runpy.run_module(f"jspec.{name}", run_name="__main__", alter_sys=True)
        return
    if name == "--version":
        return say(f"jspec {importlib.metadata.version('jspec')}")
    usage = f"expected jspec {'|'.join(_PROGRAMS)} and its flags, or jspec --version"
    if name in ("", "--help", "-h", "help"):
        return say(f"{usage}; each has --help")
    print(f"error: {usage}; got {name!r}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
