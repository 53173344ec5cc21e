"""Experiments from beginning to end, in this process."""

import json
import shutil

import pytest

from jspec.common.errors import InputError, WorkdirError
from jspec.lab.experiments.run import run_experiment
from jspec.lab.experiments.workers import GenerateWorker
from tests.lab.experiments.tiny import done_cells, read_lines, without_times, write_prompts
from tests.tiny_models import save_folder

_ANSWER_FIELDS = {
    "prompt", "turn", "category", "num_prompt_tokens", "token_ids", "text", "finish_reason",
    "num_round_tokens", "prefill_seconds", "decode_seconds", "device_seconds", "rounds",
}  # fmt: skip


@pytest.fixture(scope="module")
def module_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def test_a_run_and_its_record(config, tmp_path, capsys):
    """Guards the contract of a workdir, and greedy parity of what it holds (invariant 2)."""
    plain, work = config(repeats=2), tmp_path / "work"
    assert run_experiment(plain, str(work), ["python", "x"]) == 0
    output, errors = capsys.readouterr()
    assert output == f"{work}: 32 of 32 cells are done\n"
    assert errors.splitlines()[-1] == "32 of 32 cells"
    assert json.loads((work / "config.json").read_text()) == plain
    lines = read_lines(work / "results.jsonl")
    assert len(lines) == 32
    (run,) = read_lines(work / "runs.jsonl")
    assert {"run", "started", "argv", "environment", "git", "described"} <= set(run)
    assert run["argv"] == ["python", "x"]
    assert run["num_cells"] == 32
    assert run["described"]["lookup"]["num_draft_tokens"] == 3
    assert run["described"]["plain"]["drafter"] == "none"
    for line in lines:
        assert set(line) == {"cell", "key", "run", "status", "error", "record"}
        assert (line["run"], line["status"], line["error"]) == (run["run"], "done", None)
        assert set(line["record"]) == {"seconds", "answers"}
        (answer,) = line["record"]["answers"]
        assert set(answer) == _ANSWER_FIELDS
        assert answer["prompt"] == line["key"]["prompts"][0]
        assert answer["category"] == "aabb"[answer["prompt"]]
        assert answer["num_round_tokens"] == len(answer["token_ids"]) - 1
        kept = sum(num_accepted for _, num_accepted, _ in answer["rounds"])
        assert kept + len(answer["rounds"]) >= answer["num_round_tokens"]
        assert 0 < answer["decode_seconds"] < line["record"]["seconds"] < 60
    by_place = {(line["cell"]): line["record"]["answers"][0] for line in lines}
    for name, answer in by_place.items():
        if name.startswith("lookup/T=0"):
            plain_answer = by_place[name.replace("lookup", "plain", 1)]
            assert answer["token_ids"] == plain_answer["token_ids"]
        same = by_place[name.replace("repeat 1", "repeat 0")]
        assert without_times(answer) == without_times(same)  # repeats repeat the same draw


def test_a_finished_run_is_not_repeated(config, tmp_path, capsys, monkeypatch):
    """Guards against models loaded, and cells done, for nothing."""
    plain, work = config(num_prompts=1), str(tmp_path / "work")
    assert run_experiment(plain, work) == 0
    before = (tmp_path / "work" / "results.jsonl").read_bytes()
    monkeypatch.setattr(GenerateWorker, "run", lambda *_: pytest.fail("a cell is done again"))
    assert run_experiment(plain, work) == 0
    assert (tmp_path / "work" / "results.jsonl").read_bytes() == before
    assert len(read_lines(tmp_path / "work" / "runs.jsonl")) == 1


def test_seeds_make_the_difference(config, tmp_path):
    """Prompt k with seed s is drawn with seed 1000 s + k: other seeds, other samples."""
    methods = {"plain": {"drafter": "none"}}
    changes = {"seeds": [0, 1], "num_prompts": 1, "methods": methods, "max_new_tokens": 20}
    run_experiment(config(**changes), str(tmp_path / "work"))
    tokens = {
        name: record["answers"][0]["token_ids"]
        for name, record in done_cells(tmp_path / "work").items()
    }
    by_seed = [[t for name, t in tokens.items() if f"{s}/seed {k}" in name and "T=1" in name]
               for s in ("prompt 0",) for k in (0, 1)]  # fmt: skip
    assert by_seed[0] != by_seed[1]


