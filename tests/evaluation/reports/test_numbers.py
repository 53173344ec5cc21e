"""The numbers of a report, checked by hand against `workdirs`."""

import numpy as np
import pytest

from jspec.evaluation.reports import prediction
from jspec.evaluation.reports.document import Table
from jspec.evaluation.reports.families import families, widest
from jspec.evaluation.reports.growth_chapters import length_growth
from jspec.evaluation.reports.iid import fit
from jspec.evaluation.reports.measured import of_category, parse_cells
from jspec.evaluation.reports.methods import acceptance_by_place, method_numbers, observed_alpha
from jspec.evaluation.reports.prediction_table import prompt_runs, theory_chapter
from jspec.evaluation.reports.scene import by_length, make_scenes, summarise
from jspec.evaluation.reports.speeds import calls, compare, decoding, speed, whole
from jspec.evaluation.reports.view import View
from jspec.generation.costs import RoundCosts
from jspec.generation.stats import RoundCounts, acceptance_by_position, conditional_acceptance
from tests.evaluation.reports.workdirs import WAYS, cell, cells, config


def pick(method, **options):
    """Returns a way's cells."""
    return [one for one in parse_cells(cells(**options)) if one.method == method]


def test_speeds_are_ratios_of_what_both_methods_did():
    """Guards against a speed-up that a slow repeat on one side alone would change."""
    ours, plain = pick("lookup:3"), pick("plain")
    compared = compare(ours, plain, decoding)
    # 60 tokens in 3 · (1.2 + 0.36) s against 60 in 6 s
    assert compared.ratio.median == pytest.approx(6 / 4.68)
    assert compared.ratio.low <= compared.ratio.median <= compared.ratio.high
    assert (compared.num_prompts, compared.num_repeats) == (6, 3)
    # whole answers: 0.5 s to read the prompt on both sides
    assert compare(ours, plain, whole).ratio.median == pytest.approx(9 / 7.68)
    # a round takes 1.2 times as long
    assert compare(ours, plain, calls).ratio.median == pytest.approx(1 / 1.2)
    assert speed(plain, decoding) == pytest.approx(10)


def test_a_repeat_that_has_only_begun_is_left_out():
    """Guards against ratios over different prompts while a run is going on."""
    ours, plain = pick("lookup:3"), pick("plain")
    begun = [one for one in ours if one.repeat < 2 or one.prompts == (0,)]
    compared = compare(begun, plain, decoding)
    assert (compared.num_prompts, compared.num_repeats) == (6, 2)
    assert compared.ratio.median == pytest.approx(6 / 4.68)
    assert compare([], plain, decoding) is None
    assert compare([one for one in ours if one.repeat == 9], plain, decoding) is None


def test_a_prompt_with_a_missing_seed_is_left_out():
    """Guards against a ratio of two seeds' tokens over one seed's time."""
    lines = [cell(method, [prompt], seed=seed) for method in ("plain", "lookup:3")
             for prompt in (0, 3) for seed in (0, 1)]  # fmt: skip
    parsed = parse_cells(lines)
    plain = [one for one in parsed if one.method == "plain"]
    ours = [
        one for one in parsed if one.method == "lookup:3" and (one.prompts, one.seed) != ((0,), 1)
    ]
    compared = compare(ours, plain, decoding)
    assert compared.num_prompts == 1
    assert compared.ratio.median == pytest.approx(1 / 0.36)


def test_answers_of_one_token_do_not_divide_by_zero():
    """An answer that ends at its first token has no round, and no time of decoding."""
    empty = parse_cells([cell(method, [0], rounds=[]) for method in ("plain", "lookup:3")])
    full = parse_cells([cell(method, [3]) for method in ("plain", "lookup:3")])
    assert compare(empty[1:], empty[:1], decoding) is None
    compared = compare([empty[1], full[1]], [empty[0], full[0]], decoding)
    assert compared.num_prompts == 1
    numbers = method_numbers("lookup:3", empty[1:], empty[:1])
    assert numbers.tokens_per_call is None
    assert numbers.acceptance is None
    assert numbers.speedup is None


