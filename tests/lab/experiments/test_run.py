"""Experiments from beginning to end, in this process."""

import contextlib
import io
import json
import shutil

import pytest

from jspec.common.errors import InputError, WorkdirError
from jspec.common.journal import Journal
from jspec.lab.experiments import workers
from jspec.lab.experiments.run import run_experiment
from jspec.lab.experiments.workers import GenerateWorker
from jspec.weights.resolver import load_model
from tests.lab.experiments.tiny import TINY_PROMPTS, done_cells, plain_config, without_times
from tests.programs import read_lines, write_lines

_ANSWER_FIELDS = {
    "prompt", "turn", "category", "num_prompt_tokens", "token_ids", "text", "finish_reason",
    "num_round_tokens", "prefill_seconds", "decode_seconds", "device_seconds", "rounds",
}  # fmt: skip
PLAIN = {"plain": {"drafter": "none"}}
LOOKUP = {"lookup": {"drafter": "prompt_lookup", "num_draft_tokens": 3}}
RANDOM = {"random": {"drafter": "random", "num_draft_tokens": 2}}
COLD = {"T=0": {}}
NUM_CELLS = 96


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """Returns the config of a run, its workdir, and what it printed."""
    home = tmp_path_factory.mktemp("whole")
    prompts, work = write_lines(home / "prompts.jsonl", TINY_PROMPTS), home / "work"
    # Plain decoding would refuse the draft temperature, which is for the methods that draw.
    warm = {"T=1": {"temperature": 1.0, "draft_temperature": 0.5}}
    plain = plain_config(
        folder, prompts, methods=PLAIN | LOOKUP | RANDOM, settings=COLD | warm, repeats=2,
        seeds=[0, 1], turns=0,
    )  # fmt: skip
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        assert run_experiment(plain, str(work), ["python", "x"]) == 0
    return plain, work, output.getvalue(), errors.getvalue()


def test_a_run_and_its_record(whole):
    """Guards the contract of a workdir, and greedy parity of what it holds (invariant 2)."""
    plain, work, output, errors = whole
    assert output == f"{work}: {NUM_CELLS} of {NUM_CELLS} cells are done\n"
    assert errors.splitlines()[-1] == f"{NUM_CELLS} of {NUM_CELLS} cells"
    assert json.loads((work / "config.json").read_text()) == plain
    assert not (work / "costs.json").exists()  # which nothing asks for
    lines = read_lines(work / "results.jsonl")
    assert len(lines) == NUM_CELLS
    (run,) = read_lines(work / "runs.jsonl")
    assert {"run", "started", "argv", "environment", "git", "described"} <= set(run)
    assert (run["argv"], run["num_cells"]) == (["python", "x"], NUM_CELLS)
    assert run["described"]["lookup"]["num_draft_tokens"] == 3
    assert run["described"]["plain"]["drafter"] == "none"
    for line in lines:
        assert set(line) == {"cell", "key", "run", "status", "error", "record"}
        assert (line["run"], line["status"], line["error"]) == (run["run"], "done", None)
        assert set(line["record"]) == {"seconds", "answers"}
        (prompt,) = line["key"]["prompts"]
        answers = line["record"]["answers"]
        assert [answer["turn"] for answer in answers] == list(range(1 + (prompt == 3)))
        assert sum(answer["decode_seconds"] for answer in answers) < line["record"]["seconds"]
        for answer in answers:
            assert set(answer) == _ANSWER_FIELDS
            assert (answer["prompt"], answer["category"]) == (prompt, "aabb"[prompt])
            assert answer["num_round_tokens"] == len(answer["token_ids"]) - 1
            kept = sum(num_accepted for _, num_accepted, _ in answer["rounds"])
            assert kept + len(answer["rounds"]) >= answer["num_round_tokens"]
            assert answer["decode_seconds"] > 0
            if line["key"]["method"] != "lookup":
                is_random = line["key"]["method"] == "random"
                assert any(proposed for proposed, *_ in answer["rounds"]) == is_random


def test_answers_are_those_of_plain_decoding_and_of_their_seeds(whole):
    """Repeats repeat the same draw; prompt k with seed s is drawn with seed 1000 s + k."""
    answers = {name: record["answers"] for name, record in done_cells(whole[1]).items()}
    tokens = {name: [one["token_ids"] for one in said] for name, said in answers.items()}
    for name in answers:
        method, setting, *_ = name.split("/")
        if setting == "T=0":
            assert tokens[name] == tokens[name.replace(method, "plain", 1)]
        same = answers[name.replace("repeat 1", "repeat 0")]
        assert without_times(answers[name]) == without_times(same)
    place = "plain/T=1/batch 1/prompt 0/seed {}/repeat 0"
    assert tokens[place.format(0)] != tokens[place.format(1)]


