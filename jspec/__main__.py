"""The console command `jspec PROGRAM --flags`: the same as `python -m jspec.PROGRAM --flags`."""

import importlib.metadata
import pathlib
import runpy
import sys

_PROGRAMS = sorted(
    path.stem for path in pathlib.Path(__file__).parent.glob("*.py") if path.stem[0] != "_"
)


def main() -> None:
    """Runs the program that the first argument names; without one, lists them."""
    name, rest = (sys.argv[1:2] or [""])[0], sys.argv[2:]
    if name in _PROGRAMS:
        sys.argv = [sys.argv[0], *rest]
        runpy.run_module(f"jspec.{name}", run_name="__main__", alter_sys=True)
        return
    if name == "--version":
        print(f"jspec {importlib.metadata.version('jspec')}")
        return
    usage = f"expected jspec {'|'.join(_PROGRAMS)} and its flags, or jspec --version"
    if name in ("", "--help", "-h", "help"):
        print(f"{usage}; each has --help")
        return
    print(f"error: {usage}; got {name!r}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
