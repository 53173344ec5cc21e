"""What a report says of single tasks, of its prompts, and of the ways: in words that are true."""

import copy
import json

import pytest

from jspec.evaluation.analysis.ratios import Ratio
from jspec.evaluation.reports.document import Paragraph, Table
from jspec.evaluation.reports.explain_methods import explain_method, explain_names, methods_table
from jspec.evaluation.reports.report import make_report
from jspec.evaluation.reports.wording import interval
from jspec.evaluation.reports.workdir import read_workdir
from tests.evaluation.reports.test_report import answers_of, by_tasks, report, table
from tests.evaluation.reports.workdirs import WAYS, cell, cells, config, write

pytestmark = pytest.mark.usefixtures("quick_figures")


def slowed(lines, *methods, by):
    """Returns the cells, those of some ways with so many times their time of decoding."""
    for line in lines:
        if line["key"]["method"] in methods:
            for answer in line["record"]["answers"]:
                answer["decode_seconds"] *= by
    return lines


def test_a_task_whose_control_is_too_fast_is_noisy(tmp_path):
    """Guards against advice on times that cannot be: rounds of random drafts in 0.9 plain steps."""
    lines = by_tasks()
    slowed([line for line in lines if line["key"]["prompts"][0] % 2], "random:3", by=0.6)
    blocks, text = report(tmp_path / "noisy", lines)
    rows = table(blocks, "What to use")
    assert rows["code"]["use"] == "`lookup:3` (noisy)"
    assert rows["qa"]["use"] == "`plain`"
    assert "**Noisy**: a round of the way, or of the control `random`" in text
    assert "`lookup:3` for code (noisy)" in answers_of(blocks)[0]
    assert "oisy" not in report(tmp_path / "calm", by_tasks())[1]