def test_turns_go_on_with_the_models_own_answers(whole, folder):
    """Guards against a second turn without the first one's answer."""
    record = done_cells(whole[1])["lookup/T=0/batch 1/prompt 3/seed 0/repeat 0"]
    first, second = record["answers"]
    said = f"[u]the cat and the dog[a]{first['text']}[u]and the cow[a]"
    expected = load_model(str(folder), dtype="float32").tokenizer.encode(said, add_bos=False)
    assert second["num_prompt_tokens"] == len(expected) + 1  # BOS


def test_a_finished_run_is_not_repeated(whole, monkeypatch):
    """Guards against models loaded, and cells done, for nothing."""
    plain, work, *_ = whole
    before = (work / "results.jsonl").read_bytes()
    monkeypatch.setattr(GenerateWorker, "run", lambda *_: pytest.fail("a cell is done again"))
    assert run_experiment(plain, str(work)) == 0
    assert (work / "results.jsonl").read_bytes() == before
    assert len(read_lines(work / "runs.jsonl")) == 1


def test_a_run_that_was_broken_off_ends_as_if_undisturbed(whole, tmp_path, monkeypatch, capsys):
    """A full disk is no failure of a cell; a torn line is done again; other prompts are refused."""
    write, count = Journal._write, [0]

    def write_some(self, file, line):
        count[0] += 1
        if count[0] > 10:
            raise WorkdirError("cannot write: No space left on device")
        write(self, file, line)

    prompts, work = write_lines(tmp_path / "prompts.jsonl", TINY_PROMPTS), tmp_path / "work"
    plain = whole[0] | {"prompts_file": prompts, "methods": RANDOM}
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "_write", write_some)
        with pytest.raises(WorkdirError, match="No space left"):
            run_experiment(plain, str(work))
    results = work / "results.jsonl"
    assert len(done_cells(work)) == 9  # one line was that of the run
    results.write_bytes(results.read_bytes()[:-20])
    assert run_experiment(plain, str(work)) == 0
    assert "its last line is torn, and cut off" in capsys.readouterr().err
    expected = {n: cell for n, cell in done_cells(whole[1]).items() if n.startswith("random/")}
    assert len(expected) == NUM_CELLS / 3
    assert without_times(done_cells(work)) == without_times(expected)
    write_lines(tmp_path / "prompts.jsonl", [{"prompt": "something else"}])
    with pytest.raises(WorkdirError, match=r"have changed since .* was begun"):
        run_experiment(plain, str(work))


def test_a_batch_says_what_its_rows_say_alone(whole, tmp_path):
    """Invariant 5 through the runner, with a last batch that is not full."""
    prompts = write_lines(tmp_path / "p.jsonl", TINY_PROMPTS[:3])
    only = {"T=1": {"temperature": 1.0}}
    once = {"seeds": [0], "repeats": 1, "batch_sizes": [2]}
    plain = whole[0] | {"prompts_file": prompts, "methods": LOOKUP, "settings": only} | once
    assert run_experiment(plain, str(tmp_path / "work")) == 0
    alone, batches = done_cells(whole[1]), done_cells(tmp_path / "work").values()
    answers = {one["prompt"]: one["token_ids"] for cell in batches for one in cell["answers"]}
    assert len(answers) == 3
    for prompt, tokens in answers.items():
        record = alone[f"lookup/T=1/batch 1/prompt {prompt}/seed 0/repeat 0"]
        assert record["answers"][0]["token_ids"] == tokens


def test_a_failing_cell_is_recorded_and_the_run_goes_on(config, tmp_path, capsys):
    """Guards against a night's run ended by one long prompt."""
    texts = [{"prompt": "ab"}, {"prompt": "x" * 300}, {"prompt": "cd"}]
    prompts, work = write_lines(tmp_path / "p.jsonl", texts), tmp_path / "work"
    plain = config(prompts_file=prompts, methods=PLAIN, settings=COLD)
    assert run_experiment(plain, str(work)) == 1
    output, errors = capsys.readouterr()
    assert output == f"{work}: 2 of 3 cells are done, 1 failed\n"
    assert "failed: InputError: expected a prompt of fewer tokens than the context's 200" in errors
    lines = read_lines(work / "results.jsonl")
    assert [one["status"] for one in lines] == ["done", "failed", "done"]
    assert lines[1]["record"] is None
    assert "expected a prompt of fewer tokens" in lines[1]["error"]
    assert run_experiment(plain, str(work)) == 1  # it is tried again, the others are not
    assert len(read_lines(work / "results.jsonl")) == 4


