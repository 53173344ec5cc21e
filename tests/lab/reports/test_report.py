"""Whole reports: what they say, for every kind of experiment."""

import json
import pathlib
import re

import pytest

from jspec.common.errors import InputError
from jspec.common.figures import Picture
from jspec.lab.analysis import ratios
from jspec.lab.analysis.spec_bench import TASKS
from jspec.lab.experiments.cells import make_cells
from jspec.lab.experiments.spec import KINDS, Experiment
from jspec.lab.reports.document import Glossary, Table, to_markdown
from jspec.lab.reports.report import make_report, publish, write_report
from jspec.lab.reports.workdir import read_workdir
from jspec.speculation.acceptance import RULES, get_rule
from tests.lab.drawn import legend_of, lines_of
from tests.lab.reports.workdirs import RUN, WAYS, cell, cells, config, failed_cell, trace, write

SMOKE = pathlib.Path(__file__).parents[3] / "benchmarks" / "smoke"


def report(tmp_path, lines, **options):
    """Returns the blocks of a report, and its Markdown."""
    blocks = make_report(read_workdir(write(tmp_path, lines, **options)))
    return blocks, to_markdown(blocks)


def table(blocks, beginning):
    """Returns the rows of the table whose caption begins so, by their first cells."""
    (match,) = [b for b in blocks if isinstance(b, Table) and b.caption.startswith(beginning)]
    return {next(iter(row.values())): row for row in match.rows}


def words_of(text):
    """Returns the words of a report, without those of tables, of code and of links to figures."""
    text = re.sub(r"(?s)```.*?```", "", text)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "!["))]
    return " ".join(lines).split()


def test_the_committed_smoke_report_is_made_again_from_its_record(tmp_path, monkeypatch):
    """Guards against published reports that the code no longer makes, and against long reports."""
    monkeypatch.setattr(ratios, "_NUM_SAMPLES", 2000)
    publish(SMOKE, tmp_path)
    made, committed = (
        (folder / "report.md").read_text(encoding="utf-8") for folder in (tmp_path, SMOKE)
    )
    numbers = [re.findall(r"\d+(?:\.\d+)?", text) for text in (made, committed)]
    assert len(numbers[0]) > 200
    assert numbers[0] == numbers[1]
    figures = {path.name for path in (SMOKE / "figures").iterdir()}
    assert figures == {path.name for path in (tmp_path / "figures").iterdir()}
    assert len(words_of(committed)) <= 400
    assert committed.rstrip().endswith("</details>")


@pytest.mark.parametrize(
    "name", sorted(path.parent.name for path in SMOKE.parent.glob("*/config.json"))
)
def test_published_folders_are_small_and_whole(name):
    """Every picture that a report links to is there, none is big, and nothing gives advice."""
    folder = SMOKE.parent / name
    text = (folder / "report.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\(figures/([\w-]+\.png)\)", text))
    files = {path.name: path.stat().st_size for path in (folder / "figures").iterdir()}
    assert linked == files.keys()
    assert all(size < 40_000 for size in files.values())
    assert not re.search(r"\b(use `|recommend|clearly|verdict)\b", text, re.IGNORECASE)


def test_tables_hold_the_numbers(tmp_path):
    """Guards against columns that change places."""
    blocks, text = report(tmp_path, cells())
    row = table(blocks, "All prompts")["`lookup:3`"]
    assert row["speed-up"].startswith("1.28 [")
    assert row["tokens/s"] == "12.8"
    assert row["ms a token"] == "78.0"
    assert row["drafts accepted (%)"].startswith("18 [")
    assert row["alpha"].startswith("0.39 [")
    assert row["tokens per call"] == "1.54"
    assert row["cost of a round"] == "1.20"  # times the speed-up, which is 60 tokens in 4.68 s
    assert row["speed-up of whole answers"].startswith("1.17 [")
    assert row["same answers"] == "6 of 6"
    assert table(blocks, "All prompts")["`plain`"]["speed-up"] == "1.00"
    assert table(blocks, "Speed-up by category")["qa"]["`lookup:3`"] == "0.83"
    per_call = table(blocks, "Tokens per target call by category")
    assert per_call["code"]["`lookup:3`"] == "3.33 (78)"
    assert "Prompts: 6; timings of each: 3." in text
    assert "Prompts: 6. Tokens, medians: 7 in a prompt, 11 in an answer." in text


