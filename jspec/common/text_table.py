"""Tables of plain text, for a terminal."""

from collections.abc import Sequence

NOTHING = "-"
"""Stands in a cell where there is no value."""


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table with titles of columns: the first column aligned left, the others right."""
    lines = [columns, *rows]
    first, *others = (max(map(len, cells)) for cells in zip(*lines, strict=True))
    return "\n".join(
        "  ".join([name.ljust(first), *map(str.rjust, cells, others)]).rstrip()
        for name, *cells in lines
    )


def number_cell(value: float | None, form: str, unit: float = 1.0) -> str:
    """Returns a number in a format, times a unit; nothing where there is none."""
    return NOTHING if value is None else format(unit * value, form)
