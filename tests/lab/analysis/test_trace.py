"""Traces: what became of every draft, in the terminal and as a picture; and the timeline."""

import copy
import xml.etree.ElementTree as ET

import pytest

from jspec.common.errors import InputError
from jspec.lab.analysis.trace import (
    TracedToken,
    answer_tokens,
    check_trace,
    round_lines,
    round_tokens,
    summary,
    timeline,
    to_svg,
    to_terminal,
    visible,
)
from tests.lab.drawn import legend_of
from tests.lab.reports.workdirs import trace


def test_every_draft_has_a_fate():
    """Guards against a trace that shows the drafts after a rejected one as rejected."""
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
    """The accepted drafts and the target's own tokens, in order, and nothing else."""
    said = "".join(token.text for token in answer_tokens(trace()))
    assert said == "A big black\n\033[31mx"
    assert summary(trace()) == "5 tokens from 3 calls of the target; 3 of 5 drafts accepted."


TREE = {
    "drafts": [" the", " a", " sky", " sea", " is", " big"], "parents": [-1, -1, 0, 0, 2, 1],
    "kept": [0, 3], "num_accepted": 2, "next": ".", "begin": 0.0, "draft_seconds": 0.001,
    "target_seconds": 0.02,
}  # fmt: skip


def test_a_tree_has_a_line_a_branch():
    """Guards against a tree that is shown as a chain: the kept path first, though not first."""
    assert round_lines(TREE) == [
        (0, [TracedToken("accepted", " the"), TracedToken("accepted", " sea"),
             TracedToken("next", ".")]),
        (0, [TracedToken("rejected", " a"), TracedToken("dropped", " big")]),
        (1, [TracedToken("rejected", " sky"), TracedToken("dropped", " is")]),
    ]  # fmt: skip
    of_tree = check_trace(trace() | {"rounds": [TREE]})
    shown = to_terminal(of_tree, has_colours=False).splitlines()
    assert shown[3].startswith("lines without a number: a tree's other branches, indented")
    assert "lines without a number" not in to_terminal(trace())
    assert shown[2].endswith("[the target's own token], | between two tokens")
    assert "|" not in to_terminal(of_tree)
    assert shown[-4:-1] == [
        "      1  + the| sea+[.]",
        "         - a-~ big~",
        "           - sky-~ is~",
    ]
    assert "".join(token.text for token in answer_tokens(of_tree)) == "A the sea."
    assert '<tspan class="rejected"> sky</tspan>' in to_svg(of_tree)


def test_a_branch_of_a_branch_is_indented():
    """Each stands below the draft that it follows. What comes next stands after the first one."""
    parents = [-1, -1, 1, 1, 2]
    deep = TREE | {"drafts": list("abcde"), "parents": parents, "kept": [], "num_accepted": 0}
    shown = [(depth, "".join(token.text for token in line)) for depth, line in round_lines(deep)]
    assert shown == [(0, "a."), (0, "bce"), (1, "d")]


def test_the_terminal_shows_colours_of_ours_alone():
    """Guards against a token that sends commands to the terminal."""
    shown = to_terminal(trace())
    assert "\033[32m big\033[0m\033[31;9m <red>\033[0m\033[90;9m dog\033[0m" in shown
    assert "\033[32m\ufffd[31m\033[0m" in shown
    assert "\033[1;34m⏎\033[0m" in shown
    plain = to_terminal(trace(), has_colours=False)
    assert "\033" not in plain
    assert "+ big+- <red>-~ dog~[ black]" in plain


def test_invisible_characters_are_seen():
    """Guards against a token that seems to be empty."""
    assert visible("a\nb\tc\r\0") == "a⏎b⇥c␍\ufffd"
    assert visible("naïve 漢") == "naïve 漢"


def test_what_is_no_trace_is_refused():
    """Guards against a crash in the midst of a report."""
    bad = copy.deepcopy(trace())
    bad["rounds"][0]["num_accepted"] = 4
    kept_more = {"rounds": [{"drafts": ["a"], "num_accepted": 2}]}
    for change in ({"rounds": None}, {"prompt": 3}, kept_more, {"first": 1}, bad):
        with pytest.raises(InputError, match="expected a trace"):
            check_trace(trace() | change)


def test_the_timeline_draws_every_call(figures):
    """A box a draft, one a call of the target, one a step of plain decoding, where and how long."""
    picture = timeline(trace(), "timeline-1")
    assert picture.png.startswith(b"\x89PNG")
    (axes,) = figures[0].axes
    boxes = {lane: [] for lane in range(3)}
    for box in axes.patches:
        boxes[round(box.get_y() + box.get_height() / 2)].append((box.get_x(), box.get_width()))
    # three drafts in 1 ms, no draft in 1 ms, two drafts in 1 ms
    assert boxes[0] == [pytest.approx(one) for one in
                        ((0, 1 / 3), (1 / 3, 1 / 3), (2 / 3, 1 / 3), (21, 1), (41, 0.5),
                         (41.5, 0.5))]  # fmt: skip
    assert boxes[1] == [pytest.approx(one) for one in ((1, 20), (22, 19), (42, 20))]
    # as many plain steps as the rounds gave tokens
    assert boxes[2] == [pytest.approx((18 * step, 18)) for step in range(5)]
    assert [text.get_text() for text in axes.texts] == ["2", "1", "2"]
    lanes = [label.get_text() for label in axes.get_yticklabels()]
    assert lanes == ["drafter", "target", "plain decoding"]
    assert picture.description == "3 calls of the target gave 2, 1, 2 tokens"
    assert legend_of(figures[0]) == ["proposal, a box a draft",
                                     "call of the target, with the tokens that it gave",
                                     "step of plain decoding"]  # fmt: skip
    title = figures[0].get_suptitle()
    assert (
        title
        == "Drafter and target in the first 3 rounds\ntoy · drafter prompt_lookup · temperature 0"
    )
    faces = {box.get_facecolor()[:3] for box in axes.patches}
    assert len(faces) == 3
    assert (1.0, 1.0, 1.0) not in faces  # white boxes would vanish


def test_a_timeline_without_plain_steps_ends_somewhere(figures):
    """Guards against a lane that is empty, and against hundreds of rounds in one picture."""
    timeline(trace() | {"rounds": trace()["rounds"] * 9, "plain_seconds": []}, "timeline-1")
    (axes,) = figures[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["drafter", "target"]
    assert not any("plain" in label for label in legend_of(figures[0]))
    assert len(axes.texts) == 16


_SVG = "{http://www.w3.org/2000/svg}"


def test_the_animated_picture_shows_every_token():
    """Guards against a rejected draft that looks accepted, markup from a model, lines that come
    before the one above, and a picture that asks another server for a font or a script.
    """
    svg = to_svg(trace())
    picture = ET.fromstring(svg)
    shown = [(span.get("class"), span.text) for span in picture.iter(f"{_SVG}tspan")]
    tokens = [("accepted", " big"), ("rejected", " <red>"), ("dropped", " dog"), ("next", " black")]
    assert {*tokens, ("next", "A"), ("quiet", "prompt  Say <this> & that")} <= set(shown)
    assert shown[-1] == ("next", summary(trace()))
    groups = picture.iter(f"{_SVG}g")
    delays = [float(group.get("style").split(":")[1].rstrip("s")) for group in groups]
    assert delays == sorted(set(delays))
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    assert "<script" not in svg
