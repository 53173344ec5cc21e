"""What a report consists of: blocks, which `markdown` and `html` write each in its own way.

In texts, `code` and **strong** mean what they mean in Markdown; nothing else is markup.
"""

from typing import NamedTuple

from jspec.common.canvas import Picture


class Heading(NamedTuple):
    """A heading; level 1 is the title."""

    text: str
    level: int = 2


class Paragraph(NamedTuple):
    """A paragraph."""

    text: str


class Bullets(NamedTuple):
    """A list."""

    items: tuple[str, ...]


class Words(NamedTuple):
    """Words and what they mean."""

    meanings: tuple[tuple[str, str], ...]


class Code(NamedTuple):
    """Lines to copy, or to be shown as they are."""

    text: str


class Table(NamedTuple):
    """A table.

    Attributes:
      caption: what it shows, in a line; empty where the heading above says it.
      columns: their names, with units.
      rows: as texts; one cell a column.
      text_columns: indices of the columns that hold text; the others hold numbers.
      note: below it.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: tuple[int, ...] = (0,)
    note: str = ""


class Embedded(NamedTuple):
    """Something written for each form by hand.

    Attributes:
      html: safe HTML.
      markdown: Markdown.
    """

    html: str
    markdown: str


Block = Heading | Paragraph | Bullets | Words | Code | Table | Picture | Embedded