def test_what_the_methods_are_is_told(tmp_path):
    """Drafter, number of drafts, draft model, weights, options and rule of each method.

    A rule is lossless if it says so; one of the user's own is what its run recorded.
    """
    methods = {rule: WAYS["lookup:3"] | {"acceptance": rule} for rule in (*RULES, "own", "lost")}
    big = {"drafter": "model", "num_draft_tokens": "auto", "draft": "small",
           "draft_quantization": "int4", "acceptance": "rejection", "lenience": 1.0,
           "options": {"draft_layers": [0, 1, 2], "draft_head": None}}  # fmt: skip
    fields, runs = (
        config(methods=WAYS | methods | {"big": big}),
        [RUN | {"described": {"own": {"is_lossless": False}}}],
    )
    blocks, _ = report(tmp_path, cells(repeats=1), config_fields=fields, runs=runs)
    rows = table(blocks, "Methods")
    assert tuple(rows["`big`"].values()) == (
        "`big`", "model", "auto", "`draft = small`, `weights = int4`, `draft_layers = 0-2`",
        "rejection", "yes",
    )  # fmt: skip
    assert rows["`plain`"]["drafts a round, at most"] == "-"
    lossy = [rule for rule in RULES if rows[f"`{rule}`"]["lossless"] == "no"]
    assert lossy == [rule for rule in RULES if not get_rule(rule).is_lossless]
    assert set(lossy) == {"lenient", "lenient_argmax", "typical"}
    assert [rows[f"`{label}`"]["lossless"] for label in ("own", "lost")] == ["no", "-"]
    assert rows["`own`"]["rule"] == "own"


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
    assert "13 prompts from `question.jsonl`; Spec-Bench" in text
    assert "/some/where" not in text


def test_other_categories_are_not_spec_benchs(tmp_path):
    """Guards against its name over prompts that are not its."""
    names = [*(name for members in TASKS.values() for name in members), "poems"]
    _, text = report(tmp_path, spec_bench_cells(categories=names))
    assert "Spec-Bench" not in text


def test_what_rounds_cost(tmp_path):
    """A table of drafters and contexts, and a draft model's reading of the prompt."""
    folder = write(tmp_path, cells())
    entry = {"contexts": [512, 2048], "numbers": [0, 3], "drafters": ["prompt_lookup"],
             "seconds": [[[0.1, 0.12]], [[0.1, 0.2]]]}  # fmt: skip
    random = entry | {"drafters": ["random"], "reading": [[0.002], [0.0031]]}
    (folder / "costs.json").write_text(
        json.dumps({"lookup:3": {"1": entry, "8": entry}, "random:3": {"1": random}})
    )
    blocks = make_report(read_workdir(folder))
    (match,) = [b for b in blocks if isinstance(b, Table) and b.caption.startswith("Cost of a")]
    assert [tuple(row.values()) for row in match.rows] == [
        ("`lookup`", "512", "100.0", "1.20", "0.00"),
        ("`lookup`", "2048", "100.0", "2.00", "0.00"),
        ("`random`", "512", "100.0", "1.20", "2.00"),
        ("`random`", "2048", "100.0", "2.00", "3.10"),
    ]
    assert any(isinstance(b, Picture) and b.name == "cost-by-width" for b in blocks)
    assert "`lookup:3`" in table(blocks, "Predicted and measured")
    assert "What a round costs" not in report(tmp_path / "without", cells())[1]


def test_batches_and_lengths_have_chapters(tmp_path):
    """Guards against numbers of a batch size that nobody finds."""
    lines = cells()
    lines += [cell(method, prompts, repeat=repeat, batch_size=2) for method in WAYS
              for prompts in ([0, 1], [2, 3], [4, 5]) for repeat in range(3)]  # fmt: skip
    settings = {"T=0": {}, "short": {"max_new_tokens": 4}}
    lines += [cell(method, [prompt], setting="short", rounds=[[3, 0, "x"]]) for method in WAYS
              for prompt in range(6)]  # fmt: skip
    settings["T=1"] = {"temperature": 1.0}
    lines += cells(repeats=1, setting="T=1")
    blocks, text = report(tmp_path, lines, config_fields=config(settings=settings))
    assert "same answers" not in table(blocks, "All prompts (T=1)")["`plain`"]
    row = table(blocks, "Speed-up of whole answers, by batch size")["`lookup:3`"]
    # three batches: 1 + 1 s a batch; the qa answers take 1.2 s, both of code 0.36 s
    assert row["2"].startswith(f"{6 / (2.2 + 2.2 + 1.36):.2f} [")
    batch = table(blocks, "All prompts (T=0, batch size 2)")["`plain`"]
    assert "cost of a round" not in batch
    assert batch["tokens/s"] == f"{3 * 66 / (3 * 6):.1f}"
    row = table(blocks, "Speed-up of whole answers, by answer length")["`lookup:3`"]
    assert row["4"] == f"{0.6 / 0.62:.2f}"
    names = {block.name for block in blocks if isinstance(block, Picture)}
    assert {"by-batch-size-1", "by-answer-length-1"} <= names
    assert "## By batch size" in text


