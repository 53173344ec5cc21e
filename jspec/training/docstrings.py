"""A corpus that every machine has: the docstrings of Python's standard library."""

import ast
import pathlib
import sysconfig
import warnings
from collections.abc import Iterator

from jspec.common.errors import InputError

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def read_docstrings(num_bytes: int, folder: pathlib.Path | None = None) -> list[str]:
    """Returns the first docstrings of a folder that come to so many bytes; no two are equal.

    Files come in the order of their paths, without tests and installed packages. One version of
    Python gives the same texts everywhere; another version gives others.

    Args:
      num_bytes: of UTF-8; the text with which there would be more is the first that is left out.
      folder: of Python files; None for the standard library.

    Raises:
      InputError: there are fewer bytes.
    """
    folder = folder or pathlib.Path(sysconfig.get_paths()["stdlib"])
    texts: dict[str, None] = {}
    total = 0
    for text in _docstrings(folder):
        if text in texts:
            continue
        total += len(text.encode())
        if total > num_bytes:
            return list(texts)
        texts[text] = None
    if total == num_bytes:
        return list(texts)
    raise InputError(f"expected {num_bytes} bytes of docstrings in {folder}, got {total}")


def _docstrings(folder: pathlib.Path) -> Iterator[str]:
    """Yields the docstrings of all files that this Python can read."""
    paths = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
    for path in paths:
        if _LEFT_OUT & set(path.parts):
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse((folder / path).read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):  # some are there to be refused
            continue
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, _DOCUMENTED) else None
            if text and _is_unicode(text):
                yield text


def _is_unicode(text: str) -> bool:
    """Whether a text can be written: a string of Python may have half a character."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
