"""Configs of heads: each describes its kind, names itself in its commands, or is refused."""

import dataclasses
import pathlib
import runpy

import pytest

from jspec.common.errors import InputError
from jspec.lab.experiments.config import to_plain
from jspec.training.draft_model import DraftModelTraining
from jspec.training.lookahead import LookaheadTraining
from jspec.training.run import KINDS, read_config, run_training
from jspec.training.texts import Text
from tests.tiny_models import target
from tests.training.folders import save_target, save_texts

HEADS = ("medusa", "blockwise", "lookahead")


@pytest.mark.parametrize("name", HEADS)
def test_a_config_describes_its_kind(name):
    path = pathlib.Path("configs", f"train_{name}.py")
    training = read_config(to_plain(runpy.run_path(str(path))["get_config"]()))
    assert type(training) is KINDS[name]
    assert training.drafter == name
    assert training.texts == ("answers.jsonl",)
    text = path.read_text()
    for part in (f"--config={path}", f"--drafter={name}", f"--draft_head=runs/{name}/head"):
        assert part in text


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"drafter": "medusa", "stride": 3}, "stride"),
     ({"drafter": "lookahead", "num_heads": 3}, "num_heads"),
     ({"drafter": "blockwise", "num_heads": "3"}, "num_heads"),
     ({"drafter": "zebra"}, "expected drafter among .*medusa.*; got 'zebra'")],
)  # fmt: skip
def test_fields_of_other_kinds_are_refused(fields, message):
    with pytest.raises(InputError, match=message):
        read_config(fields)


@pytest.mark.parametrize(
    "training",
    [LookaheadTraining(), DraftModelTraining(num_layers=1)],
    ids=lambda config: config.drafter,
)
def test_states_are_refused_where_the_target_runs_anyway(tmp_path, training):
    texts = [Text((1, 2), (3,) * 9)] * 4
    run = dataclasses.replace(
        training, target=save_target(tmp_path / "model", target()), dtype="float32",
        texts=(save_texts(tmp_path / "texts.jsonl", texts),), states=str(tmp_path / "states"),
        num_held_out=1, batch_size=1, seq_len=16,
    )  # fmt: skip
    with pytest.raises(InputError, match=f"expected no states with {training.drafter}"):
        run_training(run, tmp_path)
    assert not (tmp_path / "states").exists()