def test_turns_go_on_with_the_models_own_answers(config, tmp_path, folder):
    """Guards against a second turn without the first one's answer, and times left out."""
    from jspec.weights.resolver import load_model

    methods = {"lookup": {"drafter": "prompt_lookup", "num_draft_tokens": 3}}
    plain = config(turns=0, methods=methods, settings={"T=0": {}})
    assert run_experiment(plain, str(tmp_path / "work")) == 0
    answers = [one for r in done_cells(tmp_path / "work").values() for one in r["answers"]]
    assert [(one["prompt"], one["turn"]) for one in answers] == [(0, 0), (1, 0), (2, 0),
                                                                 (3, 0), (3, 1)]  # fmt: skip
    first, second = answers[3:]
    said = f"[u]the cat and the dog[a]{first['text']}[u]and the cow[a]"
    expected = load_model(str(folder), dtype="float32").tokenizer.encode(said, add_bos=False)
    assert second["num_prompt_tokens"] == len(expected) + 1  # BOS


def test_a_draft_temperature_is_for_the_methods_that_draw(config, tmp_path):
    """Guards against a setting that plain decoding refuses, although another method reads it."""
    methods = {"plain": {"drafter": "none"}, "random": {"drafter": "random", "num_draft_tokens": 2}}
    plain = config(
        methods=methods, settings={"T=1": {"temperature": 1.0, "draft_temperature": 0.5}}
    )
    assert run_experiment(plain, str(tmp_path / "work")) == 0
    cells = done_cells(tmp_path / "work")
    assert len(cells) == 8
    rounds = [a["rounds"] for one in cells.values() for a in one["answers"]]
    assert sum(any(proposed for proposed, *_ in one) for one in rounds) == 4


def test_a_batch_says_what_its_rows_say_alone(config, tmp_path):
    """Invariant 5 through the runner, with a last batch that is not full."""
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": t} for t in ("ab", "cd", "efg")])
    plain = config(batch_sizes=[1, 2], prompts_file=prompts)
    assert run_experiment(plain, str(tmp_path / "work")) == 0
    tokens = {1: {}, 2: {}}
    for line in read_lines(tmp_path / "work" / "results.jsonl"):
        key = line["key"]
        for answer in line["record"]["answers"]:
            place = key["method"], key["setting"], answer["prompt"]
            tokens[key["batch_size"]][place] = answer["token_ids"]
    assert len(tokens[1]) == 12
    assert tokens[1] == tokens[2]


def test_a_failing_cell_is_recorded_and_the_run_goes_on(config, tmp_path, capsys):
    """Guards against a night's run ended by one long prompt."""
    texts = [{"prompt": "ab"}, {"prompt": "x" * 300}, {"prompt": "cd"}]
    prompts, work = write_prompts(tmp_path / "p.jsonl", texts), tmp_path / "work"
    plain = config(prompts_file=prompts, settings={"T=0": {}})
    assert run_experiment(plain, str(work)) == 2
    output, errors = capsys.readouterr()
    assert output == f"{work}: 4 of 6 cells are done, 2 failed\n"
    assert "failed: InputError: expected a prompt of fewer tokens than the context's 200" in errors
    lines = read_lines(work / "results.jsonl")
    assert [one["status"] for one in lines] == ["done", "done", "failed", "failed", "done", "done"]
    assert lines[2]["record"] is None
    assert "expected a prompt of fewer tokens" in lines[2]["error"]
    assert run_experiment(plain, str(work)) == 2  # they are tried again, the others are not
    assert len(read_lines(work / "results.jsonl")) == 8


def test_a_method_that_cannot_be_made_fails_alone_and_succeeds_later(
    config, tmp_path, folder, capsys
):
    """Guards against a damaged draft that ends the run, and failed cells that stay failed."""
    draft, work = tmp_path / "draft", tmp_path / "work"
    draft.mkdir()
    methods = {"plain": {"drafter": "none"},
            "model": {"drafter": "model", "num_draft_tokens": 2, "draft": str(draft)}}  # fmt: skip
    plain = config(methods=methods, settings={"T=0": {}}, num_prompts=2)
    assert run_experiment(plain, str(work)) == 2
    assert len(done_cells(work)) == 2
    (run,) = read_lines(work / "runs.jsonl")
    assert "no config.json in the folder" in run["described"]["model"]["error"]
    shutil.copytree(folder, draft, dirs_exist_ok=True)
    assert run_experiment(plain, str(work)) == 0
    records = done_cells(work)
    assert len(records) == 4
    tokens = {name: record["answers"][0]["token_ids"] for name, record in records.items()}
    assert all(tokens[name] == tokens[name.replace("model", "plain", 1)] for name in tokens)


