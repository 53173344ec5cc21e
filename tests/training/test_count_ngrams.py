"""scripts/make_answers.py --what=table: a table of n-grams from answers."""

import json

import safetensors

from jspec.drafters.tables import load_table
from tests.programs import check_refusal, environment, run_many
from tests.tiny_models import save_folder

ANSWER = {"prompt_token_ids": [1, 2], "token_ids": [3, 4], "text": "x", "prompt": "y"}


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_the_script_counts_answers_or_refuses_in_one_line(compile_cache, tmp_path):
    """Of the target's own output, with and without prompts, with and without bigrams."""
    source = write(tmp_path / "i.jsonl", ANSWER, {"token_ids": [3, 3, 4], "prompt_token_ids": [9]})
    strange = write(tmp_path / "s.jsonl", {"token_ids": [258]})
    whole, small, other = (tmp_path / f"{name}.safetensors" for name in ("whole", "small", "other"))
    usual = ("--what=table", f"--target={save_folder(tmp_path / 'm')}")
    lines = [
        [*usual, f"--input={source}", f"--output={whole}"],
        [*usual, f"--input={source}", f"--output={small}", "--nocount_prompts", "--order=1"],
        [*usual, f"--input={strange}", f"--output={other}"],
        [*usual, f"--input={source}", f"--output={tmp_path / 'none' / 't'}"],
    ]
    env = environment(compile_cache, tmp_path / "home")
    counted, again, *refused = run_many("scripts.make_answers", lines, env=env)
    assert counted == [0, f"wrote {whole}: 8 tokens counted\n", ""]
    table = load_table(str(whole))
    assert (len(table.unigrams), table.num_tokens) == (258, 8)
    with safetensors.safe_open(whole, "np") as file:
        assert len(file.metadata()["vocabulary"]) == 64
    assert table.ids[3, :2].tolist() == [4, 3]
    assert table.counts[3, :3].tolist() == [2, 1, 0]
    assert again[0] == 0
    table = load_table(str(small))
    assert table.num_tokens == 5
    assert table.ids is None
    messages = [check_refusal(*outcome) for outcome in refused]
    assert "ids from 0 to 257, got 258" in messages[0]
    assert "there is no folder" in messages[1]
    assert not other.exists()
