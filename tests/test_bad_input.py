"""Bad input: one line on standard error, a status that is not zero, nothing half-written."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

from jspec.drafters.tables import count_ngrams, save_table
from tests.programs import call_generate, check_refusal, command, environment
from tests.tiny_models import save_folder
from tests.weights.tokenizers.test_tokenizer import make_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A good model."""
    return save_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def refuse(monkeypatch, capsys, tmp_path, compile_cache):
    """Returns a function that runs jspec.generate and returns its one line of refusal.

    It also checks that an output of an earlier run stays.
    """
    for name, value in environment(compile_cache, tmp_path / "cache").items():
        monkeypatch.setenv(name, value)

    def run_it(target, *flags, prompt="--prompt=hello"):
        output = tmp_path / "old.jsonl"
        output.write_text("old\n")
        output_flag = [] if "--output_json" in " ".join(flags) else [f"--output_json={output}"]
        before = set(tmp_path.rglob("*"))
        line = check_refusal(
            *call_generate(monkeypatch, capsys, f"--target={target}", prompt, *output_flag, *flags)
        )
        assert output.read_text() == "old\n"
        new = {path.relative_to(tmp_path).parts[0] for path in set(tmp_path.rglob("*")) - before}
        assert new <= {"cache"}
        return line

    return run_it


@pytest.fixture
def spoil(tmp_path):
    """Returns a function that writes a model and returns its folder, to be damaged."""
    return lambda **options: save_folder(tmp_path / "m", **options)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--max_new_tokens=x", "flag --max_new_tokens=x: expected a whole number, got 'x'"),
        ("--acceptance=zebra", "expected an acceptance rule among greedy, rejection, block"),
        ("--acceptance=lenient", "'lenient' expects temperature above 0, got 0.0"),
        ("--lenience=1.5", "lenience from 0 to 1; got 1.5"),
        ("--typical_delta=-1", "typical delta from 0 to 1; got -1.0"),
        ("--repetition_penalty=0", "repetition_penalty above 0, got 0.0"),
        ("--presence_penalty=2.5", "presence_penalty in [-2, 2], got 2.5"),
        ("--frequency_penalty=nan", "frequency_penalty in [-2, 2], got nan"),
        ("--logit_bias=five", "logit_bias as ID:NUMBER, got 'five'"),
        ("--allowed_token_ids=a", "allowed_token_ids to be whole numbers, got 'a'"),
        ("--allowed_token_ids=", "forbidden_token_ids to leave at least one token"),
        ("--min_new_tokens=999", "min_new_tokens from 0 to max_new_tokens"),
        ("--num_draft_tokens=0", "from 1 to 198, got 0; for plain decoding use --drafter=none"),
        ("--num_draft_tokens=199", "from 1 to 198, got 199; the context sets the limit"),
        ("--tree_depth=8 --num_draft_tokens=auto", "tree_depth of at most 7 with num_draft_tokens"),
        ("--num_draft_tokens=2.5", "num_draft_tokens to be a whole number or auto, got '2.5'"),
        ("--temperature=-1", "temperature of at least 0, got -1.0"),
        ("--temperature=hot", "flag --temperature=hot: expected a number, got 'hot'"),
        ("--draft_temperature=-1", "draft_temperature"),
        ("--top_k=-1", "top_k"),
        ("--min_p=2", "min_p"),
        ("--stop=", "stop strings that are not empty"),
        ("--stop=\udcff", "stop strings in UTF-8"),
        ("--system=be kind", "has none: put what it says into the prompt"),
        ("--system=\udcff", "system message needs"),
        ("--chat=maybe", "flag --chat=maybe: expected true or false, got 'maybe'"),
        ("--compare=none,none", "expected each drafter once, got none,none"),
        ("--compare=none,model", "expected --draft with a drafter among model"),
        (
            "--compare=none --drafter=ngram",
            "expected --compare alone, which lists drafters; got --drafter=ngram",
        ),
        ("--compare=none --stream", "expected --compare without --stream"),
        ("--compare=none --batch_size=2", "expected --compare without --batch_size"),
        ("--compare=none --draft_layers=1", "draft_layers with a drafter that reads it"),
        ("--compare=none,ngram --lenience=0.3", "(lenient, lenient_argmax), got it with 'ngram'"),
        ("--compare=none --max_seq_len=2", "prompt 0: expected a prompt of fewer"),
        ("--chat", "no chat template: expected --nochat (in Python chat=False)"),
        ("--batch_size=0", "batch_size"),
        ("--max_seq_len=201", "max_seq_len from 2 to 200, got 201"),
        (
            "--max_seq_len=3 --num_draft_tokens=2",
            "from 1 to 1, got 2; the context sets the limit (max_seq_len 3)",
        ),
        ("--drafter=model", "'model' expects a draft model (--draft=MODEL, in Python draft), got"),
        ("--drafter=", "or several joined by '+'; got ''"),
        (
            "--draft_temperature=0.5",
            "draft_temperature with a drafter that draws from a distribution (model",
        ),
        ("--lenience=0.3", "expected lenience with a drafter that drafts and an acceptance rule"),
        ("--typical_delta=0.1", "rule that reads it (typical), got it with 'prompt_lookup' and"),
        ("--drafter=pattern", "(--draft_pattern), a regular expression, or json_skeleton"),
        ("--drafter=magic", "drafter"),
        ("--draft_layers=5-2", "of draft_layers from the lower to the higher, got '5-2'"),
        ("--draft_pattern=", "expected pattern (--draft_pattern) as a text, got an empty one"),
        ("--drafter=bigram", "'bigram' expects a table that scripts/make_answers.py has made"),
        ("--suffix_min_share=1.5", "suffix_min_share from 0 to 1, got 1.5"),
        ("--ngram_probs=martial", "<deterministic|sampled>"),
        ("--draft_layers=1", "reads it (layer_skip), got it with 'prompt_lookup'"),
        ("--acceptance=magic", "acceptance"),
        ("--dtype=float16", "dtype"),
        ("--nosuchflag", "nosuchflag"),
        ("stray", "expected flags only, got 'stray'"),
        ("--prompts_file=x.jsonl", "either --prompt or --prompts_file, got both"),
        ("--prompt=b", "--prompt once, got it 2 times: see --prompts_file"),
        # Before the target is looked for.
        ("--target=no --drafter=none --num_draft_tokens=3", "a drafter that drafts, got 3 with"),
        ("--target=no --drafter=none --draft_temperature=0.5", "ngram_probs=sampled), got it with"),
        ("--target=no --drafter=none --lenience=0.3", "got it with 'none' and 'rejection'"),
    ],
)
def test_flags(refuse, folder, flag, message):
    """Guards against values that are clamped, ignored, or end in a traceback.

    The tests of what reads a value have its other bounds.
    """
    flags = flag.split(" --")  # a text may have spaces
    assert message in refuse(folder, flags[0], *(f"--{other}" for other in flags[1:]))


