"""Whole reports: what they say, for every kind of experiment."""

import copy
import json
import re
import subprocess
import sys
import time

import pytest

from jspec.common.errors import InputError
from jspec.evaluation.analysis.spec_bench import TASKS
from jspec.evaluation.experiments.cells import make_cells
from jspec.evaluation.experiments.spec import KINDS, Experiment
from jspec.evaluation.reports.document import Bullets, Paragraph, Picture, Table
from jspec.evaluation.reports.markdown import to_markdown
from jspec.evaluation.reports.report import make_report, write_report
from jspec.evaluation.reports.wording import COST
from jspec.evaluation.reports.workdir import read_workdir
from tests.evaluation.reports.test_document import check_page
from tests.evaluation.reports.workdirs import (
    CATEGORIES,
    RUN,
    WAYS,
    cell,
    cells,
    config,
    failed_cell,
    trace,
    write,
)


@pytest.fixture
def drawn():
    """For a test that wants its figures drawn."""


@pytest.fixture(autouse=True)
def undrawn(request):
    """Draws no figures otherwise."""
    if "drawn" not in request.fixturenames:
        request.getfixturevalue("quick_figures")


def report(tmp_path, lines, **options):
    """Returns the blocks of a report, and its Markdown."""
    blocks = make_report(read_workdir(write(tmp_path, lines, **options)))
    return blocks, to_markdown(blocks)


def table(blocks, beginning):
    """Returns the rows of the table whose caption begins so, by their first cells."""
    (found,) = [b for b in blocks if isinstance(b, Table) and b.caption.startswith(beginning)]
    return {row[0]: dict(zip(found.columns, row, strict=True)) for row in found.rows}


def test_the_verdict_names_the_best_method_and_why(tmp_path):
    """Half of the prompts gain 2.78 times, half lose: not clear over all, clear for one task."""
    blocks, text = report(tmp_path, cells())
    expected = "No way is clearly faster than plain decoding.** The best, `lookup:3`, was 1.28"
    assert expected in text
    rows = table(blocks, "What to use for which task")
    assert rows["code"]["use"] == "`lookup:3`"
    assert rows["code"]["speed-up"] == "2.78"
    assert rows["code"]["tokens per call"] == "3.33"
    assert rows["code"][COST] == "1.20"
    assert rows["code"]["also"] == "-"
    assert rows["qa"]["use"] == "`plain`"
    assert rows["qa"]["also"] == "best: `lookup:1` 0.95"
    assert "`lookup:3` is clearly slower than plain decoding for qa" in text
    assert "of its drafts 78 % are kept in code, 0 % in qa." in text
    slow = "Slower than plain decoding over all prompts (T=0):\n\n- `random:3`: 0.67 times as fast."
    assert f"{slow} A call of the target gives 1.00 tokens (0 % of the drafts are kept)" in text


def by_tasks(*, num_prompts=5, setting="T=0"):
    """Returns cells of so many prompts of "qa" and of "code", each timed three times."""
    lines = []
    for number in range(2 * num_prompts):
        for method in WAYS:
            for repeat in range(3):
                line = cell(method, [3 * (number % 2)], repeat=repeat, setting=setting)
                line["key"]["prompts"] = [number]
                line["cell"] += f"number {number}"
                lines.append(line)
    return lines


def answers_of(blocks):
    """Returns the first list of a report: the answer for each setting."""
    return next(block.items for block in blocks if isinstance(block, Bullets))


def test_the_answer_comes_first(tmp_path):
    """Guards against a report that has to be read to its end, and a task that is passed over."""
    blocks, text = report(tmp_path / "both", by_tasks())
    begin = "**T=0** (the most likely token is always taken): "
    assert answers_of(blocks) == (
        f"{begin}over all prompts no way is clearly faster than plain decoding. For some tasks "
        "drafting pays: `lookup:3` for code. For 1 of 2 tasks nothing clearly helps.",
    )
    first = text.index("How to make `toy` answer faster")
    assert first < text.index(begin) < text.index("How it works") < text.index("| way |")
    only = [one for one in by_tasks(num_prompts=10) if one["key"]["prompts"][0] % 2]
    for line in only:
        if line["key"]["prompts"][0] > 9:
            answer = line["record"]["answers"][0]
            answer["category"] = "more"
            answer["decode_seconds"] *= {"plain": 1, "lookup:1": 1}.get(line["key"]["method"], 4)
    answers = answers_of(report(tmp_path / "code", only)[0])
    faster = "use `lookup:1`, 1.90 times as fast as plain decoding over all prompts (whole answers,"
    assert faster in answers[0]
    assert "For some tasks take another: `lookup:3` for code." in answers[0]
    slow = [one for one in by_tasks() if not one["key"]["prompts"][0] % 2]
    answers = answers_of(report(tmp_path / "qa", slow)[0])
    assert "draft nothing: every way is slower than plain decoding" in answers[0]


