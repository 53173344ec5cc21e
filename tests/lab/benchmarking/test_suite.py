"""The open suite: which rows there are, that a failing row stops no other row, and what is kept."""

import dataclasses
import json
import os

import pytest

from jspec.common.errors import InputError
from jspec.drafters import DrafterOptions
from jspec.generation.request import SamplingParams
from jspec.lab.auditing import checks
from jspec.lab.auditing import subject as stamps
from jspec.lab.auditing.subject import Check, Subject
from jspec.lab.benchmarking import suite
from jspec.lab.benchmarking.measurement import Measurement
from jspec.lab.reports.document import to_markdown
from jspec.lab.reports.leaderboard import audit_cell, leaderboard_page, leaderboard_text
from jspec.models.config import EncoderConfig
from jspec.speculation.acceptance import get_rule
from tests.tiny_models import CONFIG, draft, make_model, save_folder, target

_PROMPTS = ({"prompt": "ab", "category": "writing"}, {"prompt": "cd", "category": "qa"})
_OPTIONS = DrafterOptions()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_folder(tmp_path_factory.mktemp("model") / "tiny", num_layers=1)


@pytest.fixture
def ask(folder, tmp_path, monkeypatch):
    """Returns a maker of what a command line asks for; audits are kept in a new folder."""
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "cache"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in _PROMPTS))
    values = {
        "suite": "open", "target": str(folder), "draft": None, "dtype": "float32",
        "prompts_file": str(prompts), "num_prompts": 2, "per_category": None, "repeats": 1,
        "max_new_tokens": 6, "max_seq_len": 64, "temperature": 1.0, "num_draft_tokens": "2",
        "drafters": ["suffix"], "minutes": 60.0, "audit_rows": 0, "output_json": None,
        "options": _OPTIONS, "begun": {},
    }  # fmt: skip
    return lambda **changes: Measurement(**{**values, **changes})


def measured(asked):
    """Returns the last outcome, its record as JSON has it, and how many there were."""
    outcomes = list(suite.measure_suite(asked))
    return outcomes[-1], json.loads(json.dumps(outcomes[-1].record)), len(outcomes)


def labels(asked, models):
    """Returns the rules of each drafter and temperature."""
    rules = {}
    for row in suite.rows_of(models, asked):
        rules.setdefault((row.drafter, row.is_default, row.temperature), []).append(row.acceptance)
    return rules


def test_every_drafter_meets_every_lossless_rule_once(ask):
    """At temperature 0 all lossless rules do the same; `k_seq` is for trees alone."""
    models = suite.Models(target(), None, {"prompt_lookup": 2, "recycle": 2}, {})
    rules = labels(ask(drafters=None), models)
    usual = ("prompt_lookup", True)
    assert rules.pop((*usual, 0.0)) == ["greedy"]
    assert rules.pop((*usual, 1.0)) == ["rejection"]
    sampled = ["rejection", "block", "coupled"]
    expected = {0.0: ["greedy"], 1.0: sampled}
    assert rules == {
        (drafter, False, t): expected[t] for t in expected for drafter in models.drafters
    }
    tree = labels(ask(options=DrafterOptions(tree_depth=2)), models)
    assert "k_seq" in tree["recycle", False, 1.0]
    assert all(get_rule(name).is_lossless for names in tree.values() for name in names)
    rows = suite.rows_of(models, ask(drafters=None))
    assert len({row.label for row in rows}) == len(rows) == 10
    # Of drafters that were named, the default is one only where its drafter is.
    models = suite.Models(target(), None, {"recycle": 2}, {})
    assert usual not in {row[:2] for row in labels(ask(drafters=["recycle"]), models)}
    models = suite.Models(target(), None, {"prompt_lookup": 2}, {})
    named = labels(ask(drafters=["prompt_lookup"]), models)
    assert named[*usual, 1.0] == ["rejection"]
    assert named["prompt_lookup", False, 1.0] == sampled


