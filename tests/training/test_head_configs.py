"""Configs of heads: each describes its kind, and names itself in its commands."""

import pathlib
import runpy

import pytest

from jspec.common.errors import InputError
from jspec.evaluation.experiments.config import to_plain
from jspec.training.run import KINDS, read_config

HEADS = ("medusa", "blockwise", "lookahead")


@pytest.mark.parametrize("name", HEADS)
def test_a_config_describes_its_kind(name):
    """As `jspec.train` reads it."""
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
    """By name."""
    with pytest.raises(InputError, match=message):
        read_config(fields)
