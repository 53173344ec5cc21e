"""What transformers does beside jspec's ways."""

import pytest

from jspec.evaluation.benchmarking.methods import parse_ways
from jspec.evaluation.benchmarking.sides import peer_ways


@pytest.mark.parametrize(
    ("drafters", "expected"),
    [
        (["none"], {("prompt_lookup", 2)}),
        (["prompt_lookup:3", "prompt_lookup:9"], {("prompt_lookup", 3), ("prompt_lookup", 9)}),
        (["prompt_lookup:auto", "prompt_lookup:5"], {("prompt_lookup", 2), ("prompt_lookup", 5)}),
        (["model", "hierarchical:2"], {("prompt_lookup", 2), ("model", 7), ("model", 2)}),
        (["model+prompt_lookup:4"], {("prompt_lookup", 2), ("model", 4)}),
    ],
)
def test_numbers_of_drafts_are_those_of_jspecs_ways(drafters, expected):
    """Guards against a comparison of unlike numbers of drafts; plain is always there, first."""
    ways = peer_ways(parse_ways(drafters, "7"))
    assert next(iter(ways.items())) == ("transformers plain", ("none", 0))
    assert set(ways.values()) == {("none", 0), *expected}
    for name, (drafter, number) in list(ways.items())[1:]:
        assert name == f"transformers {drafter}:{number}"