def test_drafters_that_do_not_fit_are_left_out_with_a_reason(ask, capsys):
    """And a draft that fits none is refused, in one line."""
    models = suite.fit_drafters(ask(drafters=None), target(), None)
    assert {"prompt_lookup", "layer_skip", "random"} <= models.drafters.keys()
    assert "none" not in models.drafters
    assert models.left_out["model"] == "it needs a draft model (--draft)"
    assert "expects draft_head" in models.left_out["eagle"]
    assert f"note: eagle is left out: {models.left_out['eagle']}\n" in capsys.readouterr().err
    fitting = suite.fit_drafters(ask(drafters=["model", "hierarchical"]), target(), draft())
    assert set(fitting.drafters) == {"model", "hierarchical"}
    with pytest.raises(InputError, match=r"^expected no drafter none in a suite: all rows"):
        suite.fit_drafters(ask(drafters=["none", "recycle"]), target(), None)
    with pytest.raises(InputError, match=r"^expected a drafter that fits tiny, got model, eagle$"):
        suite.fit_drafters(ask(drafters=["model", "eagle"]), target(), None)
    encoder = EncoderConfig(1, 1, 2, 2, 512)
    small = make_model(name="small")
    small = dataclasses.replace(small, config=dataclasses.replace(CONFIG, encoder=encoder))
    for refused, message in (
        ({"drafters": ["model"]}, r"^expected a draft model that fits tiny, got small: expected a"),
        ({"drafters": ["prompt_lookup"]}, r"got small: --drafters=prompt_lookup$"),
    ):
        with pytest.raises(InputError, match=message):
            suite.fit_drafters(ask(**refused), target(), small)
    with pytest.raises(
        InputError, match="expected a number of drafts a round in a suite, got auto"
    ):
        suite.fit_drafters(ask(num_draft_tokens="auto"), target(), None)
    asked = ask(options=DrafterOptions(draft_layers=(0,)))
    with pytest.raises(InputError, match=r"draft_layers with a drafter that reads it"):
        suite.fit_drafters(asked, target(), None)


def test_a_row_that_fails_stops_no_other_and_is_measured_again(ask, monkeypatch, capsys):
    """Guards against a leaderboard lost for one drafter, and against rows measured twice."""
    measure, calls, results = suite._measure, [], {}

    def measure_or_fail(asked, models, plain, row, *others):
        calls.append(row.acceptance)
        if calls.count("block") == 1 and row.acceptance == "block":
            raise MemoryError("too\n much")
        if row.acceptance == "greedy":  # the others would compile programs of their own
            results.update(measure(asked, models, plain, row, *others))
        return dict(results)

    monkeypatch.setattr(suite, "_measure", measure_or_fail)
    last, record, number = measured(ask())
    assert not last.is_complete  # for want of audits
    assert number == 7  # after each row, after each that has no audit, and at the end
    failed = record["rows"]["suffix, block, T=1"]
    assert failed["error"] == "MemoryError: too much"
    said = "note: suffix, block, T=1 has failed: MemoryError: too much\n"
    assert said in capsys.readouterr().err
    greedy = record["rows"]["suffix, greedy, T=0"]
    assert greedy["same_answers"] == 2
    assert list(greedy["by_category"]) == ["writing", "qa"]
    assert greedy["speedup"]["low"] <= greedy["speedup"]["median"]
    assert greedy["drafter_bytes"]["state"] > 0
    weights = stamps.file_digests(stamps.find_model(ask().target))["model.safetensors"]
    assert record["files"]["target"]["model.safetensors"] == weights
    _, again, _ = measured(ask(begun=record))
    assert calls == ["greedy", "rejection", "block", "coupled", "block"]
    assert again["rows"]["suffix, greedy, T=0"] == greedy
    with pytest.raises(InputError, match="expected the prompts that None was begun with"):
        measured(ask(begun=record | {"prompts_digest": "another"}))
    check_page(record)


def check_page(record):
    """Checks the page of that record, which has a failed row."""
    flags = {"target": "/a/folder/tiny", "draft": None, "suite": "open", "max_new_tokens": 6,
             "repeats": 1, "dtype": "float32", "prompts_file": "/a/prompts.jsonl"}  # fmt: skip
    made = {"flags": flags, "processor": "a CPU", "date": "2026-11-27", "versions": {"jax": "1"}}
    page = to_markdown(leaderboard_page(record | made))
    assert "/a/" not in page
    assert "--target=tiny" in page
    assert "`suffix, block, T=1` failed: MemoryError: too much" in page
    (line,) = (text for text in page.splitlines() if text.startswith("| `suffix:2` | greedy"))
    assert "| 2 of 2 |" in line
    assert page.count("| writing |") == 2
    text = leaderboard_text(record)
    assert "suffix:2, coupled, T=1" in text
    assert text.endswith("suffix, block, T=1: MemoryError: too much")


def test_time_that_is_over_leaves_the_rest_to_the_same_command(ask, capsys):
    """Guards against a record that counts as complete, which would be begun anew."""
    last, record, _ = measured(ask(minutes=0.0))
    assert not last.is_complete
    assert record["rows"] == {}
    assert "--minutes=0 have passed; the same command continues\n" in capsys.readouterr().err


def test_prompts_without_categories_are_refused(ask, tmp_path):
    (tmp_path / "plain.jsonl").write_text('{"prompt": "a", "category": "qa"}\n{"prompt": "b"}\n')
    with pytest.raises(InputError, match=r"^expected a category of each prompt of .*plain.jsonl"):
        measured(ask(prompts_file=str(tmp_path / "plain.jsonl")))


