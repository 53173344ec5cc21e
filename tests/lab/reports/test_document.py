"""Markdown and CSV: what comes out is well-formed, and nobody's text becomes markup."""

import csv
import io
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
    code,
    interval,
    percent,
    plain,
    to_csv,
    to_markdown,
)

NASTY = "<script>alert('x')</script> & \"quotes\" | `ticks` ** # _under_"


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
        Picture("name", text, text, "", b"png"),
        Heading("Second"),
        Heading("Third"),
    ]


@hypothesis.given(st.text(max_size=40))
@hypothesis.example(NASTY)
@hypothesis.settings(deadline=None, max_examples=30)
def test_a_table_is_whole_whatever_the_texts_are(text):
    """Answers, labels and errors may hold anything; the cells come back from the file as well."""
    rows = list(csv.DictReader(io.StringIO(to_csv(all_blocks(text)), newline="")))
    columns = [(row["row"], row["column"], row["cell"]) for row in rows]
    assert columns == [(text.strip("`"), "n", "1"), (code(text).strip("`"), "n", "2")]


def test_nobodys_text_becomes_markup():
    """Guards against a label or a title that ends a cell, a code span or a paragraph."""
    text = to_markdown(all_blocks(NASTY))
    outside = re.sub(r"(?s)^```\n.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE)
    assert not re.search(r"(?<!\\)<(?!/?(details|summary)>)", outside)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 4
    for row in rows:
        assert len(re.findall(r"(?<!\\)\|", row)) == 3, row


def test_blocks_are_markdown():
    """A fence is longer than any in its text, ticks end no code, numbers stand right and texts
    left, and a glossary is folded.
    """
    rows = [{"method": "a", "speed": "1.00 [0.90, 1.10]"}, {"method": "b", "speed": "-"}]
    table = Table("t", rows)
    for block, expected in (
        (Code("a\n```\nb"), "````\na\n```\nb\n````\n"),
        (f"x {code('a*b`c' + chr(10) + 'd')} *c*", "x `a*b'c d` \\*c\\*\n"),
        (code(""), "` `\n"),
        (Picture("p", "caption", "described", "", b"x"),
         "![described](figures/p.png)\n\ncaption\n"),
    ):  # fmt: skip
        assert to_markdown([block]) == expected
    folded = to_markdown([Glossary((("alpha", "a share"),))])
    assert folded.startswith("<details><summary>Glossary</summary>\n\n- **alpha**: a share\n")
    assert "| --- | ---: |" in to_markdown([table])
    assert to_csv([Heading("h"), table]).splitlines()[1:] == [
        't,a,speed,"1.00 [0.90, 1.10]"',
        "t,b,speed,-",
    ]


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
