"""What a report consists of; how numbers and Markdown are written.

In texts, `code` means what it means in Markdown; nothing else is markup.
"""

import csv
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jspec.common.figures import Picture
from jspec.lab.analysis.ratios import Ratio

NOTHING = "-"
BARS = "Bars: 95 % bootstrap interval over prompts."
_SPECIAL = re.compile(r"([\\*_<>#|]|\](?=[(\[:]))")  # brackets alone are no link
_NUMBER = re.compile(r"[+-]?\d|-$")


class Heading(NamedTuple):
    """A heading; level 1 is the title."""

    text: str
    level: int = 2


class Glossary(NamedTuple):
    """Words and what they mean, folded until a reader opens it."""

    meanings: tuple[tuple[str, str], ...]


class Code(NamedTuple):
    """Lines to copy."""

    text: str


class Table(NamedTuple):
    """A table: rows of cells by column, a caption unless a heading says it, and a note below."""

    caption: str
    rows: Sequence[Mapping[str, str]]
    note: str = ""

    @property
    def numeric(self) -> dict[str, bool]:
        """Whether each column holds nothing but numbers, and so is aligned on the right."""
        cells = {name: [row[name] for row in self.rows] for name in self.rows[0]}
        return {name: all(map(_NUMBER.match, own)) for name, own in cells.items()}


# A text is a paragraph, a list of texts a list.
Block = str | list[str] | Heading | Glossary | Code | Table | Picture


def code(text: object) -> str:
    """Returns a label or a message as code, which no character in it can end."""
    return f"`{' '.join(str(text).replace('`', chr(39)).split()) or ' '}`"


def number(value: float | None, digits: int = 2) -> str:
    """Returns a number with this many decimals."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def interval(ratio: Ratio | None, digits: int = 2, *, scale: int = 1) -> str:
    """Returns a ratio and its interval, but for one without width, as of one prompt timed once."""
    if ratio is None:
        return NOTHING
    middle, low, high = (f"{scale * value:.{digits}f}" for value in ratio)
    return middle if math.isclose(ratio.low, ratio.high) else f"{middle} [{low}, {high}]"


def percent(ratio: Ratio | None) -> str:
    """Returns a share of 1 and its interval in percent."""
    return interval(ratio, 0, scale=100)


def plain(value: Any) -> str:
    """Returns a value as JSON has it: a text bare, a float with three digits, a run by its ends."""
    if value is None:
        return NOTHING
    if isinstance(value, float):
        return f"{value:.3g}"
    is_run = isinstance(value, list) and len(value) > 2 and isinstance(value[0], int)
    if is_run and value == list(range(value[0], value[0] + len(value))):
        return f"{value[0]}-{value[-1]}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def to_markdown(blocks: Sequence[Block]) -> str:
    """Returns the report; pictures are links to files under figures/."""
    return "\n".join("\n".join([*_lines(block), ""]) for block in blocks).rstrip("\n") + "\n"


def _lines(block: Block) -> list[str]:
    match block:
        case str():
            return [_inline(block)]
        case list():
            return [f"- {_inline(item)}" for item in block]
        case Heading():
            return [f"{'#' * block.level} {_inline(block.text)}"]
        case Code():
            return [fenced(block.text)]
        case Glossary():
            words = [f"- **{_inline(word)}**: {_inline(text)}" for word, text in block.meanings]
            return ["<details><summary>Glossary</summary>", "", *words, "", "</details>"]
        case Table():
            return _table_lines(block)
        case Picture():
            link = f"![{_inline(block.description)}](figures/{block.name}.png)"
            return [link, *(["", _inline(block.caption)] if block.caption else [])]
        case _:
            raise TypeError(f"expected a block of a report, got {type(block).__name__}")


def _table_lines(table: Table) -> list[str]:
    lines = [f"**{_inline(table.caption)}**", ""] if table.caption else []
    rules = ["---:" if is_number else "---" for is_number in table.numeric.values()]
    for cells in (table.numeric, rules, *(row.values() for row in table.rows)):
        # A bar ends a cell even within code.
        texts = [_inline(cell, bar=r"\|") for cell in cells]
        lines.append(f"| {' | '.join(texts)} |")
    return [*lines, *(["", _inline(table.note)] if table.note else [])]


def to_csv(blocks: Sequence[Block]) -> str:
    """Returns the cells of all tables, by line: table, first cell of its row, column, cell."""
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(["table", "row", "column", "cell"])
    title = ""
    for block in blocks:
        if isinstance(block, Heading):
            title = block.text
        elif isinstance(block, Table):
            for row in block.rows:
                first, *others = (cell.strip("`") for cell in row.values())
                for name, cell in zip(list(row)[1:], others, strict=True):
                    writer.writerow([block.caption or title, first, name.strip("`"), cell])
    return file.getvalue()


def fenced(text: str) -> str:
    """Returns lines in a fence that none of them can end."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def _inline(text: str, bar: str = "|") -> str:
    """Returns a text without markup but code; in a table, a bar ends a cell even within code."""
    return "".join(
        f"`{part.replace('|', bar)}`" if is_code else _SPECIAL.sub(r"\\\1", part)
        for part, is_code in _spans(text)
    )


def _spans(text: str) -> list[tuple[str, bool]]:
    pieces = [(part, index % 2 == 1) for index, part in enumerate(text.split("`"))]
    return [(part, is_code) for part, is_code in pieces if part]
