"""The markup within a text: `code` and **strong**."""

import re
from typing import Literal, NamedTuple

_MARKUP = re.compile(r"`([^`]*)`|\*\*((?:`[^`]*`|[^`*]|\*(?!\*))+)\*\*")


class Span(NamedTuple):
    """A piece of a text.

    Attributes:
      kind: "text", "code", or "strong", in which there may be more markup.
      text: the piece, without the marks.
    """

    kind: Literal["text", "code", "strong"]
    text: str


def spans(text: str) -> list[Span]:
    """Returns the pieces of a text."""
    pieces, end = [], 0
    for match in _MARKUP.finditer(text):
        pieces.append(Span("text", text[end : match.start()]))
        is_code = match[1] is not None
        pieces.append(Span("code", match[1]) if is_code else Span("strong", match[2]))
        end = match.end()
    return [piece for piece in [*pieces, Span("text", text[end:])] if piece.text]
