"""scripts/make_answers.py --what=table: a table of n-grams from answers."""

import json

import pytest
import safetensors

from jspec.drafters.tables import load_table
from tests.cases import slow_unless
from tests.programs import check_refusal, environment, run
from tests.tiny_models import save_folder

ANSWER = {"prompt_token_ids": [1, 2], "token_ids": [3, 4], "text": "x", "prompt": "y"}


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def count(compile_cache, tmp_path):
    target = save_folder(tmp_path / "m")
    env = environment(compile_cache, tmp_path / "home")
    return lambda *flags: run(
        "scripts.make_answers", "--what=table", f"--target={target}", *flags, env=env
    )


def test_the_script_counts_answers(count, tmp_path):
    """Of the target's own output, with and without prompts, with and without bigrams."""
    source = write(tmp_path / "i.jsonl", ANSWER, {"token_ids": [3, 3, 4], "prompt_token_ids": [9]})
    output = tmp_path / "t.safetensors"
    status, printed, errors = count(f"--input={source}", f"--output={output}")
    assert (status, errors) == (0, "")
    assert printed == f"wrote {output}: 8 tokens counted\n"
    table = load_table(str(output))
    assert (len(table.unigrams), table.num_tokens) == (258, 8)
    with safetensors.safe_open(output, "np") as file:
        assert len(file.metadata()["vocabulary"]) == 64
    assert table.ids[3, :2].tolist() == [4, 3]
    assert table.counts[3, :3].tolist() == [2, 1, 0]
    flags = ("--nocount_prompts", "--order=1")
    assert count(f"--input={source}", f"--output={output}", *flags)[0] == 0
    table = load_table(str(output))
    assert table.num_tokens == 5
    assert table.ids is None


@pytest.mark.parametrize(
    ("token", "output", "message"),
    [
        (258, "t", "ids from 0 to 257, got 258"),
        slow_unless(False, 1, "none/t", "there is no folder"),
    ],
)
def test_the_script_refuses_in_one_line(count, tmp_path, token, output, message):
    source = write(tmp_path / "i.jsonl", {"token_ids": [token]})
    refused = check_refusal(*count(f"--input={source}", f"--output={tmp_path / output}"))
    assert message in refused
    assert not (tmp_path / output).exists()