def test_little_to_gain_is_no_advice_to_use_it_for_everything(tmp_path):
    """lookup:1 gains 6 % in code, lookup:3 loses: "use" would say too much."""
    lines = [line for line in by_tasks() if line["key"]["prompts"][0] % 2]
    for line in lines:
        if line["key"]["prompts"][0] > 4:
            line["record"]["answers"][0]["category"] = "more"
    lines += [copy.deepcopy(line) for line in lines]
    for line in lines[len(lines) // 2 :]:
        line["key"]["prompts"][0] += 10
        line["cell"] += "again"
    blocks, _ = report(tmp_path, slowed(slowed(lines, "lookup:1", by=1.8), "lookup:3", by=3))
    (answer,) = answers_of(blocks)
    assert "there is little to gain: the fastest way, `lookup:1`, is 1.06 times as fast" in answer
    assert not answer.partition(": ")[2].startswith("use")


def test_methods_that_are_neither_fast_nor_slow_are_not_passed_over(tmp_path):
    """Guards against a way without a verdict: lookup:1 is 1.2 times as fast, random:3 unclear."""
    lines = [one for one in cells() if one["key"]["prompts"][0] > 2]
    slowed(lines, "lookup:1", by=1.6)
    slowed([one for one in lines if one["key"]["prompts"][0] == 3], "random:3", by=0.5)
    _, text = report(tmp_path, lines)
    assert "Faster than plain decoding too, but less so: `lookup:1` 1.19." in text
    assert (
        "Neither clearly faster nor clearly slower than plain decoding: `random:3` 0.80 [" in text
    )


def test_what_was_asked_is_said(tmp_path):
    """Guards against a verdict on 11 tokens that is taken for one on long answers."""
    blocks, text = report(tmp_path, by_tasks())
    (asked,) = [b.text for b in blocks if isinstance(b, Paragraph) and "Measured on" in b.text]
    assert asked == (
        "Measured on 10 prompts of 7 tokens, with answers of 11 tokens (medians). A task has 5 of "
        "the prompts, which is few: what is said of a single task is a hint. `:1` behind a name: "
        "at most 1 draft a round."
    )
    assert text.index("## Verdict") < text.index("Measured on") < text.index("## How it works")


def test_who_reads_the_prompt_is_said(tmp_path):
    """Guards against a cost of a round that another table contradicts without a word."""
    entry = {"contexts": [512, 2048], "numbers": [0, 3], "drafters": ["prompt_lookup"],
             "seconds": [[[0.1, 0.2]], [[0.1, 0.2]]]}  # fmt: skip
    folder = write(tmp_path, cells())
    costs = {
        "lookup:1": {"1": entry | {"numbers": [0, 1]}},
        "random:3": {"1": entry | {"drafters": ["random"], "reading": [[0.002], [0.0031]]}},
    }
    (folder / "costs.json").write_text(json.dumps(costs))
    blocks = make_report(read_workdir(folder))
    (asked,) = [b.text for b in blocks if isinstance(b, Paragraph) and "Measured on" in b.text]
    assert "The draft model of `random:3` has to read the prompt in its first round." in asked
    (found,) = [b for b in blocks if isinstance(b, Table) and b.caption.startswith("Cost of a")]
    assert found.columns[-1] == "reading (ms a token)"
    assert [(row[0], row[1], row[-1]) for row in found.rows] == [
        ("`lookup`", "512", "-"), ("`lookup`", "2048", "-"),
        ("`random`", "512", "2.00"), ("`random`", "2048", "3.10"),
    ]  # fmt: skip
    assert "**Reading** is what a draft model takes" in found.note


def test_notes_are_said_once(tmp_path):
    """Guards against a report that is twice as long for a second setting."""
    settings = {"T=1": {"temperature": 1.0}, "T=2": {"temperature": 2.0}}
    lines = [*cells(setting="T=1"), *cells(setting="T=2")]
    _, text = report(tmp_path, lines, config_fields=config(settings=settings))
    assert text.count("at a temperature above 0 every way draws") == 1
    assert text.count("In the tables of tasks") == 1


def test_theory_comes_last(tmp_path):
    """Guards against paragraphs of theory between the reader and the costs."""
    lines = [cell(method, [prompt]) for method in WAYS for prompt in range(6)]
    folder = write(tmp_path, lines)
    entry = {"contexts": [512], "numbers": [0, 3], "drafters": ["prompt_lookup"],
             "seconds": [[[0.1, 0.2]]]}  # fmt: skip
    (folder / "costs.json").write_text(json.dumps({"lookup:3": {"1": entry}}))
    captions = [b.caption for b in make_report(read_workdir(folder)) if isinstance(b, Table)]
    assert [caption.partition(" (")[0] for caption in captions[-3:]] == [
        "Cost of a round", "Expected and measured speed-up", "Gaps of over 10 %",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "said"),
    [({"drafter": "model", "draft": "small"}, "proposes what a second, cheaper model would say"),
     ({"drafter": "model", "draft": "toy", "draft_quantization": "int4"},
      "proposes what the same model, its weights rounded to 4 bits, would say"),
     ({"drafter": "hierarchical", "draft": "toy", "options": {"inner_drafter": "ngram"}},
      "proposes what the same model would say, which is itself sped up by `ngram`"),
     ({"drafter": "ngram+bigram", "options": {"draft_table": "a"}},
      "copies what most often followed the same few tokens in prompt and answer; where that has "
      "nothing to say, proposes what often follows the last token, by a given table of counts")],
)  # fmt: skip
def test_methods_are_explained(method, said):
    """Guards against "a cheaper model" that is the same one, and a brace that is shown."""
    assert explain_method(method, "toy") == said


def test_names_and_numbers_of_drafts_are_explained():
    """Guards against a colon that means nothing, and one that is said to mean what it does not."""
    assert explain_names(WAYS) == "`:1` behind a name: at most 1 draft a round."
    assert explain_names({"a:3": WAYS["lookup:1"], "b": WAYS["lookup:3"]}) == ""
    overridden = {"a:3": WAYS["lookup:1"], "lookup:1": WAYS["lookup:1"]}
    assert explain_names(overridden).endswith("at most 1 draft a round. `a:3` had 1.")
    note = "Drafters were not all timed with the same numbers of drafts."
    assert note in methods_table(WAYS, "toy", "float32").note
    alike = {name: WAYS[name] for name in ("plain", "lookup:3", "random:3")}
    assert note not in methods_table(alike, "toy", "float32").note
    assert "All keep the target's answers." in methods_table(alike, "toy", "float32").note
    assert "rounding in bfloat16" in methods_table(alike, "toy", "bfloat16").note


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(1.0042, 1.38, "[1.004, 1.38]"), (0.9961, 1.0049, "[0.996, 1.005]"),
     (0.99999, 1.00001, "[0.999, 1.001]"), (0.9, 1.0, "[0.90, 1.00]"), (0.5, 1.2, "[0.50, 1.20]")],
)  # fmt: skip
def test_on_which_side_of_1_an_interval_ends_shows(low, high, said):
    """Guards against [1.00, 1.38] that lies above 1 beside [1.00, 1.11] that does not."""
    assert interval(Ratio(1.0, low, high)) == f"1.00 {said}"
