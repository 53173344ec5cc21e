"""The metrics of a run: the log, and the figure: what is in it, and when there is none."""

import importlib.util
import json

from jspec.training.chain_loss import SCORE
from jspec.training.loop import training_curves, write_figures

RECORDS = [
    {"step": 10, "loss": 3.0},
    {"step": 20, "loss": 2.0},
    {"step": 20, "held_out": {SCORE: 1.5, "acceptance": [0.5, 0.25]}},
    {"step": 30, "loss": 1.0},
    {"step": 40, "held_out": {SCORE: 1.75, "acceptance": [0.75, 0.5]}},
]


def test_curves_are_the_journal():
    """Three panels: the loss, the score, each draft of the chain."""
    loss, score, acceptance = training_curves(RECORDS)
    assert (loss.x, loss.lines) == ([10, 20, 30], {"loss": [3.0, 2.0, 1.0]})
    assert (score.x, score.lines) == ([20, 40], {"tokens per call": [1.5, 1.75]})
    assert acceptance.lines == {"draft 1": [0.5, 0.75], "draft 2": [0.25, 0.5]}
    assert training_curves([]) == []
    assert len(training_curves([{"step": 1, "held_out": {SCORE: 1.0}}])) == 1


def test_pictures_are_written_where_matplotlib_is(tmp_path, monkeypatch):
    """As PNG and SVG; a run without entries, or without matplotlib, has none."""
    write_figures(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in RECORDS))
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        write_figures(tmp_path)
    assert not (tmp_path / "figures").exists()
    write_figures(tmp_path)
    assert (tmp_path / "figures" / "training.png").read_bytes().startswith(b"\x89PNG")
    assert "tokens per call" in (tmp_path / "figures" / "training.svg").read_text()
