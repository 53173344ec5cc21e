"""scripts/compare_drafters.py: what it refuses and what it records."""

import json

import pytest

from tests.programs import check_refusal, environment, run
from tests.tiny_models import save_folder


@pytest.fixture
def compare(compile_cache, tmp_path):
    """Returns a function from flags to the script's status, output and errors, on a tiny model."""
    target = save_folder(tmp_path / "tiny")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "abcabcabc", "category": "c"}\n')
    env = environment(compile_cache, tmp_path / "home")
    flags = f"--target={target}", f"--prompts_file={prompts}", "--max_new_tokens=8", "--repeats=1"
    return lambda *more: run("scripts.compare_drafters", *flags, *more, env=env)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--drafters=none,ngram", "--lookup_growth=2"], "with 'none', 'ngram'"),
        (["--drafters=none,model"], "expected --draft with a drafter among model"),
        (["--draft_quantization=int8"], "expected --draft with --draft_quantization"),
    ],
)
def test_what_nobody_reads_is_refused(compare, flags, message):
    """Guards against a comparison of something else than was asked for."""
    assert message in check_refusal(*compare(*flags))


@pytest.mark.slow
def test_the_record_says_what_was_compared(compare, tmp_path):
    """Options go to the methods that read them; weights are rounded as asked for."""
    path = tmp_path / "record.json"
    flags = (
        "--drafters=none,ngram:2,prompt_lookup:2,model:2", "--ngram_window=99",
        f"--draft={tmp_path / 'tiny'}", "--draft_quantization=int8",
        "--max_seq_len=100", f"--output_json={path}",
    )  # fmt: skip
    status, output, errors = compare(*flags)
    assert status == 0, errors
    assert "jspec plain" in output
    record = json.loads(path.read_text())
    assert record["flags"]["draft_quantization"] == "int8"
    assert record["drafter_options"]["ngram_window"] == 99
    described = record["described"]
    windows = {name: one["drafter_options"]["ngram_window"] for name, one in described.items()}
    assert windows == {"jspec plain": 512, "jspec ngram:2": 99, "jspec prompt_lookup:2": 512,
                       "jspec model:2": 512}  # fmt: skip
    assert {one["target_quantization"] for one in described.values()} == {None}
    assert described["jspec model:2"]["draft_quantization"] == "int8"