def test_draft_tables(refuse, folder, tmp_path):
    """Guards against counts of another model's tokens, and tracebacks of the file's library."""
    path = tmp_path / "table"
    flags = ("--drafter=bigram", f"--draft_table={path}")
    assert "table: no such file" in refuse(folder, *flags)
    message = refuse(folder, "--drafter=bigram", f"--draft_table={tmp_path}")
    assert "expected a table of n-gram counts, a file; got a folder" in message
    save_table(count_ngrams([[1, 2]], 259), path)
    assert "target's vocabulary of 258 tokens, got one of 259" in refuse(folder, *flags)
    save_table(count_ngrams([[1, 2]], 258), path, make_tokenizer(special=("</s>", "<s>")))
    assert "expected a table counted with the target's tokenizer" in refuse(folder, *flags)
    path.write_bytes(path.read_bytes()[:-9])
    assert "truncated or damaged table" in refuse(folder, *flags)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("--prompt=", "empty"),
        ("--prompt=\udcff\udcfe", "expected UTF-8, got invalid bytes"),
        (f"--prompt={'x' * 200}", "fewer tokens than the context's 200, got 200"),
        ("--prompts_file=", "expected a file in --prompts_file, got an empty name"),
        ("--prompts_file=missing.jsonl", "missing.jsonl: No such file"),
        ("--nostats", "either --prompt or --prompts_file, got neither"),
    ],
)
def test_prompts(refuse, folder, prompt, message):
    """Guards against prompts cut to fit, and against a run with nothing to answer."""
    assert message in refuse(folder, prompt=prompt)