def test_traces_are_embedded(tmp_path):
    """Guards against a walk-through that is read and not shown, and explanations before numbers."""
    blocks, text = report(tmp_path, cells(), traces=[trace()])
    assert "+ big+- <red>-~ dog~[ black]" in text
    assert {block.name for block in blocks if isinstance(block, Picture)} >= {"timeline-1"}
    assert [type(block) for block in blocks].count(Glossary) == 1
    assert isinstance(blocks[-1], Glossary)
    assert text.index("How it was measured") < text.index("<details>")
    with pytest.raises(InputError, match="expected a trace"):
        report(tmp_path, cells(), traces=[{"rounds": [{}]}])


def test_where_it_comes_from_is_told_without_the_machines_folders(tmp_path):
    """A report is published: commands yes, home directories no. Failures are told first."""
    blocks, text = report(tmp_path, [*cells(), failed_cell()], tail='{"torn')
    assert "python -m jspec.experiment --config=configs/smoke.py --workdir=DIR" in text
    assert "secret" not in text
    assert "A Processor, 2 cores, cpu, python 3.11.2, jax 0.10.2" in text
    assert "git commit `0123456789ab`, with changes that are not committed" in text
    assert "72 cells done, 1 failed" in text
    assert "line 74 of results.jsonl is torn" in text
    assert "`ValueError: a 'bad' \\| thing <b>`" in text
    assert blocks[1] == "72 of 73 cells are finished, 1 failed."
    assert "`lookup:1/T=0/broken`" in table(blocks, "Failed cells")
    assert text.index("72 of 73") < text.index("Failed cells")


def test_unfinished_experiments_have_reports(tmp_path):
    """Guards against an error while a run is going on."""
    _, text = report(tmp_path / "none", [])
    assert "No cell is finished yet." in text
    begun = [one for one in cells(repeats=1) if one["key"]["prompts"] == [0]][1:]
    _, text = report(tmp_path / "no baseline", begun)
    assert "No cell of the baseline is finished yet" in text
    blocks, _ = report(tmp_path / "baseline", cells(repeats=1)[:1])
    assert list(table(blocks, "All prompts")) == ["`plain`"]
    # One timing has no interval.
    assert table(blocks, "All prompts")["`plain`"]["speed-up of whole answers"] == "1.00"


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
    blocks, _ = report(tmp_path, lines, config_fields=fields)
    (alphas,) = [b for b in blocks if isinstance(b, Table) and b.caption.startswith("Alpha of")]
    assert tuple(alphas.rows[0].values()) == (
        "T=1", "`lookup:1`", "sampled", "0.500 [0.333, 0.600]", "80", "200"
    )  # fmt: skip
    assert table(blocks, "Alpha by category")["`lookup:1`"]["code"] == "0.33"
    lenient = table(blocks, "Drafts accepted (share)")
    assert lenient["`lookup:1`"] == {"drafter": "`lookup:1`", "1": "0.50 [0.33, 0.60] / 0.000",
                                     "0.1": "1.00 / 0.250"}  # fmt: skip
    names = [block.name for block in blocks if isinstance(block, Picture)]
    assert names == ["alpha", "alpha-by-entropy", "lenience"]
    with pytest.raises(InputError, match="expected cells of kind estimate, got one without"):
        report(tmp_path, cells(), config_fields=config(kind="estimate"))


def test_estimates_are_drawn(tmp_path, figures):
    """Alpha by name; bins of fewer than 20 tokens are left out; lenience and distance."""
    lines = [estimate_cell("lookup:1", n, 10.0 + n, 20, category="qa") for n in range(3)]
    for line in lines:
        line["record"]["entropy"] = {"edges": [0.0, 1.0, 2.0], "counts": [14, 6], "sums": [7, 3]}
    fields = config(kind="estimate", settings={"T=1": {"temperature": 1.0}})
    report(tmp_path, lines, config_fields=fields)
    alpha, entropy, lenience = figures
    assert lines_of(alpha.axes[0]) == [[(0, pytest.approx(33 / 60))]]
    assert legend_of(alpha) == ["T=1"]
    assert lines_of(entropy.axes[0]) == [[(0.5, 0.5)]]
    kept, apart = lenience.axes
    assert lines_of(kept) == [[(1.0, pytest.approx(33 / 60)), (0.1, 1)]]
    assert lines_of(apart) == [[(1.0, 0), (0.1, 0.25)]]
    assert "temperature\xa01" in entropy.get_suptitle()


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
    assert [tuple(row.values()) for row in table1.rows] == [("0.6", "2", "1.53"),
                                                            ("0.9", "10", "1.6")]  # fmt: skip
    assert [block.name for block in blocks if isinstance(block, Picture)] == ["figure2"]
    assert "- note of table1" in text
    with pytest.raises(InputError, match="expected cells of kind theory, got one without 'table'"):
        report(tmp_path, cells(), config_fields=config(kind="theory"))


