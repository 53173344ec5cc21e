"""scripts/measure_quantization.py: bytes and steps of every kind."""

import json

from tests.programs import environment, run
from tests.tiny_models import save_folder


def test_every_kind_has_its_bytes_and_steps(compile_cache, tmp_path):
    """Ratios are those to the first kind; no repeat is lost."""
    path = tmp_path / "record.json"
    folder = save_folder(tmp_path / "tiny", hidden_dim=64)  # of whole groups of 32
    status, output, errors = run(
        "scripts.measure_quantization", f"--model={folder}", "--repeats=2", "--context=8",
        "--dtype=float32", f"--output_json={path}",
        env=environment(compile_cache, tmp_path / "home"),
    )  # fmt: skip
    assert status == 0, errors
    record = json.loads(path.read_text())
    assert record["is_complete"]
    assert list(record["kinds"]) == ["float32", "int8", "int4"]
    assert output.count(" ms a step ") == 3
    for kind in record["kinds"].values():
        assert len(kind["all_milliseconds"]) == 2
    bytes_ratios = [kind["bytes_ratio"] for kind in record["kinds"].values()]
    assert bytes_ratios == sorted(bytes_ratios, reverse=True)
    assert bytes_ratios[0] == 1
