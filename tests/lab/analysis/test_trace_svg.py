"""The animated picture of a trace: what it shows, and that it needs nothing else."""

import xml.etree.ElementTree as ET

from jspec.lab.analysis.trace import to_svg

TRACE = {
    "target": "toy", "draft": None, "drafter": "prompt_lookup", "num_draft_tokens": 3,
    "acceptance": "rejection", "settings": {"temperature": 0.0}, "prompt": "a < b\nc", "first": "x",
    "rounds": [
        {"drafts": ["kept", "<bad>", "unseen"], "num_accepted": 1, "next": "own", "begin": 0.0,
         "draft_seconds": 0.1, "target_seconds": 0.2},
        {"drafts": [], "num_accepted": 0, "next": "&", "begin": 0.3, "draft_seconds": 0.1,
         "target_seconds": 0.2},
    ],
}  # fmt: skip
_SPAN = "{http://www.w3.org/2000/svg}tspan"


def spans(svg):
    """Returns the (class, text) pairs of a picture, line by line."""
    return [(span.get("class"), span.text) for span in ET.fromstring(svg).iter(_SPAN)]


def test_every_token_has_its_colour_and_characters_are_escaped():
    """Guards against a rejected draft that looks accepted, and against markup from a model."""
    shown = spans(to_svg(TRACE))
    for one in [("accepted", "kept"), ("rejected", "<bad>"), ("dropped", "unseen"), ("next", "own"),
                ("next", "&"), ("next", "x")]:  # fmt: skip
        assert one in shown
    assert ("quiet", "prompt  a < b⏎c") in shown


def test_the_counts_stand_at_the_end():
    """One draft of three was accepted; three tokens came from two calls."""
    kind, text = spans(to_svg(TRACE))[-1]
    assert kind == "next"
    assert text == "3 tokens from 2 calls of the target; 1 of 3 drafts accepted."


def test_rounds_appear_one_after_the_other():
    """Guards against an animation in which a line comes before the one above it."""
    groups = ET.fromstring(to_svg(TRACE)).iter("{http://www.w3.org/2000/svg}g")
    delays = [float(group.get("style").split(":")[1].rstrip("s")) for group in groups]
    assert delays == sorted(set(delays))


def test_nothing_else_is_loaded():
    """Guards against a README whose picture asks another server for a font or a script."""
    svg = to_svg(TRACE)
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    assert "<script" not in svg