def test_rows_are_audited_once_for_the_same_files(ask, monkeypatch):
    """A finding is looked up; one that failed shows; a failing audit stops no other audit."""
    monkeypatch.setattr(suite, "_measure", lambda *_: {"speedup": None})
    monkeypatch.setattr(suite, "leaderboard_text", lambda _: "")
    audited = []

    def run_checks(subject, **_):
        audited.append(subject.acceptance)
        if subject.acceptance == "coupled":
            raise RuntimeError("no")
        yield Check("seeds", subject.acceptance == "block", "", {})

    monkeypatch.setattr(checks, "run_checks", run_checks)
    last, record, _ = measured(ask(audit_rows=8))
    assert last.is_complete
    rejection, block, coupled = (
        record["rows"][f"suffix, {rule}, T=1"]["audit"]
        for rule in ("rejection", "block", "coupled")
    )
    assert (rejection["is_lossless"], rejection["failed"]) == (False, ["seeds"])
    assert (block["is_lossless"], block["failed"], block["num_rows"]) == (True, [], 8)
    assert coupled == {"error": "RuntimeError: no"}
    _, record, _ = measured(ask(audit_rows=8))
    assert audited == ["rejection", "block", "coupled", "coupled"]
    _, record, _ = measured(ask(audit_rows=0))  # looks up alone
    assert record["rows"]["suffix, block, T=1"]["audit"] == block
    assert "audit" not in record["rows"]["suffix, coupled, T=1"]
    assert len(audited) == 4


def test_more_rows_decide_an_inconclusive_audit(ask, monkeypatch):
    """Guards against a lossless row that counts as one that failed, and stays so."""
    monkeypatch.setattr(suite, "_measure", lambda *_: {"speedup": None})
    monkeypatch.setattr(suite, "leaderboard_text", lambda _: "")
    audited = []

    def run_checks(subject, num_rows, **_):
        audited.append(num_rows)
        yield Check("negative control", num_rows >= 8, "", {})

    monkeypatch.setattr(checks, "run_checks", run_checks)
    cells = []
    for num_rows in (4, 2, 8, 16):
        _, record, _ = measured(ask(audit_rows=num_rows))
        audit = record["rows"]["suffix, block, T=1"]["audit"]
        cells.append(audit_cell(audit))
    assert cells == ["inconclusive, 4 rows"] * 2 + ["1 of 1, 8 rows"] * 2
    assert audited == [4] * 3 + [8] * 3


def test_a_file_that_has_changed_has_another_digest(tmp_path):
    """Each is read once, unless it was written anew."""
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    first = stamps.file_digests(path)
    assert stamps.file_digests(path) == first
    path.write_bytes(b"two")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert stamps.file_digests(path) != first


def test_a_finding_is_of_these_files_and_settings(ask, folder, tmp_path):
    """Guards against a stamp that another model, rule or temperature would get."""
    ask()
    model = make_model(name=str(folder))
    settings = SamplingParams(8, temperature=1.0)
    subject = Subject(model, None, "prompt_lookup", 2, "block", settings)
    assert stamps.find_stamp(subject) is None
    stamp = stamps.keep_stamp(subject, [Check("seeds", True, "", {})], 64)
    assert stamp["is_lossless"]
    assert stamps.find_stamp(subject) == stamp
    longer = dataclasses.replace(settings, max_new_tokens=9, seed=3)  # says nothing else
    assert stamps.find_stamp(dataclasses.replace(subject, settings=longer)) == stamp
    second = save_folder(tmp_path / "other", num_layers=1, seed=1)
    for changes in (
        {"acceptance": "rejection"},
        {"drafter": "recycle"},
        {"num_draft_tokens": "auto"},
        {"settings": dataclasses.replace(settings, temperature=0.9)},
        {"target": make_model(name=str(second))},
        {"target": dataclasses.replace(model, quantization="int8")},
        {"draft": dataclasses.replace(model, quantization="packed_a8")},
    ):
        assert stamps.find_stamp(dataclasses.replace(subject, **changes)) is None, changes
    lossy = dataclasses.replace(subject, acceptance="typical")
    assert not stamps.keep_stamp(lossy, [Check("seeds", True, "", {})], 64)["is_lossless"]


def test_a_smaller_audit_overwrites_no_larger_finding(ask, folder):
    """Guards against 64 rows that replace 4,096, and against a failure that is hidden."""
    ask()
    settings = SamplingParams(8, temperature=1.0)
    subject = Subject(make_model(name=str(folder)), None, "prompt_lookup", 2, "coupled", settings)
    passed, failed = Check("seeds", True, "", {}), Check("seeds", False, "", {})
    unsure = Check("negative control", False, "", {})

    def kept_rows(check, num_rows):
        stamp = stamps.keep_stamp(subject, [check], num_rows)
        assert stamps.find_stamp(subject) == stamp
        return stamp["num_rows"]

    assert kept_rows(unsure, 512) == 512
    assert kept_rows(passed, 64) == 64
    assert kept_rows(passed, 4096) == 4096
    assert kept_rows(passed, 64) == 4096
    assert kept_rows(unsure, 64) == 4096
    assert kept_rows(failed, 64) == 64
    assert kept_rows(passed, 64) == 64