def test_the_numbers_of_a_method():
    """Guards against rates that count repeats, or cut rounds, twice."""
    numbers = method_numbers("lookup:3", pick("lookup:3"), pick("plain"))
    assert numbers.num_tokens == 66
    assert numbers.acceptance.median == pytest.approx(21 / 117)
    assert numbers.tokens_per_call == pytest.approx(60 / 39)
    assert numbers.proposed_per_round == 3
    assert numbers.kept_per_round == pytest.approx(21 / 39)
    assert numbers.cost == pytest.approx(1.2)
    assert numbers.seconds_per_round == pytest.approx(0.12)
    assert numbers.same_answers == (6, 6)
    # what a round gives over what it costs is the speed-up
    assert numbers.tokens_per_call / numbers.cost == pytest.approx(numbers.speedup.median)


def test_batches_count_all_of_their_time():
    """In a batch decoding times of answers overlap: only the cell's seconds are time."""
    lines = [cell(method, [3, 4], batch_size=2) for method in ("plain", "lookup:3")]
    plain, ours = parse_cells(lines)
    numbers = method_numbers("lookup:3", [ours], [plain])
    assert numbers.speedup.median == pytest.approx((1 + 1.0) / (0.36 + 1.0))
    assert numbers.cost is None
    assert numbers.seconds_per_round is None


def test_scenes_follow_the_config_and_need_the_base():
    """Guards against a table whose base is whatever came first in the results."""
    lines = [*cells(repeats=1), *cells(repeats=1, setting="T=1")]
    settings = {"T=1": {"temperature": 1.0}, "T=0": {}}
    scenes = make_scenes(config(settings=settings), parse_cells(reversed(lines)))
    assert [scene.setting for scene in scenes] == ["T=1", "T=0"]
    assert list(scenes[0].cells) == list(WAYS)
    assert scenes[0].base == "plain"
    without = [line for line in lines if line["key"]["method"] != "plain"]
    assert make_scenes(config(settings=settings), parse_cells(without)) == []
    summary = summarise(scenes[0])
    assert [own.method for own in summary.overall] == list(WAYS)
    by_method = {own.method: own for own in summary.by_category["code"]}
    assert by_method["lookup:3"].speedup.median == pytest.approx(1 / 0.36)


def test_settings_that_differ_in_length_alone_are_one_group():
    """Guards against a verdict for each length of an answer."""
    settings = {f"{n}": {"max_new_tokens": n} for n in (8, 32)} | {"T=1": {"temperature": 1.0}}
    lines = [one for name in settings for one in cells(repeats=1, setting=name)]
    scenes = make_scenes(config(settings=settings), parse_cells(lines))
    groups = by_length(scenes, 11)
    assert [list(group) for group in groups] == [[8, 32], [11]]


def test_families_are_methods_that_differ_in_the_number_alone():
    """Guards against lines that join points of different drafters."""
    methods = WAYS | {
        "lookup:auto": {"drafter": "prompt_lookup", "num_draft_tokens": "auto"},
        "a-5": {"drafter": "model", "num_draft_tokens": 5},
        "b-2": {"drafter": "model", "num_draft_tokens": 2},
    }
    assert families(methods) == {
        "lookup": {"lookup:1": 1, "lookup:3": 3},
        "random": {"random:3": 3},
        "a-5": {"b-2": 2, "a-5": 5},
    }
    assert widest(methods)["lookup"] == "lookup:3"


def test_the_iid_model_recovers_its_own_numbers():
    """N = 20,000 rounds a number: alpha within 0.01 is 4 standard deviations."""
    rng, alpha = np.random.default_rng(0), 0.6
    rounds = {
        number: [RoundCounts(number, int(kept))
                 for kept in np.minimum(rng.geometric(1 - alpha, 20_000) - 1, number)]
        for number in (1, 3, 5)
    }  # fmt: skip
    model = fit(rounds, {1: 1.05, 3: 1.15, 5: 1.25})
    assert model.fitted_alpha == pytest.approx(alpha, abs=0.01)
    assert model.cost_ratio == pytest.approx(0.05)
    assert model.speedup(3) == pytest.approx(
        (1 - model.fitted_alpha**4) / (1 - model.fitted_alpha) / 1.15
    )
    assert fit({1: []}, {1: 1.0}) is None
    assert fit({1: rounds[1]}, {1: None}) is None


