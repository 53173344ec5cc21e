"""The numbers of a report, by hand of `workdirs`; test_report.py has the usual ones."""

import pytest

from jspec.lab.reports.scene import (
    Timed,
    by_length,
    compare,
    decoding,
    families,
    make_scenes,
    parse_cells,
)
from tests.lab.reports.workdirs import WAYS, cell, cells, config


def pick(method, **options):
    """Returns a method's cells."""
    return [cell for cell in parse_cells(cells(**options)) if cell.method == method]


def test_a_repeat_that_has_only_begun_is_left_out():
    """Guards against ratios over different prompts while a run is going on."""
    ours, plain = pick("lookup:3"), pick("plain")
    begun = [cell for cell in ours if cell.repeat < 2 or cell.prompts == (0,)]
    ratio, num_prompts, num_repeats = Timed(begun, plain).compared
    assert (num_prompts, num_repeats) == (6, 2)
    assert ratio.median == pytest.approx(6 / 4.68)
    assert compare([], plain, decoding) is None
    assert compare([cell for cell in ours if cell.repeat == 9], plain, decoding) is None


def test_a_prompt_with_a_missing_seed_is_left_out():
    """Guards against a ratio of two seeds' tokens over one seed's time."""
    lines = [cell(method, [prompt], seed=seed) for method in ("plain", "lookup:3")
             for prompt in (0, 3) for seed in (0, 1)]  # fmt: skip
    parsed = parse_cells(lines)
    plain = [c for c in parsed if c.method == "plain"]
    ours = [c for c in parsed if c.method == "lookup:3" and (c.prompts, c.seed) != ((0,), 1)]
    ratio, num_prompts, _ = Timed(ours, plain).compared
    assert num_prompts == 1
    assert ratio.median == pytest.approx(1 / 0.36)


def test_answers_of_one_token_do_not_divide_by_zero():
    """An answer that ends at its first token has no round, and no time of decoding."""
    plain, ours = parse_cells([cell(method, [0], rounds=[]) for method in ("plain", "lookup:3")])
    empty = Timed([ours], [plain])
    assert empty.speedup is None
    assert empty.cost is None
    assert empty.tokens_per_second is None
    assert empty.milliseconds is None
    assert empty.tokens_per_call is None
    assert empty.proposed_per_round is None
    assert empty.acceptance is None
    assert Timed([], [plain]).speedup is None
    full = parse_cells([cell(method, [3]) for method in ("plain", "lookup:3")])
    assert Timed([ours, full[1]], [plain, full[0]]).speedup.median == pytest.approx(1 / 0.36)


def test_other_answers_are_counted_as_such():
    """Guards against "6 of 6" of answers that nobody compared."""
    lines = cells(repeats=1)
    for line in lines:
        if line["key"]["method"] == "lookup:3" and line["key"]["prompts"] == [0]:
            line["record"]["answers"][0]["token_ids"][-1] = 99
    parsed = parse_cells(lines)
    ours, plain = ([cell for cell in parsed if cell.method == m] for m in ("lookup:3", "plain"))
    assert Timed(ours, plain).same_answers == (5, 6)
    assert Timed(ours[:2], plain).same_answers == (1, 2)


def test_scenes_follow_the_config_and_need_the_baseline():
    """Guards against a table whose baseline is whatever came first in the results."""
    lines = [*cells(repeats=1), *cells(repeats=1, setting="T=1")]
    settings = {"T=1": {"temperature": 1.0}, "T=0": {}}
    scenes = make_scenes(config(settings=settings), parse_cells(reversed(lines)))
    assert [(scene.setting, scene.temperature) for scene in scenes] == [("T=1", 1.0), ("T=0", 0.0)]
    assert list(scenes[0].cells) == list(WAYS)
    assert scenes[0].baseline == "plain"
    assert scenes[0].baseline_name == "plain decoding"
    without = [line for line in lines if line["key"]["method"] != "plain"]
    assert make_scenes(config(settings=settings), parse_cells(without)) == []
    assert list(scenes[0].numbers) == list(WAYS)


def test_a_category_is_compared_on_its_own_prompts():
    """Guards against a baseline of all prompts under a category's numbers."""
    (scene,) = make_scenes(config(), parse_cells(cells()))
    assert list(scene.by_category) == ["qa", "code"]
    assert scene.shown == ["lookup:3", "random:3"]  # the fastest number of each drafter
    assert scene.by_category["code"]["lookup:3"].speedup.median == pytest.approx(1 / 0.36)
    assert scene.by_category["qa"]["lookup:3"].speedup.median == pytest.approx(1 / 1.2)
    assert scene.by_category["qa"]["lookup:3"].compared[1] == 3
    only = [line for line in cells() if line["key"]["prompts"][0] < 3]
    (scene,) = make_scenes(config(), parse_cells(only))
    assert scene.by_category == {}
    mixed = parse_cells([cell("plain", [2, 3], batch_size=2)])
    assert make_scenes(config(), mixed)[0].by_category == {}


def test_settings_that_differ_in_length_alone_are_one_group():
    """Guards against a chapter for each length of an answer."""
    settings = {f"{n}": {"max_new_tokens": n} for n in (8, 32)} | {"T=1": {"temperature": 1.0}}
    lines = [one for name in settings for one in cells(repeats=1, setting=name)]
    scenes = make_scenes(config(settings=settings), parse_cells(lines))
    assert [list(group) for group in by_length(scenes, 11)] == [[8, 32], [11]]


def test_families_are_methods_that_differ_in_the_number_alone():
    """Guards against lines that join points of different drafters."""
    methods = WAYS | {
        "lookup:auto": {"drafter": "prompt_lookup", "num_draft_tokens": "auto"},
        "a-5": {"drafter": "model", "num_draft_tokens": 5},
        "b-2": {"drafter": "model", "num_draft_tokens": 2},
        "lookup-4": {"drafter": "ngram", "num_draft_tokens": 4},
    }
    assert families(methods) == {
        "lookup": {"lookup:1": 1, "lookup:3": 3},
        "random": {"random:3": 3},
        "a": {"b-2": 2, "a-5": 5},
        "lookup-4": {"lookup-4": 4},  # its short name is taken
    }
    assert list(families(methods)["a"]) == ["b-2", "a-5"]
