"""What a report consists of; how numbers, Markdown and the HTML page are written.

In texts, `code` means what it means in Markdown; nothing else is markup. The page needs no script,
no other file and no network.
"""

import json
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import markupsafe

from jspec.common.figures import Picture
from jspec.lab.analysis import trace as traces
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


class Walk(NamedTuple):
    """A generation round by round; see `jspec.lab.analysis.trace`."""

    trace: Mapping[str, Any]


# A text is a paragraph, a list of texts a list.
Block = str | list[str] | Heading | Glossary | Code | Table | Picture | Walk


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


def to_html(blocks: Sequence[Block]) -> str:
    """Returns the page; its title is the first heading."""
    headings = [block for block in blocks if isinstance(block, Heading)]
    title = next((one.text for one in headings), "Report").replace("`", "")
    filters = {"inline": _inline_html, "anchor": _anchor, "svg": _svg}
    chapters = [one.text for one in headings if one.level == 2]
    return _render("report.html.j2", blocks, filters, title=title, chapters=chapters)


def to_markdown(blocks: Sequence[Block]) -> str:
    """Returns the report; pictures are links to files under figures/."""
    text = _render("report.md.j2", blocks, {"inline": _inline, "fenced": fenced})
    return text.rstrip("\n") + "\n"


def _render(
    template: str, blocks: Sequence[Block], filters: Mapping[str, Any], **values: Any
) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=".html." in template,
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters |= filters
    pairs = [(type(block).__name__, block) for block in blocks]
    return environment.get_template(template).render(blocks=pairs, traces=traces, **values)


def _inline_html(text: str) -> markupsafe.Markup:
    return markupsafe.Markup("").join(
        markupsafe.Markup("<code>{}</code>" if is_code else "{}").format(part)
        for part, is_code in _spans(text)
    )


def _svg(picture: str) -> markupsafe.Markup:
    """Returns a picture without what belongs to a file alone: XML's declaration and doctype."""
    return markupsafe.Markup(picture[picture.index("<svg") :].strip())


def _anchor(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


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
    """Returns the pieces of a text, and which are code."""
    pieces = [(part, index % 2 == 1) for index, part in enumerate(text.split("`"))]
    return [(part, is_code) for part, is_code in pieces if part]