def test_predictions(tmp_path):
    """A table and a figure a pair; verdicts, as earlier records hold them, are left out."""
    columns = ["drafts a round", "break-even alpha", "speed at alpha 0.5", "speed at alpha 0.8"]
    lines = [
        theory_cell("a/b", columns, [[1, None, 0.9, 1.2], [2, 0.55, 0.8, 1.3333333]]),
        theory_cell("single", columns, [[1, 0.95, 0.7, 0.9]]),
    ]
    for line in lines:
        line["key"] = {"pair": line["cell"]}
        line["record"]["notes"].append("alpha 0.8: pays, 1.33 times plain decoding's speed")
        line["record"]["units"] = ["tokens", "", *["times plain decoding's"] * 2]
    blocks, text = report(tmp_path, lines, config_fields=config(kind="predict"))
    (pair, _) = [block for block in blocks if isinstance(block, Table)]
    assert [tuple(row.values()) for row in pair.rows] == [("1", "-", "0.9", "1.2"),
                                                          ("2", "0.55", "0.8", "1.33")]  # fmt: skip
    assert "speed at alpha 0.8 (times plain decoding's)" in pair.rows[0]
    assert "- note of a/b" in text
    assert "pays" not in text
    assert "`toy`" not in text
    # one number of drafts is no curve
    assert [block.name for block in blocks if isinstance(block, Picture)] == ["predict-a-b"]


def test_figures_that_are_no_longer_drawn_are_removed(tmp_path):
    """Guards against old figures beside a new report, and against the loss of anybody else's."""
    folder = write(tmp_path, cells(repeats=1), traces=[trace()])
    before = write_report(folder, make_report(read_workdir(folder)))
    (tmp_path / "trace.json").unlink()
    extra_files = [folder / "figures" / name for name in ("mine.png", "timeline-1.txt")]
    for path in extra_files:
        path.write_text("mine")
    with (folder / "report.md").open("a") as file:
        file.write("\n![x](figures/../../timeline-1.png)\n![x](elsewhere/mine.png)\n")
    after = write_report(folder, make_report(read_workdir(folder)))
    gone = {path.name for path in set(before) - set(after)}
    assert gone == {"timeline-1.png"}
    assert sorted((folder / "figures").iterdir()) == sorted(
        [path for path in after if path.parent.name == "figures"] + extra_files
    )


def test_files_are_written(tmp_path):
    """Every figure to which the report links is there; the tables are there to be computed with."""
    folder = write(tmp_path, cells(), traces=[trace()])
    blocks = make_report(read_workdir(folder))
    files = write_report(folder, blocks)
    assert all(file.stat().st_size > 0 for file in files)
    text = (folder / "report.md").read_text()
    links = re.findall(r"^!\[.*\]\((.+)\)$", text, re.MULTILINE)
    assert links
    assert all((folder / link).exists() for link in links)
    assert "All prompts (T=0),lookup:3,tokens/s,12.8\n" in (folder / "tables.csv").read_text()
    (folder / "report.md").unlink()
    (folder / "report.md").mkdir()
    with pytest.raises(InputError, match="cannot write the report"):
        write_report(folder, blocks)


def test_numbers_that_were_not_measured_are_left_out(tmp_path):
    """Guards against a NaN, or a 0 in the place of nothing: answers of one token have no rounds."""
    lines = cells()
    for line in lines:
        if line["key"]["method"] == "random:3":
            answer = line["record"]["answers"][0]
            answer |= {"rounds": [], "num_round_tokens": 0, "decode_seconds": 0.0}
    blocks, text = report(tmp_path, lines)
    row = table(blocks, "All prompts")["`random:3`"]
    measured = {"method", "same answers", "speed-up of whole answers"}
    assert {row[name] for name in row.keys() - measured} == {"-"}
    assert not re.search(r"\b(nan|inf|None)\b", text)


def test_an_unfinished_run_says_so_first(tmp_path):
    """Guards against numbers of the first few prompts that are taken for all of them."""
    for num_cells, said in ((24, True), (4, False)):
        runs = [RUN, RUN | {"num_cells": num_cells}]
        blocks, text = report(tmp_path, cells(repeats=1)[:4], runs=runs)
        assert (blocks[1] == "4 of 24 cells are finished, 0 failed.") == said
        assert ("are finished" in text) == said
        assert f"4 of {num_cells} cells done" in text


def test_every_kind_has_its_cells_and_its_report(tmp_path):
    """Guards against a kind that one of the places where kinds are listed does not know."""
    for kind in KINDS:
        assert make_cells(Experiment(kind=kind), [0]) is not None
        _, text = report(tmp_path / kind, [], config_fields=config(kind=kind))
        assert "No cell is finished yet." in text
    with pytest.raises(InputError, match=f"among {', '.join(KINDS)}; got 'odd'"):
        report(tmp_path / "odd", [], config_fields=config(kind="odd"))
