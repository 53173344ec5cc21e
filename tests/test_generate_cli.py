"""python -m jspec.generate from end to end."""

import io
import json
import os
import re
import signal
import subprocess
import sys

import jax
import pytest

from jspec.common.memory import device_name
from jspec.lab.benchmarking.compare import format_comparison
from tests.programs import (
    TEMPLATE,
    as_users,
    call_generate,
    command,
    environment,
    read_lines,
    run,
    run_many,
    write_lines,
)
from tests.tiny_models import save_folder

_RESULT_FIELDS = {
    "error", "beams",
    "index", "prompt", "prompt_token_ids", "token_ids", "text", "finish_reason", "seed",
    "logprobs", "raw_logprobs", "token_logprobs", "prompt_logprobs", "category",
    "settings", "stats",
}  # fmt: skip
_STATS_FIELDS = {
    "num_rounds", "num_target_calls", "num_proposed", "num_accepted", "acceptance_rate",
    "tokens_per_target_call", "target_calls_per_token", "accepted_histogram", "accepted_per_round",
    "prefill_seconds",
    "decode_seconds", "compile_seconds", "tokens_per_second", "num_wasted", "proposed_per_round",
    "acceptance_by_position", "conditional_acceptance_by_position", "by_drafter",
    "device_seconds", "host_seconds",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny chat model of one layer, as most tests compile its programs."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    return save_folder(path, template=TEMPLATE, num_layers=1)


@pytest.fixture
def env(compile_cache, tmp_path):
    return environment(compile_cache, tmp_path / "home")


@pytest.fixture
def prompts_file(tmp_path):
    """Three prompts, in both spellings."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n{"turns": ["two", "more"]}\n{"prompt": "three"}\n')
    return path


@pytest.fixture
def generate(monkeypatch, capsys, folder):
    """Returns a function that runs the program in this process and expects it to succeed."""

    def run_it(*flags):
        flags = (f"--target={folder}", "--dtype=float32", "--max_new_tokens=12", *flags)
        status, output, errors = call_generate(monkeypatch, capsys, *flags)
        assert status == 0, errors
        return output, errors

    return run_it


NOT_HEEDED = {
    "JAX_ENABLE_X64": "1",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_THREEFRY_PARTITIONABLE": "0",
}
_NUMBERS = """
import jax, jax.numpy as jnp
from jspec.cli.program import run_main
def main():
    matrix = jnp.zeros([1, 2]) + jnp.arange(2)
    print(matrix.dtype, jax.random.uniform(jax.random.key(0), [2]).tolist())
run_main(main)
"""


def without_notices(errors):
    """Returns the lines on standard error but those of compiling, which an earlier run has done."""
    return [line for line in errors.splitlines() if not line.startswith("compiling once")]


def test_variables_of_jax_change_neither_types_nor_what_a_seed_draws():
    """Guards against a seed that gives another text on a machine that is set up otherwise."""
    command, env = [sys.executable, "-c", _NUMBERS], os.environ | NOT_HEEDED
    output = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert output == f"float32 {jax.random.uniform(jax.random.key(0), [2]).tolist()}\n"


def test_one_prompt_in_a_process_of_its_own(folder, env, tmp_path):
    """Guards the contract of standard output, standard error and --output_json.

    Its programs are compiled as users get them, and keep every draft of the model for itself.
    Nothing but the text on standard output; on the other one line of the device and its memory at
    first, and two of statistics at last: nothing of costs, which are not measured.
    """
    path = tmp_path / "out.jsonl"
    status, output, errors = run(
        "jspec.generate", f"--target={folder}", f"--draft={folder}", "--prompt=hé",
        "--drafter=model", "--num_draft_tokens=3", f"--output_json={path}",
        "--max_new_tokens=20", "--seed=7", "--temperature=0.5", "--dtype=float32",
        "--system=be kind", env=as_users(env) | NOT_HEEDED,
    )  # fmt: skip
    assert status == 0, errors
    (record,) = read_lines(path)
    assert set(record) == _RESULT_FIELDS
    assert set(record["stats"]) == _STATS_FIELDS
    assert output == record["text"] + "\n"
    assert (record["prompt"], record["seed"], record["finish_reason"]) == ("hé", 7, "length")
    rendered = "[system]be kind[user]hé[assistant]".encode()
    assert len(record["prompt_token_ids"]) == 1 + len(rendered)
    assert record["prompt_token_ids"].count(0) == 1  # one BOS, the template's
    assert record["settings"]["temperature"] == 0.5
    stats = record["stats"]
    assert stats["acceptance_rate"] == 1  # it drafts for itself
    assert stats["num_target_calls"] == stats["num_rounds"] == len(stats["accepted_per_round"])
    assert len(stats["accepted_histogram"]) == 4
    assert stats["tokens_per_target_call"] == 19 / stats["num_rounds"]
    start, *lines = without_notices(errors)
    assert start.startswith(f"{device_name()}: weights 0.00 GB, caches 0.00 GB (1 row of 512 ")
    assert len(lines) == 2, errors
    assert lines[0].startswith("20 tokens (length), ")
    assert " tokens/s; " in lines[0]
    assert lines[1].startswith("acceptance 100.0% (")
    assert " drafts, 3 a round), " in lines[1]
    assert lines[1].endswith(f"{stats['tokens_per_target_call']:.2f} tokens per target call")


def test_prompt_k_of_a_file_uses_seed_plus_k(generate, prompts_file, tmp_path):
    """Guards invariant 5 through the program: alone with its seed, in a batch, streamed or not."""
    flags = ("--temperature=1", "--drafter=none", "--nostats")
    path = tmp_path / "out.jsonl"
    output, errors = generate(
        f"--prompts_file={prompts_file}", f"--output_json={path}", "--seed=5", *flags
    )
    records = read_lines(path)
    assert [record["prompt"] for record in records] == ["one", "two", "three"]
    assert [record["seed"] for record in records] == [5, 6, 7]
    expected = "".join(f"--- prompt {k} ---\n{r['text']}\n" for k, r in enumerate(records))
    assert (output, errors) == (expected, "")
    alone = tmp_path / "alone.jsonl"
    generate("--prompt=two", "--seed=6", f"--output_json={alone}", *flags)
    assert read_lines(alone)[0]["token_ids"] == records[1]["token_ids"]
    batched = tmp_path / "batched.jsonl"
    batched_flags = ("--batch_size=2", "--nostream", "--seed=5", f"--output_json={batched}")
    output, _ = generate(f"--prompts_file={prompts_file}", *batched_flags, *flags)
    by_index = sorted(read_lines(batched), key=lambda record: record["index"])
    assert [r["token_ids"] for r in by_index] == [r["token_ids"] for r in records]
    assert all(f"--- prompt {k} ---\n{r['text']}\n" in output for k, r in enumerate(records))


def test_beams_are_counted_and_recorded(generate, tmp_path):
    """The best one on standard output, all in the record, calls per token and scores beside it."""
    path = tmp_path / "out.jsonl"
    flags = ("--num_beams=3", "--length_penalty=0.5", "--early_stopping=never")
    output, errors = generate("--prompt=one", f"--output_json={path}", "--drafter=none", *flags)
    (record,) = read_lines(path)
    scores = [beam["score"] for beam in record["beams"]]
    assert scores == sorted(scores, reverse=True)
    assert record["text"] + "\n" == output == record["beams"][0]["text"] + "\n"
    assert record["settings"]["early_stopping"] == "never"
    shown = ", ".join(f"{score:.4f}" for score in scores)
    assert errors.endswith(f"3 beams, 1.00 target calls per token; scores {shown}\n")


def test_a_batch_has_one_line_of_the_device_and_counts_every_token(generate, prompts_file):
    """Guards against a line for each prompt, and against a total of the last pieces alone."""
    flags = "--batch_size=2", "--max_new_tokens=40", "--drafter=none"
    _, errors = generate(f"--prompts_file={prompts_file}", *flags)
    first, *others = errors.splitlines()
    assert first.startswith(f"{device_name()}: weights ")
    assert first.endswith(" GB (2 rows and one prompt of 512 slots)")
    assert not any("weights" in line for line in others)
    num_tokens = sum(int(count) for count in re.findall(r"prompt \d+: (\d+) tokens \(", errors))
    assert num_tokens > 3 * 8  # more than one visit's
    assert f"\n3 prompts: {num_tokens} tokens in " in errors


def test_stop_is_repeatable_and_nochat_is_raw(generate, tmp_path):
    """Guards against a second --stop that replaces the first, and a template that stays on."""
    path = tmp_path / "out.jsonl"
    flags = ("--drafter=none", f"--output_json={path}", "--prompt=hi", "--nochat", "--nostream")
    output, errors = generate(*flags)
    (whole,) = read_lines(path)
    assert len(whole["prompt_token_ids"]) == 2
    assert output == whole["text"] + "\n"
    assert errors.splitlines()[-1].startswith("no drafts, 1.00 tokens per target call")
    stop = whole["text"][3:5]
    output, _ = generate(*flags, "--stop=never", f"--stop={stop}")
    (cut,) = read_lines(path)
    assert cut["finish_reason"] == "stop"
    assert cut["settings"]["stop"] == ["never", stop]
    assert output == cut["text"] + "\n"
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]


def test_what_comes_before_a_long_prompt_is_answered(folder, tmp_path, monkeypatch, capsys):
    """Guards against two good answers lost to a third prompt that no context holds."""
    path, texts = tmp_path / "out.jsonl", ("a", "b", "x" * 300, "d")
    lines = [{"prompt": text, "category": "qa"} for text in texts]
    prompts = write_lines(tmp_path / "prompts.jsonl", lines)
    status, output, errors = call_generate(
        monkeypatch, capsys, f"--target={folder}", f"--prompts_file={prompts}", "--drafter=none",
        f"--output_json={path}", "--max_new_tokens=12", "--dtype=float32",
    )  # fmt: skip
    assert status == 2
    assert [record["prompt"] for record in read_lines(path)] == ["a", "b"]
    assert output.count("--- prompt") == 2
    assert errors.splitlines()[-1].startswith(f"error: prompt 2 of {prompts}: expected a prompt")
    assert "category qa" not in errors  # nothing is drafted


# A shell makes jobs in the background ignore Ctrl-C: here it is heeded again.
HEEDING = ("import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
           "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])")  # fmt: skip


def test_an_interrupt_keeps_the_finished_results(folder, env, tmp_path):
    """Guards against a traceback on Ctrl-C, and answers lost with it."""
    path, prompts = tmp_path / "out.jsonl", tmp_path / "prompts.jsonl"
    write_lines(prompts, [{"prompt": "a"}] * 2000)
    flags = (f"--target={folder}", f"--prompts_file={prompts}", f"--output_json={path}",
             "--max_new_tokens=30", "--dtype=float32", "--drafter=none")  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-c", HEEDING, *command("jspec.generate", *flags)[1:]],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        output = [process.stdout.readline() for _ in range(20)]
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert errors.endswith(b"\ninterrupted\n")
    records = read_lines(path)  # every line is whole
    titles = (b"".join(output) + rest).count(b"--- prompt")
    assert 0 < len(records) < 2000
    assert abs(len(records) - titles) <= 1  # one is written, and then shown


def test_an_interrupt_is_heard_within_the_garbage_collectors_callbacks():
    """Guards against a Ctrl-C that Python drops there, printing that it ignores an exception."""
    program = """
import gc, time
from jspec.cli import program as cli

def _xla_gc_callback(phase, info):  # as JAX has one
    print("collecting", flush=True)
    time.sleep(0.4)

def main():
    gc.callbacks.append(_xla_gc_callback)
    gc.collect()
    time.sleep(50)

cli.run_main(main)
"""
    with subprocess.Popen(
        [sys.executable, "-c", HEEDING, "-c", program],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == b"collecting\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=40)
    assert process.returncode == 130
    assert errors == b"\ninterrupted\n"


def test_a_reader_that_goes_away_is_no_error_worth_a_traceback(folder, env):
    """Guards against a traceback from `python -m jspec.generate | head`."""
    flags = (f"--target={folder}", "--prompts_file=-", "--max_new_tokens=30", "--dtype=float32",
             "--drafter=none", "--nostats")  # fmt: skip
    with subprocess.Popen(
        command("jspec.generate", *flags),
        env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        process.stdin.write(b'{"prompt": "a"}\n' * 2000)
        process.stdin.close()
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        process.wait(timeout=60)
    assert errors == b""
    assert process.returncode != 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_behind_standard_output_is_one_line(folder, monkeypatch, capsys, tmp_path):
    """Guards against a traceback, and a result that is lost although it could be kept."""
    path = tmp_path / "out.jsonl"
    flags = (f"--target={folder}", "--prompt=a", f"--output_json={path}", "--max_new_tokens=1",
             "--dtype=float32", "--drafter=none")  # fmt: skip
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        status, _, errors = call_generate(patch, capsys, *flags)
    assert status == 2
    device, error = without_notices(errors)
    assert device.endswith(" slots)")
    assert error == "error: standard output cannot be written: No space left on device"
    assert len(read_lines(path)) == 1


def test_characters_that_a_terminal_lacks_are_replaced(folder, monkeypatch, capsys):
    """Guards against a traceback where standard output is not UTF-8."""
    flags = (f"--target={folder}", "--prompt=a", "--max_new_tokens=60", "--temperature=1.5",
             "--dtype=float32", "--drafter=none", "--nostats")  # fmt: skip
    shown = io.BytesIO()
    with io.TextIOWrapper(shown, encoding="ascii") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        status, _, errors = call_generate(patch, capsys, *flags)
        terminal.flush()
        output = shown.getvalue()
    assert (status, errors) == (0, "")
    assert b"?" in output
    assert output.isascii()


def test_help_is_no_failure(env):
    """Guards against absl's status 1, and help on standard error."""
    usual, full = run_many("jspec.generate", [["--help"], ["--helpfull"]], env=env)
    assert (usual[0], full[0], usual[2]) == (0, 0, "")
    assert "--num_draft_tokens" in usual[1]
    assert "--draft_vocab_size" in usual[1]
    assert 15 <= usual[1].count("\n  --") <= 25
    topics = re.findall(r"^(\w+):$", full[1], re.MULTILINE)
    assert topics == ["Models", "Prompts", "Sampling", "Acceptance", "Drafting", "Output"]
    shown = set(re.findall(r"^  --(?:\[no\])?(\w+)", usual[1], re.MULTILINE))
    named = set(re.findall(r"--(\w+)", usual[1])) - {"helpfull"}
    assert named <= shown, "a flag's help refers to flags that --helpfull alone shows"
    assert "  --ngram_window " in full[1]
    assert "  --ngram_window " not in usual[1]


def test_the_console_command_says_what_it_can_do():
    """Guards against an error's text in the place of help, and against a program left out."""

    def call(*arguments):
        command_line = [sys.executable, "-m", "jspec", *arguments]
        return subprocess.run(command_line, capture_output=True, text=True)

    done = call("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: jspec PROGRAM [--flags]\n")
    assert re.search(r"^  generate +Generates text$", done.stdout, re.MULTILINE)
    assert len(re.findall(r"^  \w+ +[A-Z]", done.stdout, re.MULTILINE)) == 9
    wrong = call("zebra")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: expected a program among audit, benchmark, ")


def test_drafters_are_compared_in_a_table(generate, prompts_file, tmp_path):
    """Each with the options that it reads; greedy answers are those of the first."""
    path = tmp_path / "out.jsonl"
    flags = ("--compare=none,prompt_lookup:3,layer_skip", "--draft_layers=1")
    output, errors = generate(
        *flags, f"--prompts_file={prompts_file}", f"--output_json={path}", "--num_draft_tokens=2"
    )
    title, *rows, note = output.splitlines()
    assert title.split("  ")[0] == "drafter"
    assert re.match(r"note: too short to compare: \d\d tokens were timed; give more", note)
    assert [row.split()[0] for row in rows] == ["none", "prompt_lookup:3", "layer_skip"]
    assert [row.endswith(" 3 of 3") for row in rows] == [True] * 3
    assert rows[0].split()[2:5] == ["1.00", "1.00", "-"]
    assert "warming up layer_skip" in errors
    assert "repeat 3 of 3" in errors  # by turns: one timing of each would compare chance
    records = read_lines(path)
    assert [record["compared"] for record in records] == ["none", "prompt_lookup:3", "layer_skip"]
    assert [record["settings"]["num_draft_tokens"] for record in records] == [0, 3, 2]
    plain, _, skip = records
    assert plain["speedup"] == 1
    assert skip["speedup"] > 0
    assert plain["num_tokens"] == skip["num_tokens"] > 20
    assert "note" not in format_comparison({"a": plain | {"num_tokens": 64}})
    assert 0 < skip["acceptance_rate"] <= 1
    assert skip["tokens_per_target_call"] > 1


def test_sampled_answers_are_compared_under_the_coupled_rule_only(generate):
    """By other rules answers of two drafters differ by chance; seeds are those of a usual run.

    Answers of one token have no speed, and not nan.
    """
    flags = ("--compare=none,ngram:2", "--prompt=abcabc", "--temperature=1", "--seed=9")
    # Plain decoding reads no lenience, which is no error.
    lenient = ("--acceptance=lenient", "--lenience=0.5", "--max_new_tokens=1")
    rows = generate(*flags, *lenient)[0].splitlines()
    assert rows[1].split()[-1] == "-"
    assert rows[2].split() == ["ngram:2", "0.0", *"----"]
    output, _ = generate(*flags, "--acceptance=coupled")
    assert [row.split()[-1] for row in output.splitlines()[1:3]] == ["yes", "yes"]


def test_a_limit_that_the_context_reduces_is_said(generate):
    """Once, before the answer, though it ends before; of the default nothing is said."""
    flags = "--drafter=none", "--prompt=hi"
    _, errors = generate(*flags, "--max_seq_len=40", "--max_new_tokens=500", "--stop=e")
    assert errors.count("note: --max_new_tokens=500 is reduced to what the context of 40") == 1
    assert "is reduced" not in generate(*flags)[1]


def test_rounds_cost_plain_steps_where_costs_are_known(generate, tmp_path, monkeypatch):
    """As the costs say, for the rounds that there were.

    Where all drafts cost too much, it is said why there were none: guards against a draft model
    that never drafts, and not a word of why.
    """
    monkeypatch.setattr("jspec.generation.generator.MOST_DRAFT_TOKENS", 1)
    costs, path = tmp_path / "costs.json", tmp_path / "out.jsonl"
    flags = ("--prompt=abcabcabc", "--drafter=prompt_lookup", f"--output_json={path}")
    said = []
    for seconds in ([1.0, 1.25], [1.0, 9.0]):
        costs.write_text(json.dumps({
            "contexts": [512], "numbers": [0, 1], "drafters": ["prompt_lookup"],
            "seconds": [[seconds]],
        }))  # fmt: skip
        _, errors = generate(*flags, "--num_draft_tokens=auto", f"--costs_file={costs}")
        proposed = read_lines(path)[0]["stats"]["proposed_per_round"]
        total = sum(seconds[number] for number in proposed)
        assert f"; a round cost {total / len(proposed):.2f} plain steps, as measured" in errors
        said.append("\nno drafts: with " in errors)
    assert said == [False, True]