def test_the_answer_says_no_more_than_there_is(tmp_path):
    """Guards against advice for a task by four prompts, or by one timing."""
    answers = answers_of(report(tmp_path / "tasks", by_tasks(num_prompts=4))[0])
    assert answers[0].endswith(
        "For single tasks there are too few prompts to say more than a hint."
    )
    answers = answers_of(report(tmp_path / "few", by_tasks(num_prompts=2))[0])
    assert answers[0].endswith("There are too few prompts to say more than a hint.")
    once = [one for one in cells(repeats=1) if one["key"]["prompts"] == [3]]
    answers = answers_of(report(tmp_path / "once", once)[0])
    assert answers[0].endswith("too little was timed to say.")


def test_the_headline_is_that_of_the_fastest_method(tmp_path):
    """Code alone: 2.78 times, because 3.33 tokens a call cost 1.2 plain steps."""
    lines = [one for one in cells() if one["key"]["prompts"][0] > 2]
    _, text = report(tmp_path, lines)
    assert "**Fastest overall: `lookup:3`, 2.78 times as fast as plain decoding**" in text
    # 0.5 + 1 s plainly, 0.5 + 0.36 s with drafts
    assert "(whole answers, reading the prompt included: 1.74)" in text
    assert "copies what followed the same few tokens where prompt or answer last had them" in text
    assert "a call of the target gives 3.33 tokens instead of 1" in text
    assert "1.20 times as long as a plain step (3.33 / 1.20 = 2.78)" in text


def test_it_says_where_nothing_pays(tmp_path):
    """Guards against a recommendation where every way is slower."""
    lines = [one for one in cells() if one["key"]["prompts"][0] <= 2]
    _, text = report(tmp_path, lines)
    assert "**Drafting does not pay here: every way is slower than plain decoding.**" in text
    assert "Fastest overall" not in text


def test_few_prompts_are_not_taken_for_certain(tmp_path):
    """One prompt has an interval of no width: that is not certainty."""
    lines = [one for one in cells() if one["key"]["prompts"][0] in (0, 3)]
    _, text = report(tmp_path, lines)
    assert "It rests on 2 prompts only: too few to be sure." in text
    assert "Intervals of fewer than 5 prompts are too narrow: take them as hints." in text


def test_the_best_method_over_all_is_kept_where_it_is_not_clearly_worse(tmp_path):
    """Guards against advice that follows chance: here lookup:1 seems 1 % better for code."""
    lines = [one for one in cells() if one["key"]["prompts"][0] > 2]
    for line in lines:
        if line["key"]["method"] == "lookup:1":
            repeat = line["key"]["repeat"]
            line["record"]["answers"][0]["decode_seconds"] = (0.525, 0.675, 0.45)[repeat]
        if line["key"]["method"] == "lookup:3":
            line["record"]["answers"][0]["decode_seconds"] *= 1.5
        line["record"]["answers"][0]["category"] = "code"
    other = [copy.deepcopy(line) for line in lines]
    for line in other:
        line["key"]["prompts"] = [line["key"]["prompts"][0] + 10]
        line["cell"] += "other"
        line["record"]["answers"][0]["category"] = "other"
        if line["key"]["method"] == "lookup:1":
            line["record"]["answers"][0]["decode_seconds"] *= 1.3
    blocks, _ = report(tmp_path, lines + other)
    row = table(blocks, "What to use")["code"]
    assert row["use"] == "`lookup:3`"
    assert row["also"] == "`lookup:1`"


def test_rounds_that_seem_cheaper_than_plain_steps_are_noise(tmp_path):
    """Guards against an explanation of what cannot be: the same rounds in half the time."""
    lines = cells()
    for line in lines:
        if line["key"]["method"].startswith("lookup"):
            for answer in line["record"]["answers"]:
                answer["decode_seconds"] /= 2
    _, text = report(tmp_path, lines)
    assert "a round of it took 0.60 times as long as a plain step" in text
    assert "these times are too noisy to go by" in text
    assert "Why: " not in text
    assert "Fastest overall" not in text