def test_a_table_is_counted_once(config, tmp_path, monkeypatch):
    """Guards against a table for each process, and answers lost when one is killed."""
    from jspec.lab.experiments import workers

    methods = {"plain": {"drafter": "none"},
            "bigram": {"drafter": "bigram", "num_draft_tokens": 2}}  # fmt: skip
    source = write_prompts(tmp_path / "table.jsonl", [{"prompt": "ab"}, {"prompt": "one two"}])
    table = {"prompts_file": source, "num_tokens": 50, "max_new_tokens": 12}
    plain = config(methods=methods, num_prompts=1, table=table)
    work = tmp_path / "work"

    class Killed(BaseException):
        pass

    def die(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(workers, "save_table", die)
        with pytest.raises(Killed):
            run_experiment(plain, str(work))
    answers = (work / "table_answers.jsonl").read_bytes()
    assert sum(len(one["token_ids"]) for one in read_lines(work / "table_answers.jsonl")) >= 50
    assert run_experiment(plain, str(work)) == 0
    assert (work / "table_answers.jsonl").read_bytes() == answers
    (run,) = read_lines(work / "runs.jsonl")
    options = run["described"]["bigram"]["drafter_options"]
    assert options["draft_table"] == str(work / "table.safetensors")
    lines = read_lines(work / "results.jsonl")
    assert sum(r[0] for one in lines if one["key"]["method"] == "bigram"
               for answer in one["record"]["answers"] for r in answer["rounds"]) > 0  # fmt: skip


def test_prompts_that_have_changed_are_refused(config, tmp_path, prompts_file):
    """Guards against results of two sets of prompts in one file."""
    plain, work = config(), str(tmp_path / "work")
    run_experiment(plain, work)
    write_prompts(tmp_path / "prompts.jsonl", [{"prompt": "something else"}])
    with pytest.raises(WorkdirError, match=r"have changed since .* was begun"):
        run_experiment(plain, work)


def test_what_ends_a_run_before_it_begins(config, tmp_path):
    """Guards against cells that fail one after another for a reason that all of them have."""
    work = tmp_path / "work"
    with pytest.raises(InputError, match="No such file"):
        run_experiment(config(prompts_file=str(tmp_path / "none")), str(work))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match=r"no config\.json in the folder"):
        run_experiment(config(target=str(empty)), str(tmp_path / "other"))
    assert not read_lines(tmp_path / "other" / "results.jsonl")
    assert not read_lines(tmp_path / "other" / "runs.jsonl")
    assert not work.exists()


MISSPELLED = {
    "target": ({"target": "nowhere"}, "target: no model 'nowhere'"),
    "random": ({"target": "random:nothing"}, "target: expected random:<preset>"),
    "draft": (
        {"methods": {"a": {"drafter": "model", "draft": "./nowhere"}}},
        r"methods\.a\.draft: no model '\./nowhere'",
    ),
    "gguf": (
        {"methods": {"a": {"drafter": "model", "draft": "nowhere.gguf"}}},
        r"methods\.a\.draft: nowhere\.gguf: cannot be read: No such file",
    ),
    "draft of an estimate": (
        {"kind": "estimate", "methods": {"a": {"drafter": "model", "draft": "nowhere"}}},
        r"methods\.a\.draft: no model 'nowhere'",
    ),
    "table": (
        {"methods": {"a": {"drafter": "bigram", "options": {"draft_table": "nowhere"}}}},
        r"methods\.a\.options\.draft_table: no such file: nowhere",
    ),
    "head": (
        {"methods": {"a": {"drafter": "eagle", "options": {"draft_head": "nowhere"}}}},
        r"methods\.a\.options\.draft_head: nowhere: no such folder",
    ),
    "prompts of the table": (
        {"methods": {"a": {"drafter": "bigram"}}, "table": {"prompts_file": "nowhere"}},
        r"cannot read table\.prompts_file nowhere: No such file",
    ),
    "mesh": ({"mesh": "modle:2"}, "mesh: expected a mesh such as data:2,model:4, got 'modle:2'"),
    "pair": (
        {"kind": "predict", "predict": {"a": {"draft": "nowhere"}}},
        r"predict\.a\.draft: expected a preset among .* or a folder, got 'nowhere'",
    ),
}


