"""Figures: what they draw is what they were given, and it reads in black and white."""

import itertools
import xml.etree.ElementTree

import pytest

from jspec.common import curves
from jspec.common.canvas import MARKERS, as_label, looks
from jspec.evaluation.analysis.ratios import Ratio
from jspec.evaluation.reports import figures_drafts, figures_estimate, figures_speed
from jspec.evaluation.reports.estimated import EntropyBin, Estimate, Lenience
from jspec.evaluation.reports.figures_costs import cost_by_width
from jspec.evaluation.reports.figures_speed import BatchPoint, Point
from jspec.evaluation.reports.iid import IidModel
from jspec.evaluation.reports.measured import parse_cells
from jspec.evaluation.reports.pictures import scene_pictures
from jspec.evaluation.reports.scene import make_scenes, summarise
from jspec.evaluation.reports.view import View
from jspec.generation.stats import RoundCounts
from tests.evaluation.reports.workdirs import cells, config

VIEW = View("-2", "T=0")
RATIO, LOW, HIGH = Ratio(1.2, 1.1, 1.4), Ratio(0.4, 0.3, 0.6), Ratio(0.9, 0.8, 0.95)
ROUNDS = [[RoundCounts(3, 1), RoundCounts(3, 3)], [RoundCounts(3, 0)]]


def lines_of(axes):
    """Returns the points of every line that has a marker, without those of error bars."""
    drawn = [line for line in axes.get_lines() if line.get_marker() in MARKERS]
    return [[tuple(map(float, point)) for point in line.get_xydata()] for line in drawn]


def bars_of(axes):
    """Returns the ends of every error bar, by the figure's order."""
    return [
        [tuple(map(float, end)) for end in segment]
        for container in axes.containers
        for bar in container.lines[2]
        for segment in bar.get_segments()
    ]


def legend_of(figure):
    """Returns the names under a figure."""
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def close(expected):
    """Returns points that others may come near to."""
    return [pytest.approx(point) for point in expected]


