"""Markdown and HTML: what comes out is well-formed, and nobody's text becomes markup."""

import html.parser
import re

import hypothesis
import hypothesis.strategies as st

from jspec.common.figures import Picture
from jspec.lab.analysis.ratios import Ratio
from jspec.lab.reports.document import (
    Code,
    Glossary,
    Heading,
    Table,
    Walk,
    code,
    fenced,
    interval,
    percent,
    plain,
    to_html,
    to_markdown,
)
from tests.lab.reports.workdirs import trace

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
        f"{code(text)} {text}",
        [text, code(text)],
        Glossary(((text, text),)),
        Code(text),
        Table(text, [{f"a{text}": text, "n": "1"}, {f"a{text}": code(text), "n": "2"}], note=text),
        Picture("name", text, text, SVG, b"png"),
        Heading("Second"),
        Heading("Third"),
    ]


@hypothesis.given(st.text(max_size=40))
@hypothesis.example(NASTY)
@hypothesis.settings(deadline=None, max_examples=60)
def test_a_page_is_well_formed_whatever_the_texts_are(text):
    """Answers, labels and errors may hold anything."""
    checker = check_page(to_html(all_blocks(text)))
    assert {"table", "figure", "svg", "dl", "nav", "details"} <= set(checker.tags)


def test_nobodys_text_becomes_markup():
    """Guards against a label or a title that ends a cell, a code span or a paragraph."""
    page = to_html(all_blocks(NASTY))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    text = to_markdown(all_blocks(NASTY))
    outside = re.sub(r"(?s)^```\n.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE)
    assert not re.search(r"(?<!\\)<(?!/?(details|summary)>)", outside)
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
    assert to_markdown(["x `a*b` *c*"]) == "x `a*b` \\*c\\*\n"
    assert "<p>x <code>a&lt;b</code> &lt;c</p>" in to_html(["x `a<b` <c"])


def test_numbers_stand_right_and_texts_left():
    """Guards against tables that cannot be compared by eye."""
    rows = [{"method": "a", "speed": "1.00 [0.90, 1.10]"}, {"method": "b", "speed": "-"}]
    table = Table("t", rows)
    assert "| --- | ---: |" in to_markdown([table])
    assert '<td class="number">1.00 [0.90, 1.10]</td>' in to_html([table])
    assert "<td>a</td>" in to_html([table])


def test_pictures_are_linked_in_markdown_and_inlined_in_html():
    """Guards against a page that needs a file beside it, and a link to a file that is not there."""
    picture = Picture("p", "caption", "described", SVG, b"x")
    assert "![described](figures/p.png)" in to_markdown([picture])
    page = to_html([picture])
    assert "<svg" in page
    assert "<?xml" not in page


def test_a_glossary_is_folded():
    """Guards against a page of explanations before the reader has asked for one."""
    blocks = [Glossary((("alpha", "a share"),))]
    assert to_markdown(blocks).startswith("<details><summary>Glossary</summary>\n\n- **alpha**")
    assert "<details><summary>Glossary</summary><dl>" in to_html(blocks)


def test_a_walk_is_escaped_and_well_formed():
    """Guards against a model that says <script>, or that sends commands to a terminal."""
    page = to_html([Walk(trace())])
    checker = check_page(page)
    assert "red" not in checker.tags
    assert '<s class="rejected"> &lt;red&gt;</s><s class="dropped"> dog</s>' in page
    assert '<b class="next"> black</b>' in page
    assert "\033" not in page
    assert page.count("<li>") == 3
    text = to_markdown([Walk(trace())])
    assert text.startswith("```\nTarget toy")
    assert "+ big+- <red>-~ dog~[ black]" in text
    assert "\033" not in text


def test_intervals_are_shown_where_they_have_a_width():
    """Guards against brackets that claim a spread of what was timed once."""
    assert interval(Ratio(1.234, 1.1, 1.4)) == "1.23 [1.10, 1.40]"
    assert interval(Ratio(1.234, 1.234, 1.234)) == "1.23"
    assert interval(None) == "-"
    assert percent(Ratio(0.5, 0.25, 0.755)) == "50 [25, 76]"


def test_values_are_written_plainly():
    """Runs of numbers by their ends, floats with three digits, nothing as a dash."""
    values = ([0, 1, 2, 3], [0, 2, 3], 0.12345, None, "text", True, 7)
    assert [*map(plain, values)] == ["0-3", "[0, 2, 3]", "0.123", "-", "text", "true", "7"]