def test_a_method_that_cannot_be_made_fails_alone_and_succeeds_later(config, tmp_path, folder):
    """Guards against a damaged draft that ends the run, and failed cells that stay failed."""
    draft, work = tmp_path / "draft", tmp_path / "work"
    draft.mkdir()
    methods = PLAIN | {"model": {"drafter": "model", "num_draft_tokens": 2, "draft": str(draft)}}
    plain = config(methods=methods, settings=COLD, num_prompts=1)
    assert run_experiment(plain, str(work)) == 1
    (run,) = read_lines(work / "runs.jsonl")
    assert "no config.json in the folder" in run["described"]["model"]["error"]
    shutil.copytree(folder, draft, dirs_exist_ok=True)
    assert run_experiment(plain, str(work)) == 0
    answers = [record["answers"][0]["token_ids"] for record in done_cells(work).values()]
    assert len(answers) == 2
    assert answers[0] == answers[1]


def test_a_table_is_counted_once(config, tmp_path, monkeypatch):
    """A disk without space for it ends the run, as no cell could be measured; answers are kept."""
    methods = {"bigram": {"drafter": "bigram", "num_draft_tokens": 2}}
    source = write_lines(tmp_path / "table.jsonl", [{"prompt": "ab"}, {"prompt": "one two"}])
    table = {"prompts_file": source, "num_tokens": 50, "max_new_tokens": 12}
    plain = config(methods=methods, num_prompts=1, table=table, settings=COLD)
    work = tmp_path / "work"

    def fill(*_):
        raise InputError("table.safetensors cannot be written: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(workers, "save_table", fill)
        with pytest.raises(WorkdirError, match="No space left"):
            run_experiment(plain, str(work))
    assert not done_cells(work)
    answers = (work / "table_answers.jsonl").read_bytes()
    assert sum(len(one["token_ids"]) for one in read_lines(work / "table_answers.jsonl")) >= 50
    assert run_experiment(plain, str(work)) == 0
    assert (work / "table_answers.jsonl").read_bytes() == answers
    options = read_lines(work / "runs.jsonl")[-1]["described"]["bigram"]["drafter_options"]
    assert options["draft_table"] == str(work / "table.safetensors")
    (record,) = done_cells(work).values()
    assert any(proposed for proposed, *_ in record["answers"][0]["rounds"])


def test_a_target_that_cannot_be_loaded_ends_the_run(config, tmp_path):
    """Guards against cells that fail one after another for a reason that all of them have."""
    empty, work = tmp_path / "empty", tmp_path / "work"
    empty.mkdir()
    with pytest.raises(InputError, match=r"no config\.json in the folder"):
        run_experiment(config(target=str(empty)), str(work))
    assert not read_lines(work / "results.jsonl")
    assert not read_lines(work / "runs.jsonl")


def method_of(drafter, **fields):
    return {"methods": {"a": {"drafter": drafter, **fields}}}


MISSPELLED = [
    ({"target": "nowhere"}, "target: no model 'nowhere'"),
    ({"target": "random:nothing"}, "target: expected random:<preset>"),
    ({"prompts_file": "nowhere"}, "No such file"),
    ({"mesh": "modle:2"}, "mesh: expected a mesh such as data:2,model:4, got 'modle:2'"),
    (method_of("model", draft="./nowhere"), r"methods\.a\.draft: no model '\./nowhere'"),
    (method_of("model", draft="no.gguf"), r"methods\.a\.draft: no\.gguf: cannot be read: No such"),
    (method_of("model", draft="no") | {"kind": "estimate"}, r"methods\.a\.draft: no model 'no'"),
    (
        method_of("bigram", options={"draft_table": "no"}),
        r"methods\.a\.options\.draft_table: no such file: no",
    ),
    (
        method_of("eagle", options={"draft_head": "no"}),
        r"methods\.a\.options\.draft_head: no: no such folder",
    ),
    (
        method_of("bigram") | {"table": {"prompts_file": "no"}},
        r"cannot read table\.prompts_file no: No such file",
    ),
    (
        {"kind": "predict", "predict": {"a": {"draft": "nowhere"}}},
        r"predict\.a\.draft: expected a preset among .* or a folder, got 'nowhere'",
    ),
]


@pytest.mark.parametrize(("change", "message"), MISSPELLED)
def test_a_misspelled_name_ends_a_run_before_it_begins(config, tmp_path, change, message):
    """Guards against hours of a run before a method fails for a letter, and against a workdir left
    behind that the corrected config may not use.
    """
    with pytest.raises(InputError, match=message) as caught:
        run_experiment(config(**change), str(tmp_path / "work"))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "work").exists()


def test_raw_prompts(config, tmp_path):
    """Guards against a chat template around a function that is to be completed."""
    plain = config(methods=PLAIN, settings=COLD, num_prompts=1, max_new_tokens=2, chat="no")
    assert run_experiment(plain, str(tmp_path / "work")) == 0
    (record,) = done_cells(tmp_path / "work").values()
    assert record["answers"][0]["num_prompt_tokens"] == len(TINY_PROMPTS[0]["prompt"])