def test_a_long_prompt_in_a_file_is_named(refuse, folder, tmp_path):
    """Guards against having to guess which of many prompts was too long."""
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt": "{"x" * 200}"}}\n{{"prompt": "a"}}\n')
    message = refuse(folder, prompt=f"--prompts_file={path}")
    assert f"prompt 0 of {path}: expected a prompt of fewer" in message
    path.write_text("\n")
    assert "at least one prompt" in refuse(folder, prompt=f"--prompts_file={path}")
    path.write_text('{"prompt": "a"}\n{')  # found before anything is loaded, or answered
    assert f"{path}:2: expected a JSON" in refuse("nowhere", prompt=f"--prompts_file={path}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "no model 'nowhere': expected"),
        ("some/model", "some/model: "),
        ("no.gguf", "no.gguf: cannot be read"),
        ("random:llama9", "got 'random:llama9'"),
        ("", "no model '': expected"),
        ("/x/model.safetensors", "expected a model's folder, got a file of weights: give /x"),
        ("model.safetensors", f"got a file of weights: give {os.getcwd()}"),
    ],
)
def test_models_that_are_not_there(refuse, name, message):
    """Guards against a traceback of the hub client, and a wait for a network that is not there."""
    assert message in refuse(name)


def edit_config(folder, **changes):
    """Changes config.json; None removes a key."""
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"made_up_key": 3}, "made_up_key"),
        ({"architectures": ["ZebraForCausalLM"], "model_type": "zebra"}, "got ZebraForCausalLM"),
        ({"vocab_size": 259}, "expected shape [259, 32], found [258, 32]"),
        ({"num_attention_heads": 3}, "num_heads"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_configs_that_cannot_be_honoured(refuse, spoil, changes, message):
    """Guards against a model that runs, and is another one than the config describes."""
    folder = spoil()
    edit_config(folder, **changes)
    assert message in refuse(folder)


def test_damaged_files(refuse, spoil):
    """Guards against tracebacks of the libraries that read the files."""
    folder = spoil()
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole = weights.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", os.urandom(64), b"\xff" * 64):
        weights.write_bytes(damaged)
        assert "truncated or damaged safetensors" in refuse(folder)
    safetensors.numpy.save_file({"model.norm.weight": np.zeros(32, np.int64)}, weights)
    assert "I64" in refuse(folder)
    weights.unlink()
    assert "neither model.safetensors nor" in refuse(folder)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "missing, although" in refuse(folder)
    (folder / "model-00001-of-00002.safetensors").mkdir()  # nobody can read it, root included
    assert "safetensors: cannot be read: Is a directory" in refuse(folder)
    config.write_text("{")
    assert "damaged JSON" in refuse(folder)


def test_folders_that_may_not_be_read(refuse, folder, monkeypatch):
    """Guards against a bare error number."""

    def load(path, *_):
        raise PermissionError(13, "Permission denied", str(path / "params"))

    monkeypatch.setattr("jspec.weights.hf.load_hf", load)
    assert refuse(folder) == f"error: {folder}/params: cannot be read: Permission denied\n"


def test_empty_folders(refuse, folder, tmp_path):
    """Guards against a message about a file that nobody named."""
    (tmp_path / "empty").mkdir()
    assert "empty: no config.json in the folder" in refuse(tmp_path / "empty")
    for drafter in ("eagle", "medusa"):
        message = refuse(folder, f"--drafter={drafter}", f"--draft_head={tmp_path / 'empty'}")
        assert "empty: no config.json in the folder; expected one with " in message


def test_tokenizers(refuse, spoil, folder, tmp_path):
    """Guards against guesses in another tokenizer's tokens, and a tokenizer that knows too much."""
    spoilt = spoil()
    path = spoilt / "tokenizer.json"
    good = path.read_text(encoding="utf-8")
    content = json.loads(good)
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(content))
    refused = refuse(folder, f"--draft={spoilt}", "--drafter=hierarchical")
    assert "different tokenizers: id" in refused
    path.write_text(good[:-9])
    assert "damaged tokenizer" in refuse(spoilt)
    path.unlink()
    assert "no tokenizer.json" in refuse(spoilt)
    message = refuse(folder, f"--draft={folder}", "--drafter=none")
    assert "a draft model (--draft, in Python draft) expects a drafter among model" in message
    inner = refuse(folder, f"--draft={folder}", "--drafter=hierarchical", "--inner_drafter=model")
    assert "expected an inner drafter without a model" in inner
    drafting = (f"--draft={folder}", "--drafter=model")
    message = refuse(folder, *drafting, "--ngram_probs=sampled")
    assert (
        "expected ngram_probs with a drafter that reads it (ngram), got it with 'model'" in message
    )