def test_one_timing_is_no_advice(tmp_path):
    """Guards against a winner by the noise of a single run: no interval says how much it varies."""
    lines = [one for one in cells(repeats=1) if one["key"]["prompts"][0] in (0, 3)]
    blocks, text = report(tmp_path / "once", lines)
    assert table(blocks, "Speed-up by category")["code"]["`lookup:3`"] == "2.78"
    for unsaid in (
        "What to use for which task",
        "Used for everything",
        "Nothing is clearly faster",
    ):
        assert unsaid not in text
    lines += [one for one in cells(repeats=1) if one["key"]["prompts"][0] == 1]
    row = table(report(tmp_path / "mixed", lines)[0], "What to use")["code"]
    assert row["use"] == "no advice"
    assert row["also"] == "best: `lookup:3` 2.78 (timed once)"


def test_how_much_chance_may_do_is_counted(tmp_path):
    """2.5 % of the intervals of 2 tasks and 3 ways are 0.15; of 3 tasks and 3 ways 0.2."""
    by_chance = "Were no way faster or slower than plain decoding, {} would be expected to"
    two = f"Of the 6 intervals of a way for a task 2 lie above 1. {by_chance.format('0.1')}"
    assert two in report(tmp_path / "two", cells())[1]
    lines = cells()
    for line in lines:
        if line["key"]["prompts"][0] in (2, 3):
            line["record"]["answers"][0]["category"] = "more"
    three = f"Of the 9 intervals of a way for a task 2 lie above 1. {by_chance.format('0.2')}"
    assert three in report(tmp_path / "three", lines)[1]
    only = [line for line in lines if line["key"]["prompts"][0] != 2 or not line["key"]["repeat"]]
    only = [line for line in only if line["key"]["prompts"][0] != 3]
    assert two in report(tmp_path / "once", only)[1]


def test_lossy_methods_are_not_recommended(tmp_path):
    """The fastest way is no use to whoever wants the target's own answers."""
    methods = copy.deepcopy(WAYS)
    methods["lookup:3"] |= {"acceptance": "lenient", "lenience": 0.1}
    blocks, text = report(tmp_path, cells(), config_fields=config(methods=methods))
    assert table(blocks, "What to use")["code"]["use"] == "`lookup:1`"
    assert "change what the target would say" in text
    assert "the answers stay its own, but for the methods that the table says change them" in text
    methods_rows = table(blocks, "The methods of generating")
    assert methods_rows["`lookup:3`"]["the target's answers"] == "changed (lenient 0.1)"


def test_tables_hold_the_numbers(tmp_path):
    """Guards against columns that change places."""
    blocks, _ = report(tmp_path, cells())
    row = table(blocks, "All prompts")["`lookup:3`"]
    assert row["speed-up"].startswith("1.28 [")
    assert row["tokens/s"] == "12.8"
    assert row["drafts kept"].startswith("18 % [")
    # of 3 · 10 + 3 · 8 drafts whose turn came 21 were kept
    assert row["alpha"].startswith("0.39 [")
    assert row["tokens per call"] == "1.54"
    assert row[COST] == "1.20"
    assert row["speed-up of whole answers"].startswith("1.17 [")
    assert row["same answers"] == "6 of 6"
    assert table(blocks, "Speed-up by category")["qa"]["`lookup:3`"] == "0.83"
    per_call = table(blocks, "Tokens per target call by category")
    assert per_call["code"]["`lookup:3`"] == "3.33 (78 %)"


def spec_bench_cells(*, categories, repeat=0):
    """Returns a cell a category and way; the first category's answers are those of "qa"."""
    lines = []
    for index, name in enumerate(categories):
        for method in WAYS:
            line = cell(method, [0 if index == 0 else 3], repeat=repeat)
            line["key"]["prompts"] = [index]
            line["cell"] = f"{method}/{index}/{repeat}"
            line["record"]["answers"][0]["category"] = name
            lines.append(line)
    return lines