@pytest.mark.parametrize("what", MISSPELLED)
def test_a_misspelled_name_ends_a_run_before_it_begins(config, tmp_path, what):
    """Guards against hours of a run before a method fails for a letter, and against a workdir left
    behind that the corrected config may not use.
    """
    change, message = MISSPELLED[what]
    with pytest.raises(InputError, match=message) as caught:
        run_experiment(config(**change), str(tmp_path / "work"))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "work").exists()


def test_prompts_are_found_from_another_folder(config, tmp_path, monkeypatch):
    """Guards against a config that works in the clone alone; what is here comes first."""
    base, here = tmp_path / "clone", tmp_path / "here"
    for folder in (base / "configs", here):
        folder.mkdir(parents=True)
    monkeypatch.chdir(here)
    plain = config(prompts_file="configs/p.jsonl", settings={"T=0": {}})
    with pytest.raises(InputError) as caught:
        run_experiment(plain, "work", base=base)
    message = f"prompts file configs/p.jsonl: No such file, neither in {here} nor in {base}"
    assert message in str(caught.value)
    write_prompts(base / "configs" / "p.jsonl", [{"prompt": "ab"}])
    assert run_experiment(plain, "work", base=base) == 0
    assert json.loads((here / "work" / "config.json").read_text()) == plain
    (here / "configs").mkdir()
    write_prompts(here / "configs" / "p.jsonl", [{"prompt": "ab"}, {"prompt": "cd"}])
    with pytest.raises(WorkdirError, match="have changed since"):
        run_experiment(plain, "work", base=base)
    assert run_experiment(plain, "other", base=base) == 0
    assert len(done_cells(here / "other")) == 4


def test_one_cell_is_one(config, tmp_path, capsys):
    """Guards against "1 cells"."""
    methods = {"plain": {"drafter": "none"}}
    plain = config(methods=methods, settings={"T=0": {}}, num_prompts=1)
    assert run_experiment(plain, str(tmp_path / "work")) == 0
    output, errors = capsys.readouterr()
    assert output == f"{tmp_path / 'work'}: 1 of 1 cell is done\n"
    assert errors.splitlines()[-1] == "1 of 1 cell"


def test_a_full_disk_ends_the_run(config, tmp_path, monkeypatch):
    """Guards against a full disk recorded as the failure of cell after cell."""
    from jspec.common.journal import Journal

    write, count = Journal._write, [0]

    def write_some(self, file, line):
        count[0] += 1
        if count[0] > 3:
            raise WorkdirError("cannot write: No space left on device")
        write(self, file, line)

    plain, work = config(), tmp_path / "work"
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "_write", write_some)
        with pytest.raises(WorkdirError, match="No space left"):
            run_experiment(plain, str(work))
    assert len(done_cells(work)) == 2  # one line was that of the run
    assert run_experiment(plain, str(work)) == 0
    assert len(done_cells(work)) == 16


def test_a_disk_that_has_no_space_for_the_table_ends_the_run(config, tmp_path, monkeypatch):
    """Guards against the failure of every cell of the method, one after another."""
    from jspec.lab.experiments import workers

    def fill(*_):
        raise InputError("table.safetensors cannot be written: No space left on device")

    source = write_prompts(tmp_path / "table.jsonl", [{"prompt": "ab"}])
    table = {"prompts_file": source, "num_tokens": 10, "max_new_tokens": 12}
    methods = {"bigram": {"drafter": "bigram", "num_draft_tokens": 2}}
    monkeypatch.setattr(workers, "save_table", fill)
    with pytest.raises(WorkdirError, match="No space left"):
        run_experiment(config(methods=methods, num_prompts=1, table=table), str(tmp_path / "work"))
    assert not done_cells(tmp_path / "work")


def test_raw_prompts(config, tmp_path):
    """Guards against a chat template around a function that is to be completed."""
    for chat in ("yes", "no"):
        plain = config(chat=chat, num_prompts=1, settings={"T=0": {}})
        assert run_experiment(plain, str(tmp_path / chat)) == 0
    counts = [
        next(iter(done_cells(tmp_path / chat).values()))["answers"][0]["num_prompt_tokens"]
        for chat in ("yes", "no")
    ]
    assert counts == [1 + len("[u]one two one two one[a]"), len("one two one two one")]


def test_a_model_without_a_template_may_be_asked_for_none(config, tmp_path):
    """Guards against a workdir full of failures where the config wants what the model lacks."""
    bare = save_folder(tmp_path / "bare")
    assert run_experiment(config(target=str(bare), num_prompts=1), str(tmp_path / "auto")) == 0
