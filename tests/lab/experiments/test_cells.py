"""The cells of an experiment and their order."""

import json

import pytest

from jspec.common.errors import InputError
from jspec.lab.experiments.cells import choose_prompts, digest, make_cells
from jspec.lab.experiments.spec import read_experiment
from tests.lab.experiments.tiny import plain_config


def make(**changes):
    return read_experiment(plain_config("model", "prompts.jsonl", **changes))


def test_methods_alternate_fastest():
    """Guards against one method measured in the morning and the other in the evening."""
    cells = make_cells(make(repeats=2, seeds=[0, 3]), [4, 7])
    methods = [cell.key["method"] for cell in cells]
    assert methods == ["plain", "lookup"] * 16
    assert [cell.key["setting"] for cell in cells[:4]] == ["T=0", "T=0", "T=1", "T=1"]
    assert [cell.key["prompts"] for cell in cells[::4]] == [[4], [7]] * 4
    assert [cell.key["seed"] for cell in cells[::8]] == [0, 3, 0, 3]
    assert [cell.key["repeat"] for cell in cells[::16]] == [0, 1]
    assert len({cell.name for cell in cells}) == len(cells)
    assert cells[1].name == "lookup/T=0/batch 1/prompt 4/seed 0/repeat 0"
    json.dumps([cell.key for cell in cells])


def test_batches_take_the_prompts_together():
    """Guards against prompts left over, or twice in a batch."""
    cells = make_cells(make(batch_sizes=[1, 4]), [0, 2, 4, 6, 8])
    batches = [cell.key["prompts"] for cell in cells if cell.key["batch_size"] == 4][::4]
    assert batches == [[0, 2, 4, 6], [8]]


@pytest.fixture
def prompts_file(tmp_path):
    """Returns the name of a file of six prompts of three categories."""
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"text {i}", "category": "abc"[i // 2]} for i in range(6)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"num_prompts": 3}, [0, 2, 4]),
        ({"num_prompts": 9}, [0, 1, 2, 3, 4, 5]),
        ({"per_category": 1}, [0, 2, 4]),
        ({"per_category": 1, "num_prompts": 2}, [0, 2]),
    ],
)
def test_prompts_are_chosen_by_their_place_in_the_file(prompts_file, changes, expected):
    """Guards against indices, and with them seeds, that change with the number of prompts."""
    chosen = choose_prompts(make(prompts_file=prompts_file, **changes))
    assert list(chosen) == expected
    assert [prompt.text for prompt in chosen.values()] == [f"text {i}" for i in expected]


def test_a_digest_sees_a_change(prompts_file):
    """Guards against a run that goes on with other prompts."""
    prompts = choose_prompts(make(prompts_file=prompts_file))
    later = dict(prompts) | {3: prompts[3]._replace(later_turns=("more",))}
    assert digest(prompts) != digest(later)
    assert digest(prompts) == digest(choose_prompts(make(prompts_file=prompts_file)))


def test_no_prompts(tmp_path):
    """Guards against an experiment of nothing that ends well."""
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    with pytest.raises(InputError, match=r"at least one prompt in .*empty\.jsonl, got none"):
        choose_prompts(make(prompts_file=str(empty)))
    with pytest.raises(InputError, match=r"cannot read the prompts file .*: No such file"):
        choose_prompts(make(prompts_file=str(tmp_path / "question.jsonl")))