def test_spec_benchs_columns(tmp_path):
    """Its definition: mean of the prompts' speeds over the mean of the base's, runs averaged."""
    names = [name for members in TASKS.values() for name in members]
    lines = [line for repeat in range(2) for line in
             spec_bench_cells(categories=names, repeat=repeat)]  # fmt: skip
    lines += spec_bench_cells(categories=names[:5], repeat=2)  # a repeat that has only begun
    fields = config(prompts_file="/some/where/question.jsonl")
    blocks, text = report(tmp_path, lines, config_fields=fields)
    row = table(blocks, "Spec-Bench's columns")["`lookup:3`"]
    # whole answers of 11 tokens: 0.5 + 1 s plainly, with drafts 0.5 + 1.2 s (10 rounds) and
    # 0.5 + 0.36 s (3 rounds); the begun repeat does not count for conversations
    assert row["translation"] == "1.74 / 3.33"
    conversation = (1 / 1.7 + 7 / 0.86) / (8 / 1.5)
    assert row["multi-turn conversation"] == f"{conversation:.2f} / {80 / 31:.2f}"
    overall = (1 / 1.7 + 12 / 0.86) / (13 / 1.5)
    assert row["overall"] == f"{overall:.2f} / {130 / 46:.2f}"
    assert "13 prompts from `question.jsonl`; Spec-Bench itself has 480" in text
    assert "mean over prompts of tokens / second" in text
    assert "/some/where" not in text


@pytest.mark.parametrize("change", [lambda names: names[:-1], lambda names: [*names, "poems"]])
def test_other_categories_are_not_spec_benchs(tmp_path, change):
    """Guards against its name over prompts that are not its."""
    names = change([name for members in TASKS.values() for name in members])
    _, text = report(tmp_path, spec_bench_cells(categories=names))
    assert "Spec-Bench" not in text


def test_answers_that_differ_are_explained(tmp_path):
    """Guards against "2 of 3" that looks like an error, or an error that is explained away."""
    texts = {
        dtype: report(tmp_path / dtype, cells(), config_fields=config(dtype=dtype))[1]
        for dtype in ("bfloat16", "float32")
    }
    assert "in bfloat16 a call over several tokens rounds a little differently" in texts["bfloat16"]
    assert "In float32 the others should all be the same" in texts["float32"]
    assert "rounds a little differently" not in texts["float32"]
    hot = config(settings={"T=1": {"temperature": 1.0}})
    blocks, text = report(tmp_path / "hot", cells(setting="T=1"), config_fields=hot)
    assert "at a temperature above 0 every way draws its own" in text
    assert "**Same answers**" not in text
    assert "same answers" not in table(blocks, "All prompts")["`plain`"]


AUTO = WAYS | {"lookup:auto": WAYS["lookup:3"] | {"num_draft_tokens": "auto"}}


def auto_cells(*, scale, rounds=1):
    """Returns cells of all ways; "lookup:auto" does as `lookup:3`, in so many times its time."""
    lines = cells()
    for line in [one for one in lines if one["key"]["method"] == "lookup:3"]:
        own = copy.deepcopy(line)
        own["key"]["method"] = "lookup:auto"
        own["cell"] += "auto"
        answer = own["record"]["answers"][0]
        answer["decode_seconds"] *= scale
        answer["rounds"] = answer["rounds"] * rounds
        lines.append(own)
    return lines


@pytest.mark.parametrize(
    ("scale", "rounds", "said"),
    [(1.0, 1, "too few rounds to tell whether it does as well as `lookup:3` (39 rounds;"),
     (1.5, 3, "0.67 times as fast as `lookup:3`, the best of the fixed numbers that were timed; "
              "clearly slower"),
     (0.9, 3, "1.11 times as fast as `lookup:3`, the best of the fixed numbers that were timed; "
              "clearly faster"),
     (1.0, 3, "1.00 times as fast as `lookup:3`, the best of the fixed numbers that were timed; "
              "no clear difference")],
)  # fmt: skip
def test_auto_is_set_beside_the_best_fixed_number(tmp_path, scale, rounds, said):
    """Guards against silence where there are too few rounds to tell."""
    lines = auto_cells(scale=scale, rounds=rounds)
    _, text = report(tmp_path, lines, config_fields=config(methods=AUTO))
    assert f"`lookup:auto` chooses its number of drafts itself: {said}" in text


def test_auto_that_has_not_been_timed_is_not_passed_over(tmp_path):
    """Guards against silence in the report of a run that is going on."""
    _, text = report(tmp_path, cells(), config_fields=config(methods=AUTO))
    assert "`lookup:auto` chooses its number of drafts itself: too few rounds to tell" in text


def test_auto_alone_has_nothing_beside_it(tmp_path):
    """Guards against advice against another drafter's number."""
    lines = [
        one for one in auto_cells(scale=1.0) if "lookup:1" != one["key"]["method"] != "lookup:3"
    ]
    _, text = report(tmp_path, lines, config_fields=config(methods=AUTO))
    assert "itself: no fixed number of its drafter was timed beside it" in text