def predictions(seconds):
    """Returns the tables of expected speed-ups; a round of up to three drafts takes `seconds`."""
    lines = [one for one in cells() if one["key"]["prompts"][0] in (0, 1, 2)]
    lines += [cell(method, [3], rounds=[[0, 0, ""]] * 10) for method in ("plain", "lookup:3")]
    (scene,) = make_scenes(config(), parse_cells(lines))
    assert len(prompt_runs(scene.cells["lookup:3"], scene.cells["plain"])) == 4
    costs = RoundCosts((512,), (0, 3), ("prompt_lookup",), (((0.1, seconds),),))
    blocks = theory_chapter([(scene, View("", "T=0"))], {"lookup:3": costs})
    return [block for block in blocks if isinstance(block, Table)]


def test_expected_and_measured_speedups_are_those_of_the_other_half():
    """Prompts of one kind, three of four: what is kept and what it costs is known exactly."""
    (table,) = predictions(0.12)
    (row,) = table.rows
    columns = dict(zip(table.columns, row, strict=True))
    assert row[0] == "`lookup:3`"
    assert columns["alpha"] == "0.00 / 0.00"
    assert columns["c"] == "0.067"
    # 10 rounds without drafts took 0.12 s here too, which the costs do not know: beside 30 others
    # a round is expected to cost 1.15.
    assert columns["measured"] == "0.83 / 0.83"
    assert columns["i.i.d."] == "0.83 / 0.83"
    assert columns["by position"] == "0.83 / 0.87"


def test_a_gap_is_explained_by_what_it_is_made_of():
    """Costs that are a quarter too high: expected too slow by 20 %, and it is the cost."""
    _, gaps = predictions(0.15)
    row = next(row for row in gaps.rows if row[1] == "by position")
    assert row[2:] == ("-20", "1.00", "1.00", "1.50", "1.20", "cost")
    assert all(row[-1] == "cost" for row in gaps.rows)


def test_a_category_is_compared_on_its_own_prompts():
    """Guards against a base of all prompts under a category's numbers."""
    ours, plain = (of_category(pick(method), "qa") for method in ("lookup:3", "plain"))
    assert compare(ours, plain, decoding).ratio.median == pytest.approx(1 / 1.2)


def test_rates_have_intervals_over_prompts_and_agree_with_the_counts():
    """The same figures as `jspec.generation.stats` and `prediction` give, beside what prompts
    differ in.
    """
    rng = np.random.default_rng(1)
    prompts = [
        [RoundCounts(int(n), int(rng.integers(n + 1))) for n in rng.integers(0, 5, size=30)]
        for _ in range(6)
    ]
    together = [a_round for own in prompts for a_round in own]
    for is_conditional, rate_of in (
        (False, acceptance_by_position),
        (True, conditional_acceptance),
    ):
        rates = acceptance_by_place(prompts, is_conditional=is_conditional)
        assert [rate.median for rate in rates] == pytest.approx(rate_of(together))
        assert all(rate.low < rate.median < rate.high for rate in rates)
    alpha = observed_alpha(prompts)
    assert alpha.median == pytest.approx(prediction.observed_alpha(together))
    assert alpha.low < alpha.median < alpha.high
    assert observed_alpha([[RoundCounts(0, 0)]]) is None
    assert acceptance_by_place([[]], is_conditional=True) == []


def test_one_timing_pays_nowhere():
    """Guards against "clearly pays" by an interval that has no width."""
    once = parse_cells([cell(method, [3]) for method in ("plain", "lookup:3")])
    twice = parse_cells(
        [cell(method, [3], repeat=n) for n in (0, 1) for method in ("plain", "lookup:3")]
    )
    methods, found = config()["methods"], []
    for parsed in (once, twice):
        (scene,) = make_scenes(config(methods=methods), parsed)
        answer, (own, _) = length_growth({8: scene, 16: scene}, ["lookup:3"], View("", "T=0"))
        found.append((answer.rpartition("`")[2], own.rows[0][1]))
    assert found == [(" never clearly pays.", "1.74"),
                     (" clearly pays at all of them.", "1.74")]  # fmt: skip
