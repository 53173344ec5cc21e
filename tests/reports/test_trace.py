"""Traces: what became of every draft, in the terminal and as HTML; and the timeline."""

import copy
import xml.etree.ElementTree

import pytest

from jspec.errors import InputError
from jspec.reports.timeline import to_svg
from jspec.reports.trace import (
    TracedToken,
    answer_tokens,
    check_trace,
    round_tokens,
    summary,
    to_html,
    to_terminal,
    visible,
)
from tests.reports.test_document import Checker
from tests.reports.workdirs import trace


def test_every_draft_has_a_fate():
    """Guards against a trace that shows the drafts behind a rejected one as rejected."""
    first, second, last = trace()["rounds"]
    assert round_tokens(first) == [
        TracedToken("accepted", " big"),
        TracedToken("rejected", " <red>"),
        TracedToken("dropped", " dog"),
        TracedToken("next", " black"),
    ]
    assert round_tokens(second) == [TracedToken("next", "\n")]
    assert [token.kind for token in round_tokens(last)] == ["accepted", "accepted"]


def test_the_answer_is_what_was_said():
    """The kept drafts and the target's own tokens, in order, and nothing else."""
    said = "".join(token.text for token in answer_tokens(trace()))
    assert said == "A big black\n\033[31mx"
    assert summary(trace()) == "5 tokens from 3 calls of the target; 3 of 5 drafts kept."


def test_the_terminal_shows_colours_of_ours_alone():
    """Guards against a token that sends commands to the terminal."""
    shown = to_terminal(trace())
    assert "\033[32m big\033[0m\033[31;9m <red>\033[0m\033[90;9m dog\033[0m" in shown
    assert "\033[32m\ufffd[31m\033[0m" in shown
    assert "\033[1;34m⏎\033[0m" in shown
    plain = to_terminal(trace(), has_colours=False)
    assert "\033" not in plain
    assert "+ big+- <red>-~ dog~[ black]" in plain


def test_the_html_is_escaped_and_well_formed():
    """Guards against a model that says <script>."""
    page = to_html(trace())
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert "red" not in checker.tags
    assert "<s> &lt;red&gt;</s>" in page
    assert "\033" not in page


def test_invisible_characters_are_seen():
    """Guards against a token that seems to be empty."""
    assert visible("a\nb\tc\r\0") == "a⏎b⇥c␍\ufffd"
    assert visible("naïve 漢") == "naïve 漢"


@pytest.mark.parametrize(
    "change",
    [
        {"rounds": None},
        {"prompt": 3},
        {"rounds": [{"drafts": ["a"], "num_accepted": 2}]},
        {"first": 1},
    ],
)
def test_what_is_no_trace_is_refused(change):
    """Guards against a crash in the midst of a report."""
    with pytest.raises(InputError, match="expected a trace"):
        check_trace(trace() | change)
    bad = copy.deepcopy(trace())
    bad["rounds"][0]["num_accepted"] = 4
    with pytest.raises(InputError, match="expected a trace"):
        check_trace(bad)


def test_the_timeline_draws_every_call():
    """One box a proposal, one a call of the target, one a step of plain decoding."""
    root = xml.etree.ElementTree.fromstring(to_svg(trace()))
    boxes = [node for node in root.iter() if node.tag.endswith("rect")][2:]
    lanes = [float(box.attrib["y"]) for box in boxes]
    assert [lanes.count(lane) for lane in sorted(set(lanes))] == [3, 3, 5]
    # the first target call begins where the first proposal ends, and is 20 times as long
    begin, end = (box for box in boxes[:2])
    assert float(end.attrib["x"]) == pytest.approx(
        float(begin.attrib["x"]) + float(begin.attrib["width"]), abs=0.02
    )
    assert float(end.attrib["width"]) == pytest.approx(20 * float(begin.attrib["width"]), rel=0.01)


def test_a_timeline_without_rounds_or_plain_steps():
    """Guards against a division by no time."""
    assert to_svg(trace() | {"rounds": []}) == ""
    svg = to_svg(trace() | {"plain_seconds": []})
    assert "plain decoding" not in svg
    xml.etree.ElementTree.fromstring(svg)