def costs(numbers, *rows, contexts=(512,)):
    """Returns costs of one drafter as costs.json has them."""
    return {"contexts": list(contexts), "numbers": numbers, "drafters": ["prompt_lookup"],
            "seconds": [[row] for row in rows]}  # fmt: skip


def test_what_rounds_cost(tmp_path):
    """Fixed numbers of a drafter are one line, each in plain steps of its own; auto is another."""
    folder = tmp_path / "run"
    write(folder, cells(), config_fields=config(methods=AUTO))
    entries = {
        "lookup:1": {"1": costs([0, 1], [0.1, 0.11]), "8": costs([0, 1], [9.0, 9.0])},
        "lookup:3": {"1": costs([0, 3], [0.2, 0.25])},
        "lookup:auto": {"1": costs([0, 1, 7], [0.1, 0.1, 0.2], [0.1, 0.12, 0.3],
                                   contexts=[512, 2048])},
        "gone": {"1": costs([0, 1], [0.1, 0.1])},
    }  # fmt: skip
    (folder / "costs.json").write_text(json.dumps(entries))
    blocks = make_report(read_workdir(folder))
    (found,) = [b for b in blocks if isinstance(b, Table) and b.caption.startswith("Cost of a")]
    assert found.columns[2:] == ("plain step (ms)", "1 draft", "3 drafts", "7 drafts")
    assert found.rows == (
        ("`lookup`", "512", "150.0", "1.10", "1.25", "-"),
        ("`lookup:auto`", "512", "100.0", "1.00", "-", "2.00"),
        ("`lookup:auto`", "2048", "100.0", "1.20", "-", "3.00"),
    )
    assert any(isinstance(b, Picture) and b.name == "cost-by-width" for b in blocks)
    assert "reading" not in found.note
    assert "What a round costs" not in report(tmp_path / "without", cells())[1]


def test_batches_and_lengths_have_chapters(tmp_path):
    """Guards against a verdict where speculation stops paying that nobody finds."""
    lines = cells()
    lines += [cell(method, prompts, repeat=repeat, batch_size=2) for method in WAYS
              for prompts in ([0, 1], [2, 3], [4, 5]) for repeat in range(3)]  # fmt: skip
    settings = {"T=0": {}, "short": {"max_new_tokens": 4}}
    lines += [cell(method, [prompt], setting="short", rounds=[[3, 0, "x"]]) for method in WAYS
              for prompt in range(6)]  # fmt: skip
    blocks, text = report(tmp_path, lines, config_fields=config(settings=settings))
    assert "## As the batch grows" in text
    row = table(blocks, "Speed-up of whole batches")["`lookup:3`"]
    # three batches: 1 + 1 s a batch; the qa answers take 1.2 s, both of code 0.36 s
    assert row["2"].startswith(f"{6 / (2.2 + 2.2 + 1.36):.2f} [")
    assert "## How long an answer must be" in text
    row = table(blocks, "Speed-up of whole answers, by tokens")["`lookup:3`"]
    assert row["4"] == f"{0.6 / 0.62:.2f}"
    assert "- **How long an answer must be** (the most likely token is always taken; whole" in text
    assert "of the lengths measured): `lookup:" in text
    assert "- **As the batch grows** (T=0, of the sizes measured): `lookup:" in text
    names = {block.name for block in blocks if isinstance(block, Picture)}
    assert {"batches", "break-even"} <= names


def test_traces_are_embedded(tmp_path):
    """Guards against a walk-through that only one of the two forms shows."""
    blocks, text = report(tmp_path, cells(), traces=[trace()])
    assert "+ big+- <red>-~ dog~[ black]" in text
    assert {block.name for block in blocks if isinstance(block, Picture)} >= {"timeline-1"}
    with pytest.raises(InputError, match="expected a trace"):
        report(tmp_path, cells(), traces=[{"rounds": [{}]}])


def test_where_it_comes_from_is_told_without_the_machines_folders(tmp_path):
    """A report is published: commands yes, home directories no."""
    lines = [*cells(), failed_cell()]
    _, text = report(tmp_path, lines, tail='{"torn')
    assert "python -m jspec.experiment --config=configs/smoke.py --workdir=DIR" in text
    assert "secret" not in text
    assert "A Processor, 2 cores, cpu, python 3.11.2, jax 0.10.2" in text
    assert "git commit `0123456789ab`, with changes that are not committed" in text
    assert "72 cells done, 1 failed" in text
    assert "line 74 of results.jsonl is torn" in text
    assert "`ValueError: a 'bad' \\| thing <b>`" in text