def test_patterns(refuse, folder):
    """Guards against a pattern that is taken for another, or ends in a traceback."""
    message = refuse(folder, "--drafter=pattern", "--draft_pattern=(ab")
    assert "'(ab': missing ), unterminated subpattern at position 0" in message
    message = refuse(folder, "--drafter=pattern", '--draft_json={"a": "<date>"}')
    assert "expected placeholders among <string>" in message
    for text in ("name", "{'a': 1}", '{"a":'):
        message = refuse(folder, "--drafter=pattern", f"--draft_json={text}")
        assert f"expected a JSON skeleton (--draft_json), got {text!r}: " in message
    message = refuse(folder, "--drafter=pattern", "--draft_json= ")
    assert "expected a JSON skeleton (--draft_json), got an empty text" in message


def test_tokenizers_that_do_not_fit(refuse, spoil, tmp_path):
    """Guards against an embedding read past its end, which JAX clamps in silence, and against a
    template's own refusal shown as a traceback.
    """
    folder = spoil()
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    vocab["h"], vocab["new"] = 258, vocab["h"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert "token ids from 0 to 257" in refuse(folder)
    refusing = "{{ raise_exception('no, thanks') }}"
    assert "no, thanks" in refuse(save_folder(tmp_path / "refusing", template=refusing))


def test_outputs(refuse, folder, tmp_path):
    """Guards against a long run whose results cannot be kept."""
    nowhere = tmp_path / "none" / "out.jsonl"
    assert "there is no folder" in refuse(folder, f"--output_json={nowhere}")
    assert "it is a folder" in refuse(folder, f"--output_json={tmp_path}")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    flag = f"--prompts_file={prompts}"
    assert "got -" in refuse(folder, "--output_json=-")
    assert "another file to write to" in refuse(folder, f"--output_json={prompts}", prompt=flag)
    assert prompts.read_text() == '{"prompt": "a"}\n'


def in_bash(command_line, **options):
    return subprocess.run(["bash", "-c", command_line], capture_output=True, text=True, **options)


def test_a_help_that_is_not_read_to_its_end_leaves_no_traceback():
    """`--help | head -1`, as everybody does."""
    help_command = " ".join([*command("jspec.generate", "--helpfull"), "| head -1"])
    done = in_bash(f"set -o pipefail; {help_command}", timeout=60)
    assert done.returncode in (0, 1)
    assert done.stderr == ""


def test_closed_outputs(folder, monkeypatch, capsys):
    """Guards against a text that is lost with status 0, and against statistics in the text."""
    flags = f"--target={folder}", "--prompt=a", "--max_new_tokens=2", "--drafter=none"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)  # as Python has it after `>&-`
        status, _, errors = call_generate(patch, capsys, *flags)
    assert (status, errors) == (2, "error: expected an open standard output, got a closed one\n")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", None)
        status, output, errors = call_generate(patch, capsys, *flags)
        sys.stderr.close()
    assert (status, errors) == (0, "")
    assert "tokens/s" not in output


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", ["jspec.generate --help", "jspec --version"])
def test_a_help_that_cannot_be_written_is_one_line(arguments):
    """Guards against a traceback where the disk is full."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command(*arguments.split()), stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert done.returncode == 2
    assert done.stderr == b"error: standard output cannot be written: No space left on device\n"