def test_speed_by_number_and_its_theory(figures):
    """Guards against a marker beside its number, or a theory line that is another drafter's."""
    points = {"a": [Point(1, RATIO), Point(3, LOW)]}
    picture = figures_speed.by_number(VIEW, points, {"a": IidModel(0.5, 0.1)})
    (axes,) = figures[0].axes
    measured, theory = lines_of(axes)
    assert measured == close([(1, 1.2), (3, 0.4)])
    # Theorem 3.8: (1 - alpha^(n + 1)) / ((1 - alpha) (n c + 1))
    assert theory == close([(1, 1.5 / 1.1), (2, 1.75 / 1.2), (3, 1.875 / 1.3)])
    assert bars_of(axes) == [close([(1, 1.1), (1, 1.4)]), close([(3, 0.3), (3, 0.6)])]
    assert legend_of(figures[0]) == ["a"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == (
        "drafts a round, at most (tokens)", "speed-up (times plain decoding)",
    )  # fmt: skip
    assert "`a`: fitted alpha = 0.50, c = 0.100" in picture.caption
    assert picture.name == "speedup-by-number-2"


def test_speed_by_category(figures):
    """Guards against a speed-up in another category's row."""
    figures_speed.by_category(VIEW, {"a": {"qa": RATIO, "co$de$": LOW}, "b": {"co$de$": HIGH}})
    (axes,) = figures[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["qa", r"co\$de\$"]
    first, second = lines_of(axes)
    assert first == close([(1.2, -0.2), (0.4, 0.8)])
    assert second == close([(0.9, 1.2)])


def test_whole_answers_by_length(figures):
    """Guards against lengths that are not where the axis says."""
    figures_speed.break_even(VIEW, {"a": [Point(8, LOW), Point(64, RATIO)]})
    (axes,) = figures[0].axes
    assert lines_of(axes) == [close([(8, 0.4), (64, 1.2)])]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["8", "64"]
    assert axes.get_xscale() == "log"


def test_latency_against_throughput(figures):
    """Guards against exchanged axes, and batch sizes at other points."""
    points = [BatchPoint(1, 20.0, 50.0), BatchPoint(4, 40.0, 100.0)]
    figures_speed.batches(VIEW, {"a": points})
    (axes,) = figures[0].axes
    assert lines_of(axes) == [[(50, 20), (100, 40)]]
    assert [(text.get_text(), text.xy) for text in axes.texts] == [
        ("1", (50, 20)),
        ("4", (100, 40)),
    ]
    assert axes.get_xlabel().startswith("throughput")


def test_acceptance_by_place(figures):
    """By hand: 2 of 3, 1 of 3, 1 of 3 are kept; of those whose turn came 2 of 3, 1 of 2, 1 of 1."""
    picture = figures_drafts.by_place(VIEW, {"a $x$": ROUNDS})
    left, right = figures[0].axes
    assert lines_of(left) == [close([(1, 2 / 3), (2, 1 / 3), (3, 1 / 3)])]
    assert lines_of(right) == [close([(1, 2 / 3), (2, 1 / 2), (3, 1)])]
    assert [tick for tick in left.get_xticks() if 0.5 < tick < 3.5] == [1, 2, 3]
    # one prompt keeps the first draft always, the other never
    assert bars_of(left)[0] == close([(1, 0), (1, 1)])
    assert legend_of(figures[0]) == [r"a \$x\$"]
    assert "Conditional: a $x$: 0.67 [0.00, 1.00], 0.50, 1.00" in picture.description


def test_drafts_kept_a_round(figures):
    """By hand: of three rounds one keeps 0, one 1, one 3; a way that proposes nothing keeps 0."""
    rounds = {"a": [r for own in ROUNDS for r in own], "_b": [RoundCounts(0, 0)]}
    figures_drafts.kept_histogram(VIEW, rounds)
    (axes,) = figures[0].axes
    bars = list(zip(*axes.containers, strict=True))  # of each way, by drafts kept
    widths = [[bar.get_width() for bar in own] for own in bars]
    assert widths == [pytest.approx([1 / 3, 1 / 3, 0, 1 / 3]), [1, 0, 0, 0]]
    assert [bar.get_x() for bar in bars[0]] == pytest.approx([0, 1 / 3, 2 / 3, 2 / 3])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", " _b"]
    assert legend_of(figures[0]) == ["0 kept", "1 kept", "2 kept", "3 kept"]
    greys = [own[0].get_facecolor()[0] for own in axes.containers]
    assert greys == sorted(greys, reverse=True)
    assert len(set(greys)) == 4


def test_time_of_rounds(figures):
    """Guards against seconds where the axis says milliseconds, and a line that goes back."""
    figures_drafts.round_cost(VIEW, {"a": [(3, 0.12), (0, 0.1)]})
    (axes,) = figures[0].axes
    assert lines_of(axes) == [close([(0, 100), (3, 120)])]
    assert axes.get_ylabel() == "time of a round (ms)"


def test_cost_by_width(figures):
    """Guards against cheap drafters that a dear one presses flat."""
    picture = cost_by_width(
        {"a": {0: 1.0, 3: 1.3}, "b": {0: 1.0, 1: 3.5}, "c": {0: 1.0, 1: 1.2}}, 2048
    )
    cheap, dear = figures[0].axes
    assert lines_of(cheap) == [[(0, 1), (3, 1.3)], [(0, 1), (1, 1.2)]]
    assert lines_of(dear) == [[(0, 1), (1, 3.5)]]
    assert cheap.get_ylim()[1] < 1.5 < 3.5 < dear.get_ylim()[1]
    assert legend_of(figures[0]) == ["a", "c", "b"]
    assert "up to 2048 tokens" in picture.caption
    assert "at the right" in picture.caption
    cost_by_width({"a": {0: 1.0, 3: 1.3}}, 512)
    assert len(figures[1].axes) == 1


def test_repetition(figures):
    """Guards against exchanged axes; three points on a falling line are correlated at -1."""
    picture = figures_drafts.repetition(VIEW, {"a": [(0.1, 0.6), (0.2, 0.4), (0.3, 0.2)]})
    assert lines_of(figures[0].axes[0]) == [[(0.1, 0.6), (0.2, 0.4), (0.3, 0.2)]]
    assert "`a` on the contrary (-1.00 over 3 answers)" in picture.caption


ESTIMATE = Estimate(
    "method", "T=0", "sampled", 100, 90, RATIO, {},
    [EntropyBin(0.5, HIGH, 50), EntropyBin(1.5, LOW, 40), EntropyBin(2.5, LOW, 19)],
    [Lenience(1.0, LOW, Ratio(0.0, 0.0, 0.0)), Lenience(0.1, HIGH, Ratio(0.2, 0.1, 0.3))],
)  # fmt: skip


def test_alphas(figures):
    """Settings lie beside each other in a way's row."""
    other = ESTIMATE._replace(setting="T=1", alpha=LOW)
    figures_estimate.alphas([ESTIMATE._replace(alpha=HIGH), other])
    (axes,) = figures[0].axes
    assert lines_of(axes) == [close([(0.9, -0.15)]), close([(0.4, 0.15)])]
    assert bars_of(axes)[1] == close([(0.3, 0.15), (0.6, 0.15)])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["method"]
    assert legend_of(figures[0]) == ["T=0", "T=1"]


def test_alpha_by_entropy(figures):
    """Bins of fewer than 20 tokens are left out, the others have intervals."""
    figures_estimate.by_entropy([ESTIMATE], VIEW)
    (axes,) = figures[0].axes
    assert lines_of(axes) == [close([(0.5, 0.9), (1.5, 0.4)])]
    assert bars_of(axes)[1] == close([(1.5, 0.3), (1.5, 0.6)])


def test_lenience(figures):
    """More lenient to the right; drafts kept and distance are not mixed up."""
    figures_estimate.by_lenience([ESTIMATE], VIEW)
    kept, apart = figures[0].axes
    assert lines_of(kept) == [[(1.0, 0.4), (0.1, 0.9)]]
    assert lines_of(apart) == [[(1.0, 0.0), (0.1, 0.2)]]
    assert kept.get_xlim()[0] > kept.get_xlim()[1]


def test_curves(figures):
    """Guards against a gap that becomes a 0, and a panel without its labels."""
    panel = curves.Curves([0, 1], {"a": [1, None], "b": [2, 3]}, "x", "y")
    curves.draw("c", [panel], caption="c")
    (axes,) = figures[0].axes
    first, second = lines_of(axes)
    assert first[0] == (0, 1)
    assert first[1][1] != first[1][1]
    assert second == [(0, 2), (1, 3)]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("x", "y")
    assert legend_of(figures[0]) == ["a", "b"]


def test_the_same_data_gives_the_same_files():
    """Guards against figures that differ in git each time they are drawn; SVG and PNG are whole."""
    first, second = (figures_drafts.by_place(VIEW, {"a": ROUNDS}) for _ in range(2))
    assert (first.svg, first.png) == (second.svg, second.png)
    root = xml.etree.ElementTree.fromstring(first.svg)
    assert root.tag.endswith("svg")
    assert "viewBox" in root.attrib
    assert "place among the drafts of a round" in first.svg
    assert first.png.startswith(b"\x89PNG")


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
    only = [one for one in cells() if one["key"]["method"] in ("plain", "random:3")]
    for line in only:
        line["record"]["answers"][0]["category"] = None
    (scene,) = make_scenes(config(), parse_cells(only))
    names = [picture.name for picture in scene_pictures(summarise(scene), View("", "T=0"))]
    assert names == ["acceptance-by-position", "kept-a-round"]  # one number makes no line


def test_curves_are_told_apart_by_unit_and_kind():
    """Guards against operations and speed on one axis."""
    record = {
        "columns": ["alpha", "speed, 1 draft", "speed, 3 drafts", "operations, 1 draft", "note"],
        "units": ["", "times", "times", "times", ""],
        "rows": [[0.0, 1.0, 1.0, 2.0, "x"], [1.0, 2.0, None, 1.0, "y"]],
    }
    speed, operations = curves.of_table(record)
    assert speed.lines == {"1 draft": [1.0, 2.0], "3 drafts": [1.0, None]}
    assert speed.y_label == "speed (times)"
    assert list(operations.lines) == ["1 draft"]