def test_an_absolute_config_keeps_its_name_only(tmp_path):
    """Guards against a folder of the machine in a command."""
    run = RUN | {"argv": ["python", "-m", "jspec.experiment", "--config=/a/b/configs/x.py",
                          "--config.prompts_file=/a/b/c.jsonl", "--workdir=runs"]}  # fmt: skip
    _, text = report(tmp_path, cells(), runs=[run])
    expected = "--config=configs/x.py --config.prompts_file=c.jsonl --workdir=DIR"
    assert expected in text
    assert "/a/b" not in text


def test_unfinished_experiments_have_reports(tmp_path):
    """Guards against an error while a run is going on."""
    _, text = report(tmp_path / "none", [])
    assert "No cell is finished yet." in text
    begun = [one for one in cells(repeats=1) if one["key"]["prompts"] == [0]][1:]
    _, text = report(tmp_path / "no base", begun)
    assert "No cell of the base is finished yet" in text
    _, text = report(tmp_path / "base", cells(repeats=1)[:1])
    assert "Nothing was timed beside plain decoding yet." in text


def estimate_cell(method, prompt, overlap, places, *, category=None):
    """Returns a cell of kind "estimate"."""
    return {
        "cell": f"{method}/{prompt}",
        "key": {"method": method, "setting": "T=1", "prompt": prompt, "seed": 0},
        "run": "one",
        "status": "done",
        "error": None,
        "record": {
            "category": category,
            "num_tokens": 100,
            "num_places": places,
            "sum_overlap": overlap,
            "entropy": {"edges": [0.0, 1.0, 2.0], "counts": [places, 0], "sums": [overlap, 0.0]},
            "lenience": [
                {"lenience": 1.0, "sum_acceptance": overlap, "sum_total_variation": 0.0},
                {"lenience": 0.1, "sum_acceptance": places, "sum_total_variation": places / 4},
            ],
            "distribution": "sampled",
        },
    }


def test_estimates(tmp_path):
    """By hand: 60 + 20 of 100 + 60 places are 0.5; all prompts weigh by their places."""
    lines = [
        estimate_cell("lookup:1", 0, 60.0, 100, category="qa"),
        estimate_cell("lookup:1", 1, 20.0, 60, category="code"),
        estimate_cell("random:3", 0, 1.0, 100, category="qa"),
        estimate_cell("random:3", 1, 1.0, 100, category="code"),
    ]
    fields = config(kind="estimate", settings={"T=1": {"temperature": 1.0}})
    blocks, text = report(tmp_path, lines, config_fields=fields)
    assert "**Kept most often: the drafts of `lookup:1`, alpha = 0.50 [0.33, 0.60].**" in text
    assert "something to propose before 80 % of the tokens" in text
    (alphas,) = [b for b in blocks if isinstance(b, Table) and b.caption.startswith("Alpha of")]
    assert alphas.rows[0] == (
        "T=1", "`lookup:1`", "sampled", "0.500 [0.333, 0.600]", "80 %", "200"
    )  # fmt: skip
    assert "Then `random:3` 0.01." in text
    assert table(blocks, "Alpha by category")["`lookup:1`"]["code"] == "0.33"
    lenient = table(blocks, "Drafts kept / total variation")
    assert lenient["`lookup:1`"] == {"drafter": "`lookup:1`", "1": "0.50 [0.33, 0.60] / 0.000",
                                     "0.1": "1.00 / 0.250"}  # fmt: skip
    with pytest.raises(InputError, match="expected a cell of kind estimate"):
        report(tmp_path, cells(), config_fields=config(kind="estimate"))


def test_seeds_of_a_prompt_are_one_prompt(tmp_path):
    """Guards against intervals that take two draws of one prompt for two prompts."""
    lines = [estimate_cell("lookup:1", 0, overlap, 100, category="qa") for overlap in (60.0, 20.0)]
    lines += [estimate_cell("lookup:1", 1, 10.0, 100, category="code")]
    lines[1]["key"] |= {"seed": 1}
    lines[1]["cell"] += "seed 1"
    fields = config(kind="estimate", settings={"T=1": {"temperature": 1.0}})
    blocks, _ = report(tmp_path, lines, config_fields=fields)
    assert table(blocks, "Alpha by category")["`lookup:1`"]["qa"] == "0.40"


def theory_cell(name, columns, rows):
    """Returns a cell of kind "theory"."""
    return {"cell": name, "key": {"table": name}, "run": "one", "status": "done", "error": None,
            "record": {"columns": columns, "units": [""] * len(columns), "rows": rows,
                       "notes": [f"note of {name}"]}}  # fmt: skip


