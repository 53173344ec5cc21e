"""Figures: what they draw is what they were given, and it reads in black and white."""

import itertools
import sys
import xml.etree.ElementTree

import pytest

from jspec.common.errors import InputError
from jspec.common.figures import Curves, draw, looks, new_figure
from tests.lab.conftest import figures as figures_fixture
from tests.lab.drawn import bars_of, legend_of, lines_of

figures = figures_fixture


def test_lines_have_their_values_bars_and_names(figures):
    """Guards against a gap that becomes a 0, a bar at another point, and a line without a name."""
    panel = Curves([0, 1, 2], {"a": [(1, 0.5, 1.25), None, 2], "_$b$": [2, 3, None]}, "x", "y")
    draw("c", [panel], caption="c")
    (axes,) = figures[0].axes
    first, second = lines_of(axes)
    # with bars, lines are moved sideways by 0.06, so that none hides another
    assert first == [pytest.approx((-0.03, 1)), pytest.approx((1.97, 2))]
    assert second == [pytest.approx((0.03, 2)), pytest.approx((1.03, 3))]
    assert bars_of(axes)[0] == [pytest.approx((-0.03, 0.5)), pytest.approx((-0.03, 1.25))]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("x", "y")
    assert legend_of(figures[0]) == ["a", r" _\$b\$"]
    plain = Curves([0.5, 1.5], {"a": [1, 2]}, "x", "y")
    draw("c", [plain], caption="c")
    assert lines_of(figures[1].axes[0]) == [[(0.5, 1), (1.5, 2)]]
    assert bars_of(figures[1].axes[0]) == []


def test_a_value_outside_its_interval_has_no_bar_on_that_side(figures):
    """A median over repeats may lie outside: matplotlib refuses lengths below 0."""
    draw("c", [Curves([0.5], {"a": [(2.0, 2.5, 3.0)]}, "x", "y")], caption="c")
    assert bars_of(figures[0].axes[0]) == [[(0.5, 2), (0.5, 3)]]


def test_title_and_origin_are_in_the_picture(figures):
    """Guards against a picture that nobody can place once it is copied out of its report."""
    panel = Curves([1, 2], {"a": [1, 2]}, "x", "y")
    picture = draw("c", [panel], caption="c", title="Speed of $x$", subtitle="model · cpu " * 20)
    first, *rest = figures[0].get_suptitle().splitlines()
    assert first == r"Speed of \$x\$"
    assert len(rest) > 1
    assert " ".join(rest) == ("model · cpu " * 20).strip()
    assert picture.description == "Speed of $x$: a"


def test_every_drawn_line_is_in_the_legend_once(figures):
    """The reference line too; a label of two panels is one line, with one look."""
    panels = [Curves([1, 2], {"a": [1, 2], "b": [2, 1]}, "x", "y", reference="plain"),
              Curves([1, 2], {"b": [3, 4], "c": [1, 1]}, "x", "z", reference="plain")]  # fmt: skip
    draw("c", panels, caption="c")
    assert sorted(legend_of(figures[0])) == ["a", "b", "c", "plain"]
    colours = {line.get_color() for axes in figures[0].axes for line in axes.get_lines()
               if line.get_marker() in "os^"}  # fmt: skip
    assert len(colours) == 3


def test_names_stand_side_by_side(figures):
    """Points at names are not joined, and each label has a place of its own within a name."""
    draw("c", [Curves(["qa", "co$de"], {"a": [1, 2], "b": [3, None]}, "", "y")], caption="c")
    (axes,) = figures[0].axes
    assert lines_of(axes) == [[(-0.2, 1), (0.8, 2)], [(0.2, 3)]]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["qa", r"co\$de"]
    assert {line.get_linestyle() for line in axes.get_lines()} == {"None"}


def test_panels_share_their_axis_if_asked(figures):
    """Guards against a panel whose costs look as small as its neighbour's."""
    panels = [Curves([0, 1], {"a": [1, 2]}, "x", "y"), Curves([0, 1], {"a": [1, 9]}, "x", "y")]
    draw("c", panels, caption="c", share_y=True)
    left, right = figures[0].axes
    assert left.get_ylim() == right.get_ylim()
    assert left.get_ylim()[1] > 9
    assert (left.get_ylabel(), right.get_ylabel()) == ("y", "")
    from_zero = [panel._replace(begins_at_zero=True) for panel in panels]
    draw("c", from_zero, caption="c", share_y=True)  # guards against a later panel that is cut off
    bottom, top = figures[1].axes[0].get_ylim()
    assert (bottom, top) == (0, pytest.approx(left.get_ylim()[1], rel=0.1))


def test_axes_begin_at_zero_and_are_logarithmic_where_asked(figures):
    """Ticks are at whole numbers where all positions are; on a logarithmic axis at these."""
    draw(
        "c", [Curves([8, 64], {"a": [5, 6]}, "x", "y", begins_at_zero=True, log_x=True)], caption=""
    )
    (axes,) = figures[0].axes
    assert axes.get_ylim()[0] == 0
    assert axes.get_xscale() == "log"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["8", "64"]
    draw("c", [Curves([1, 2], {"a": [5, 6]}, "x", "y")], caption="")
    assert all(tick == int(tick) for tick in figures[1].axes[0].get_xticks())


def test_a_line_that_would_press_all_others_flat_is_cut_off(figures):
    """Here at 1.1 times the highest of the others; two lines of one size are not."""
    draw("c", [Curves([0, 1], {"a": [1, 100], "b": [1, 10]}, "x", "y")], caption="")
    assert figures[0].axes[0].get_ylim() == (0, 11)
    draw("c", [Curves([0, 1], {"a": [1, 12], "b": [1, 10]}, "x", "y")], caption="")
    assert figures[1].axes[0].get_ylim()[1] > 12
    panels = [Curves([0, 1], {"a": [1, top], "b": [1, 10]}, "x", "y") for top in (12, 100)]
    draw("c", panels, caption="", share_y=True)
    assert figures[2].axes[0].get_ylim() == (0, 11)


def test_the_same_data_gives_the_same_files():
    """Guards against figures that differ in git each time they are drawn; SVG and PNG are whole."""
    panel = Curves([1, 2], {"a": [(1, 0.5, 2), 2]}, "an axis", "y", reference="plain decoding")
    first, second = (draw("c", [panel], caption="c", title="t") for _ in range(2))
    assert (first.svg, first.png) == (second.svg, second.png)
    root = xml.etree.ElementTree.fromstring(first.svg)
    assert root.tag.endswith("svg")
    assert "viewBox" in root.attrib
    assert "an axis" in first.svg
    assert first.png.startswith(b"\x89PNG")
    assert len(first.png) < 20_000


def test_lines_differ_in_more_than_colour():
    """Guards against a figure that cannot be read in black and white, and white on white."""
    first = list(itertools.islice(looks(), 24))
    assert len({(look["marker"], str(look["linestyle"])) for look in first}) == 24
    assert len({look["marker"] for look in first[:8]}) == 8
    assert not {look["color"] for look in first} & {"white", "#ffffff", "#fff"}


def test_without_matplotlib_there_is_a_hint(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match="pictures need matplotlib"):
        new_figure(title="", subtitle="")
