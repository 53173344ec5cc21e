"""A report as one HTML page that needs nothing else: no script, no other file, no network."""

import html
import re
from collections.abc import Iterable, Sequence

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
from jspec.evaluation.reports.style import STYLE


def to_html(blocks: Sequence[Block]) -> str:
    """Returns the page; its title is the first heading."""
    title = next((block.text for block in blocks if isinstance(block, Heading)), "Report")
    body = "\n".join(_write(block) for block in _with_contents(blocks))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_plain(title)}</title>\n<style>\n{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _with_contents(blocks: Sequence[Block]) -> Iterable[Block]:
    """Yields the blocks, and before the third chapter's worth of headings links to all of them."""
    chapters = [b for b in blocks if isinstance(b, Heading) and b.level == 2]
    links = "".join(
        f'<li><a href="#{_anchor(chapter.text)}">{_inline(chapter.text)}</a></li>'
        for chapter in chapters
    )
    is_pending = len(chapters) > 2
    for block in blocks:
        if is_pending and isinstance(block, Heading) and block.level == 2:
            yield Embedded(f"<nav><ul>{links}</ul></nav>", "")
            is_pending = False
        yield block


def _write(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f'<h{level} id="{_anchor(text)}">{_inline(text)}</h{level}>'
        case Paragraph(text):
            return f"<p>{_inline(text)}</p>"
        case Bullets(items):
            return f"<ul>{''.join(f'<li>{_inline(item)}</li>' for item in items)}</ul>"
        case Words(meanings):
            entries = (
                f"<dt>{_inline(word)}</dt><dd>{_inline(text)}</dd>" for word, text in meanings
            )
            return f"<dl>{''.join(entries)}</dl>"
        case Code(text):
            return f"<pre><code>{html.escape(text)}</code></pre>"
        case Table():
            return _table(block)
        case Picture(_, caption, description, svg):
            label = html.escape(description)
            return (
                f'<figure><div class="wide" role="img" aria-label="{label}">{inline_svg(svg)}'
                f"</div><figcaption>{_inline(caption)}</figcaption></figure>"
            )
        case Embedded():
            return block.html


def inline_svg(svg: str) -> str:
    """Returns a picture without what belongs to a file alone: XML's declaration and doctype."""
    return svg[svg.index("<svg") :].strip()


def _table(table: Table) -> str:
    head = "".join(_cell("th", name, index, table) for index, name in enumerate(table.columns))
    rows = "".join(
        f"<tr>{''.join(_cell('td', text, index, table) for index, text in enumerate(row))}</tr>\n"
        for row in table.rows
    )
    caption = f"<caption>{_inline(table.caption)}</caption>" if table.caption else ""
    note = f'<p class="note">{_inline(table.note)}</p>' if table.note else ""
    return (
        f'<div class="wide"><table>{caption}'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody></table></div>{note}"
    )


def _cell(tag: str, text: str, index: int, table: Table) -> str:
    kind = "" if index in table.text_columns else ' class="number"'
    return f"<{tag}{kind}>{_inline(text)}</{tag}>"


def _inline(text: str) -> str:
    return "".join(map(_write_span, spans(text)))


def _write_span(span: Span) -> str:
    if span.kind == "code":
        return f"<code>{html.escape(span.text)}</code>"
    if span.kind == "strong":
        return f"<strong>{_inline(span.text)}</strong>"
    return html.escape(span.text).replace(" %", "&nbsp;%")


def _plain(text: str) -> str:
    return "".join(html.escape(span.text.replace("`", "")) for span in spans(text))


def _anchor(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
