"""The figures of a setting: which there are, and what they show."""

import copy

import pytest

from jspec.generation.costs import RoundCosts
from jspec.lab.reports.computed import curves_of
from jspec.lab.reports.costs import cost_blocks
from jspec.lab.reports.generate import scene_figures
from jspec.lab.reports.scene import make_scenes, parse_cells
from jspec.lab.reports.workdir import View
from tests.lab.drawn import bars_of, legend_of, lines_of
from tests.lab.reports.workdirs import WAYS, cells, config

VIEW = View("A title", "toy float32", "A Processor, 2 cores", "2026-11-22", 0.0, "-2")


def scene_of(lines, **changes):
    (scene,) = make_scenes(config(**changes), parse_cells(lines))
    return scene


def many_prompts():
    """Returns cells of five prompts a category."""
    lines = [copy.deepcopy(one) for one in cells(repeats=1) if one["key"]["prompts"][0] in (0, 3)]
    more = []
    for index in range(5):
        for line in copy.deepcopy(lines):
            line["key"]["prompts"][0] += 10 * index
            line["cell"] += f"/{index}"
            more.append(line)
    return more


def test_a_scene_draws_what_it_has_data_for(figures):
    """Guards against empty figures, and a picture that nobody can place outside of its report."""
    (picture,) = scene_figures(scene_of(cells()), VIEW)
    assert picture.name == "by-number-2"  # three prompts a category, 9 rounds with a second draft
    one_draft = [figure for figure in cells() if figure["key"]["method"] in ("plain", "lookup:1")]
    assert scene_figures(scene_of(one_draft), VIEW) == []
    title, subtitle = figures[0].get_suptitle().replace("\xa0", " ").split("\n", 1)
    assert title == "Speed-up and cost of a round in these answers"
    assert subtitle.replace("\n", " ") == (
        "A title · toy float32 · temperature 0 · A Processor, 2 cores · 2026-11-22"
    )


def test_speed_and_cost_by_number(figures):
    """By hand: 60 tokens in 15 rounds of 0.105 s a prompt pair; all with their intervals."""
    scene = scene_of(cells())
    (picture,) = scene_figures(scene, VIEW)
    speed, cost = figures[0].axes
    (lookup, random) = lines_of(speed)
    expected = [scene.numbers[label].speedup for label in ("lookup:1", "lookup:3")]
    assert lookup == [pytest.approx((1 - 0.03, expected[0].median)),
                      pytest.approx((3 - 0.03, expected[1].median))]  # fmt: skip
    assert expected[1].median == pytest.approx(6 / 4.68)
    assert random == [pytest.approx((3.03, 1 / 1.5))]
    assert bars_of(speed)[1] == [pytest.approx((2.97, expected[1].low)),
                                 pytest.approx((2.97, expected[1].high))]  # fmt: skip
    assert lines_of(cost)[0] == [pytest.approx((0.97, 1.05)), pytest.approx((2.97, 1.2))]
    assert sorted(legend_of(figures[0])) == ["lookup", "plain decoding", "random"]
    assert (speed.get_ylabel(), cost.get_ylabel()) == (
        "speed-up", "cost of a round (plain steps)",
    )  # fmt: skip
    assert picture.caption == "Bars: 95 % bootstrap interval over prompts and repeats."


def test_another_baseline_is_named(figures):
    """Guards against a line that is called plain decoding and is none."""
    methods = {"random:3": WAYS["random:3"]} | WAYS
    scene_figures(scene_of(cells(), methods=methods), VIEW)
    assert "random:3" in legend_of(figures[0])
    assert "plain decoding" not in legend_of(figures[0])


def test_many_prompts_have_figures_by_category_and_position(figures):
    """By hand: of 13 rounds of lookup:3 for a prompt of each kind 3 accept a first draft, 2 more.

    All prompts of a category are alike here. The three panels of positions have equal axes, and
    each drafter is shown with its widest number.
    """
    pictures = scene_figures(scene_of(many_prompts()), VIEW)
    names = [picture.name for picture in pictures]
    assert names == ["by-number-2", "by-category-2", "drafts-accepted-2"]
    (axes,) = figures[1].axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["qa", "code"]
    lookup, random = lines_of(axes)
    assert lookup == [pytest.approx((-0.2, 1 / 1.2)), pytest.approx((0.8, 1 / 0.36))]
    assert random == [pytest.approx((0.2, 1 / 1.5)), pytest.approx((1.2, 1 / 1.5))]
    assert sorted(legend_of(figures[1])) == ["lookup:3", "plain decoding", "random:3"]
    of_all, examined, rounds = figures[-1].axes
    lookup = lines_of(of_all)[0]
    assert lookup == [pytest.approx((place - 0.03, kept / 13))
                      for place, kept in ((1, 3), (2, 2), (3, 2))]  # fmt: skip
    assert [y for _, y in lines_of(examined)[0]] == pytest.approx([3 / 13, 2 / 3, 1])
    assert [y for _, y in lines_of(rounds)[0]] == pytest.approx([10 / 13, 1 / 13, 0, 2 / 13])
    assert len({axes.get_ylim() for axes in (of_all, examined, rounds)}) == 1
    assert pictures[-1].caption.startswith("Bars: 95 % bootstrap interval over prompts. Positions")
    assert "fewer than 10 rounds" in pictures[-1].caption
    assert legend_of(figures[-1]) == ["lookup", "random"]


def test_costs_have_equal_axes(figures):
    """Guards against a context whose rounds look cheaper than they are."""
    costs = {"lookup:3": RoundCosts((512, 2048), (0, 3), ("x",), (((0.1, 0.15),), ((0.1, 0.4),)))}
    _, table, picture = cost_blocks(config()["methods"], costs, VIEW)
    short, long = figures[0].axes
    assert short.get_ylim() == long.get_ylim()
    assert lines_of(short) == [[(0, 1), (3, pytest.approx(1.5))]]
    assert lines_of(long) == [[(0, 1), (3, pytest.approx(4))]]
    assert [axes.get_title() for axes in (short, long)] == ["up to 512 tokens", "up to 2048 tokens"]
    assert "no spread is recorded" in picture.caption
    assert [row["drafts: 3"] for row in table.rows] == ["1.50", "4.00"]


def test_curves_are_told_apart_by_unit_and_kind():
    """Guards against operations and speed on one axis."""
    record = {
        "columns": ["alpha", "speed, 1 draft", "speed, 3 drafts", "operations, 1 draft", "note"],
        "units": ["", "times", "times", "times", ""],
        "rows": [[0.0, 1.0, 1.0, 2.0, "x"], [1.0, 2.0, None, 1.0, "y"]],
    }
    speed, operations = curves_of(record)
    assert speed.lines == {"1 draft": [1.0, 2.0], "3 drafts": [1.0, None]}
    assert speed.y_label == "speed (times)"
    assert list(operations.lines) == ["1 draft"]
    assert speed.x == [0.0, 1.0]
