"""scripts/measure_start.py: starts by stage, each a process of its own."""

import json

from tests.programs import environment, run
from tests.tiny_models import save_folder


def test_a_second_start_finds_what_the_first_one_compiled(compile_cache, tmp_path):
    """Stages follow one another, memory only grows, and compiling is what a first start does."""
    folder = save_folder(tmp_path / "tiny", template="{{ messages[0]['content'] }}")
    path = tmp_path / "start.json"
    status, output, errors = run(
        "scripts.measure_start", f"--target={folder}", "--repeats=1", "--max_new_tokens=8",
        f"--output_json={path}", env=environment(compile_cache, tmp_path / "home"),
    )  # fmt: skip
    assert status == 0, errors
    record = json.loads(path.read_text())
    cold, (warm,) = record["cold"], record["warm"]
    for one in (cold, warm):
        seconds = [stage["seconds"] for stage in one["stages"].values()]
        peaks = [stage["peak_bytes"] for stage in one["stages"].values()]
        assert seconds == sorted(seconds)
        assert peaks == sorted(peaks)
        assert 0 < one["array_bytes"] < peaks[-1]
    assert cold["compile_seconds"]["answer"] > warm["compile_seconds"]["answer"]
    assert all(stage in output for stage in ("import jax", "first token", "answer"))