def test_theory(tmp_path):
    """Table 1 is a table, the figures are curves."""
    lines = [
        theory_cell("table1", ["alpha", "drafts", "operations"], [[0.6, 2, 1.53], [0.9, 10, 1.6]]),
        theory_cell("figure2", ["alpha", "1 draft"], [[0.0, 1.0], [1.0, None]]),
    ]
    blocks, text = report(tmp_path, lines, config_fields=config(kind="theory"))
    (table1,) = [block for block in blocks if isinstance(block, Table)]
    assert table1.rows == (("0.6", "2", "1.53"), ("0.9", "10", "1.60"))
    assert [block.name for block in blocks if isinstance(block, Picture)] == ["figure2"]
    assert "- note of table1" in text
    lines[0]["record"]["rows"] = [[1]]
    with pytest.raises(InputError, match="expected a table"):
        report(tmp_path, lines, config_fields=config(kind="theory"))


def pair_cell(name, *rows):
    """Returns a cell of kind "predict": drafts a round, break-even alpha, speeds."""
    line = theory_cell(name, ["drafts a round", "break-even alpha", "speed at alpha 0.5",
                              "speed at alpha 0.8"], list(map(list, rows)))  # fmt: skip
    line["key"] = {"pair": name}
    line["record"]["notes"].append("alpha 0.8: pays, 1.33 times plain decoding's speed")
    line["record"]["units"] = ["tokens", "", *["times plain decoding's"] * 2]
    return line


def test_predictions(tmp_path):
    """Verdicts on the pairs come first, with their own models: none of the config's was asked."""
    lines = [
        pair_cell("a/b", (1, None, 0.9, 1.2), (2, 0.55, 0.8, 1.3333333), (3, 0.7, 0.5, 1.3)),
        pair_cell("never", (1, None, 0.9, 0.95), (2, None, 0.5, 0.7)),
        pair_cell("beyond", (1, 0.95, 0.7, 0.9)),
    ]
    pairs = {
        "a/b": {"target": "big", "draft": "small", "draft_quantization": "int4"},
        "never": {"target": "big", "draft": "other", "bandwidth": 1e9, "flop_rate": 1e9},
    }
    fields = config(kind="predict", predict=pairs)
    blocks, text = report(tmp_path, lines, config_fields=fields)
    assert answers_of(blocks) == (
        "`a/b` (target `big`, draft `small` in int4): **can pay** on this machine if alpha is "
        "above 0.55 (2 drafts a round): at best 1.33 times plain decoding's speed at alpha 0.8 (2 "
        "drafts a round).",
        "`never` (target `big`, draft `other`): **does not pay** on a machine like the one given, "
        "whatever alpha is.",
        "`beyond`: **can pay** on this machine if alpha is above 0.95 (1 draft a round); at none "
        "of the alphas looked at.",
    )
    assert "`toy`" not in text
    assert "alpha 0.8: pays" not in text  # the verdict has said so
    row = table(blocks, "Pair `a/b`")["2"]
    assert row["speed at alpha 0.8 (times plain decoding's)"] == "1.33"
    names = [block.name for block in blocks if isinstance(block, Picture)]
    assert names == ["predict-a-b", "predict-never"]
    assert text.index("## Verdict") < text.index("note of a/b") < text.index("| drafts a round")


def test_figures_that_are_no_longer_drawn_are_removed(tmp_path):
    """Guards against old figures beside a new report, and against the loss of anybody else's."""
    folder = write(tmp_path, cells(), traces=[trace()])
    before = write_report(folder, make_report(read_workdir(folder)))
    (tmp_path / "trace.json").unlink()
    own = [folder / "figures" / name for name in ("mine.png", "timeline-1.txt")]
    for path in own:
        path.write_text("mine")
    with (folder / "report.md").open("a") as file:
        file.write("\n![x](figures/../../timeline-1.png)\n![x](elsewhere/mine.png)\n")
    after = write_report(folder, make_report(read_workdir(folder)))
    gone = {path.name for path in set(before) - set(after)}
    assert gone == {"timeline-1.svg", "timeline-1.png"}
    assert sorted((folder / "figures").iterdir()) == sorted(
        [path for path in after if path.parent.name == "figures"] + own
    )


