"""A report as Markdown."""

import re
from collections.abc import Iterable

from jspec.evaluation.reports.document import (
    Block,
    Bullets,
    Code,
    Embedded,
    Heading,
    Paragraph,
    Picture,
    Table,
    Words,
)
from jspec.evaluation.reports.inline import Span, spans

_SPECIAL = re.compile(r"([\\`*_<>#|]|\](?=[(\[:]))")  # brackets alone are no link


def to_markdown(blocks: Iterable[Block]) -> str:
    """Returns the report; pictures are links to files under figures/."""
    return "\n\n".join(map(_write, blocks)) + "\n"


def _write(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {_inline(text)}"
        case Paragraph(text):
            return _inline(text)
        case Bullets(items):
            return "\n".join(f"- {_inline(item)}" for item in items)
        case Words(meanings):
            return "\n".join(f"- **{_inline(word)}**: {_inline(text)}" for word, text in meanings)
        case Code(text):
            return fenced(text)
        case Table():
            return _table(block)
        case Picture(name, caption, description):
            return f"![{_escape(description)}](figures/{name}.png)\n\n{_inline(caption)}"
        case Embedded():
            return block.markdown


def fenced(text: str) -> str:
    """Returns lines in a fence that none of them can end."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def _table(table: Table) -> str:
    aligned = [
        "---" if index in table.text_columns else "---:" for index in range(len(table.columns))
    ]
    rows = [[_cell(cell) for cell in row] for row in (table.columns, *table.rows)]
    lines = [f"| {' | '.join(row)} |" for row in (rows[0], aligned, *rows[1:])]
    caption = f"**{_inline(table.caption)}**" if table.caption else ""
    parts = [caption, "\n".join(lines), _inline(table.note)]
    return "\n\n".join(filter(None, parts))


def _inline(text: str) -> str:
    return "".join(map(_write_span, spans(text)))


def _cell(text: str) -> str:
    """Returns a cell, which a bar would end, in code too."""
    return "".join(
        _write_span(span).replace("|", "\\|") if span.kind == "code" else _write_span(span)
        for span in spans(text)
    )


def _write_span(span: Span) -> str:
    if span.kind == "code":
        return f"`{span.text}`"
    if span.kind == "strong":
        return f"**{_inline(span.text)}**"
    return _escape(span.text)


def _escape(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text)
