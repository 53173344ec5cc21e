"""Markdown and HTML: what comes out is well-formed, and nobody's text becomes markup."""

import html.parser
import re

import hypothesis
import hypothesis.strategies as st

from jspec.evaluation.reports.document import (
    Bullets,
    Code,
    Embedded,
    Heading,
    Paragraph,
    Picture,
    Table,
    Words,
)
from jspec.evaluation.reports.html_page import to_html
from jspec.evaluation.reports.inline import Span, spans
from jspec.evaluation.reports.markdown import fenced, to_markdown
from jspec.evaluation.reports.wording import code

VOID = {"meta", "br", "img"}
NASTY = "<script>alert('x')</script> & \"quotes\" | `ticks` ** # _under_"
SVG = '<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"><g id="a"></g></svg>'


class Checker(html.parser.HTMLParser):
    """Collects tags and text; refuses a page whose tags do not match."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.texts, self.links = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def check_page(page):
    """Checks a page for matching tags and for anything that it would fetch; returns the parser."""
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    assert "script" not in checker.tags
    assert all(link.startswith("#") for link in checker.links)
    assert not re.search(r"@import|url\((?!#)", page)
    return checker


def all_blocks(text):
    """Returns a document that has a text everywhere."""
    return [
        Heading(text, 1),
        Heading(text),
        Paragraph(f"**bold {code(text)}** {text}"),
        Bullets((text, code(text))),
        Words(((text, text),)),
        Code(text),
        Table(text, (text, "n"), ((text, "1"), (code(text), "2")), note=text),
        Picture("name", text, text, SVG, b"png"),
        Embedded("<p>by hand</p>", "by hand"),
        Heading("Second"),
        Heading("Third"),
    ]


@hypothesis.given(st.text(max_size=40))
@hypothesis.example(NASTY)
@hypothesis.settings(deadline=None, max_examples=60)
def test_a_page_is_well_formed_whatever_the_texts_are(text):
    """Answers, labels and errors may hold anything."""
    checker = check_page(to_html(all_blocks(text)))
    assert {"table", "figure", "svg", "dl", "nav"} <= set(checker.tags)


def test_nobodys_text_becomes_markup():
    """Guards against a label or a title that ends a cell, a code span or a paragraph."""
    page = to_html(all_blocks(NASTY))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    text = to_markdown(all_blocks(NASTY))
    outside = re.sub(r"(?s)^```\n.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE)
    assert not re.search(r"(?<!\\)<", outside)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 4
    for row in rows:
        assert len(re.findall(r"(?<!\\)\|", row)) == 3, row


def test_a_fence_is_longer_than_any_in_its_text():
    """Guards against a trace of Markdown that breaks out of its frame."""
    assert fenced("a\n```\nb").startswith("````\n")
    assert fenced("plain") == "```\nplain\n```"


def test_a_code_span_holds_anything():
    """Guards against ticks and line breaks in a label."""
    assert code("a`b\nc") == "`a'b c`"
    assert code("") == "` `"
    assert spans("x `a*b` **c `d`**") == [
        Span("text", "x "), Span("code", "a*b"), Span("text", " "), Span("strong", "c `d`"),
    ]  # fmt: skip


def test_numbers_stand_right_and_texts_left():
    """Guards against tables that cannot be compared by eye."""
    table = Table("t", ("method", "speed"), (("a", "1.00"),))
    assert "| --- | ---: |" in to_markdown([table])
    assert '<td class="number">1.00</td>' in to_html([table])


def test_pictures_are_linked_in_markdown_and_inlined_in_html():
    """Guards against a page that needs a file beside it, and a link to a file that is not there."""
    picture = Picture("p", "caption", "described", SVG, b"x")
    assert "![described](figures/p.png)" in to_markdown([picture])
    page = to_html([picture])
    assert "<svg" in page
    assert "<?xml" not in page
