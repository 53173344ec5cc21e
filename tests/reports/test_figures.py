"""Figures: each is drawn, as an SVG that is one and a PNG, and reads in black and white."""

import itertools
import xml.etree.ElementTree

import pytest

from jspec.analysis.ratios import Ratio
from jspec.reports import figures_curves, figures_drafts, figures_estimate, figures_speed
from jspec.reports.canvas import as_label, looks
from jspec.reports.estimated import Estimate, Lenience
from jspec.reports.figures_speed import BatchPoint, Point
from jspec.reports.iid import IidModel
from jspec.reports.measured import parse_cells
from jspec.reports.pictures import scene_pictures
from jspec.reports.scene import make_scenes, summarise
from jspec.reports.view import View
from jspec.stats import RoundCounts
from tests.reports.workdirs import cells, config

VIEW = View("", "T=0")
RATIO = Ratio(1.2, 1.1, 1.3)
ROUNDS = {"a $x$": [RoundCounts(3, 1), RoundCounts(3, 3)], "_b": [RoundCounts(0, 0)]}
ESTIMATE = Estimate(
    "way", "T=0", "sampled", 100, 90, RATIO, {}, [(0.5, 0.9, 50), (1.5, 0.4, 40)],
    [Lenience(1.0, 0.5, 0.0), Lenience(0.1, 0.9, 0.2)],
)  # fmt: skip
DRAWN = {
    "number": lambda: figures_speed.by_number(
        VIEW,
        {"a": [Point(1, RATIO), Point(3, RATIO)], "b": [Point(2, RATIO)]},
        {"a": IidModel(0.5, 0.1), "b": IidModel(1.0, 0.0)},
    ),
    "category": lambda: figures_speed.by_category(VIEW, {"a": {"qa": RATIO, "co$de$": RATIO}}),
    "break even": lambda: figures_speed.break_even(
        VIEW, {"a": [Point(8, RATIO), Point(64, RATIO)]}
    ),
    "batches": lambda: figures_speed.batches(
        VIEW, {"a": [BatchPoint(1, 20.0, 50.0), BatchPoint(4, 40.0, 100.0)]}
    ),
    "place": lambda: figures_drafts.by_place(VIEW, ROUNDS),
    "kept": lambda: figures_drafts.kept_histogram(VIEW, ROUNDS),
    "cost": lambda: figures_drafts.round_cost(VIEW, {"a": [(0, 0.1), (3, 0.12)]}),
    "repetition": lambda: figures_drafts.repetition(VIEW, {"a": [(0.1, 0.2), (0.5, 0.5)]}),
    "alpha": lambda: figures_estimate.alphas([ESTIMATE]),
    "entropy": lambda: figures_estimate.by_entropy([ESTIMATE], VIEW),
    "lenience": lambda: figures_estimate.by_lenience([ESTIMATE], VIEW),
    "curves": lambda: figures_curves.draw(
        "c", [figures_curves.Curves([0, 1], {"a": [1, None]}, "x", "y")], caption="c"
    ),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_figure_is_drawn(name):
    """Guards against data that a figure cannot take: one point, nothing proposed, odd labels."""
    picture = DRAWN[name]()
    root = xml.etree.ElementTree.fromstring(picture.svg)
    assert root.tag.endswith("svg")
    assert "viewBox" in root.attrib
    assert picture.png.startswith(b"\x89PNG")
    assert picture.description
    assert "None" not in picture.caption


def test_the_same_data_gives_the_same_files():
    """Guards against figures that differ in git each time they are drawn."""
    first, second = DRAWN["place"](), DRAWN["place"]()
    assert first.svg == second.svg
    assert first.png == second.png


def test_lines_differ_in_more_than_colour():
    """Guards against a figure that cannot be read in black and white."""
    first = list(itertools.islice(looks(), 24))
    assert len({(look["marker"], str(look["linestyle"])) for look in first}) == 24
    assert len({look["marker"] for look in first[:8]}) == 8


def test_labels_are_shown_letter_for_letter():
    """Guards against a way named $x$ as a formula, and one named _x without a legend."""
    assert as_label("a$b$") == r"a\$b\$"
    assert not as_label("_a").startswith("_")


def test_a_scene_draws_what_it_has_data_for():
    """Guards against empty figures, and against one that is forgotten."""
    (scene,) = make_scenes(config(), parse_cells(cells()))
    names = [picture.name for picture in scene_pictures(summarise(scene), View("-1", "T=0"))]
    assert names == [
        f"{name}-1"
        for name in ("speedup-by-number", "speedup-by-category", "acceptance-by-position",
                     "kept-a-round", "round-cost", "repetition")
    ]  # fmt: skip
    only = [one for one in cells() if one["key"]["way"] in ("plain", "random:3")]
    for line in only:
        line["record"]["answers"][0]["category"] = None
    (scene,) = make_scenes(config(), parse_cells(only))
    names = [picture.name for picture in scene_pictures(summarise(scene), VIEW)]
    assert names == ["acceptance-by-position", "kept-a-round", "round-cost"]


def test_curves_are_told_apart_by_unit_and_kind():
    """Guards against operations and speed on one axis."""
    record = {
        "columns": ["alpha", "speed, 1 draft", "speed, 3 drafts", "operations, 1 draft", "note"],
        "units": ["", "times", "times", "times", ""],
        "rows": [[0.0, 1.0, 1.0, 2.0, "x"], [1.0, 2.0, None, 1.0, "y"]],
    }
    speed, operations = figures_curves.of_table(record)
    assert speed.lines == {"1 draft": [1.0, 2.0], "3 drafts": [1.0, None]}
    assert speed.y_label == "speed (times)"
    assert list(operations.lines) == ["1 draft"]