def test_files_are_written_and_the_page_needs_nothing_else(tmp_path, drawn):
    """Guards against a page that breaks when it is mailed alone."""
    folder = write(tmp_path, cells(), traces=[trace()])
    blocks = make_report(read_workdir(folder))
    files = write_report(folder, blocks)
    assert all(file.stat().st_size > 0 for file in files)
    page = (folder / "report.html").read_text(encoding="utf-8")
    checker = check_page(page)
    assert "A title with <b>marks</b> & | bars" in "".join(checker.texts)
    for link in {line.split("](")[1].rstrip(")")
                 for line in (folder / "report.md").read_text().splitlines()
                 if line.startswith("![")}:  # fmt: skip
        assert (folder / link).exists()
    (folder / "report.md").unlink()
    (folder / "report.md").mkdir()
    with pytest.raises(InputError, match="cannot write the report"):
        write_report(folder, blocks)


def test_a_big_experiment_is_summarised_in_reasonable_time(tmp_path):
    """13 categories and 10 ways, 5 repeats: every interval is 2,000 samples; at most 120 s."""
    methods = {"plain": WAYS["plain"]} | {f"lookup:{n}": WAYS["lookup:3"] | {"num_draft_tokens": n}
                                       for n in range(1, 10)}  # fmt: skip
    lines = []
    for repeat in range(5):
        for prompt in range(39):
            for method in methods:
                line = cell(method if method == "plain" else "lookup:3", [prompt % len(CATEGORIES)])
                line["key"] |= {"method": method, "prompts": [prompt], "repeat": repeat}
                line["cell"] = f"{method}/{prompt}/{repeat}"
                line["record"]["answers"][0]["category"] = f"kind {prompt % 13}"
                lines.append(line)
    begin = time.perf_counter()
    _, text = report(tmp_path, lines, config_fields=config(methods=methods))
    assert time.perf_counter() - begin < 120
    assert "kind 12" in text


def test_reading_results_loads_no_big_library():
    """Guards against a report that waits for JAX, or a program that loads matplotlib unasked."""
    program = "import sys, jspec.evaluation.reports.report; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert not {"jax", "matplotlib", "flax", "transformers"} & set(done.stdout.decode().split())


def test_numbers_that_were_not_measured_are_left_out(tmp_path):
    """Guards against a NaN, or a 0 in the place of nothing: answers of one token have no rounds."""
    lines = cells()
    for line in lines:
        if line["key"]["method"] == "random:3":
            answer = line["record"]["answers"][0]
            answer |= {"rounds": [], "num_round_tokens": 0, "decode_seconds": 0.0,
                       "device_seconds": 0.0}  # fmt: skip
    blocks, text = report(tmp_path, lines)
    row = table(blocks, "All prompts")["`random:3`"]
    measured = {"method", "same answers", "speed-up of whole answers"}
    assert {row[name] for name in row.keys() - measured} == {"-"}
    assert not re.search(r"\b(nan|inf|None)\b", text)


@pytest.mark.parametrize(
    ("num_cells", "said"),
    [(24, "**4 of 24 cells are finished**: this report is of those alone."), (4, None),
     (None, None)],
)  # fmt: skip
def test_an_unfinished_run_says_so_first(tmp_path, num_cells, said):
    """Guards against numbers of the first few prompts that are taken for all of them."""
    run = RUN if num_cells is None else RUN | {"num_cells": num_cells}
    blocks, text = report(tmp_path, cells(repeats=1)[:4], runs=[RUN, run])
    assert (blocks[1] == Paragraph(said or "")) == (said is not None)
    assert ("are finished" in text) == (said is not None)
    assert (f"4 of {num_cells} cells done" in text) == (num_cells is not None)
    assert ("How many cells there are to be is not recorded" in text) == (num_cells is None)


def test_a_paragraph_of_failures_comes_first(tmp_path):
    """Whoever reads only the top must know that something is missing."""
    blocks, _ = report(tmp_path, [*cells(), failed_cell()])
    assert blocks[1] == Paragraph("**1 of 73 cells failed**, listed at the end.")


def test_every_kind_has_its_cells_its_worker_and_its_report(tmp_path):
    """Guards against a kind that one of the places where kinds are listed does not know."""
    for kind in KINDS:
        assert make_cells(Experiment(kind=kind), [0]) is not None
        _, text = report(tmp_path / kind, [], config_fields=config(kind=kind))
        assert "No cell is finished yet." in text
    with pytest.raises(InputError, match=f"among {', '.join(KINDS)}; got 'odd'"):
        report(tmp_path / "odd", [], config_fields=config(kind="odd"))
