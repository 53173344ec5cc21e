"""Methods of several programs beside each other, and Spec-Bench's columns by hand."""

import dataclasses

import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.lab.analysis.spec_bench import TASKS
from jspec.lab.benchmarking.answers import Timings, columns_by_method, format_columns, tasks_of
from jspec.lab.benchmarking.baselines import transformers_methods
from jspec.lab.benchmarking.compare import check_vocabularies, plain_of
from jspec.lab.benchmarking.measurement import parse_methods
from tests.tiny_models import make_model, target

PLAIN_OF = {"jspec plain": "jspec plain", "jspec lookup": "jspec plain"}
TASK_OF_PROMPT = ["qa", "qa", None, "rag"]


def make_timings(seconds, tokens, round_tokens, calls):
    """Returns timings, each of [repeats, prompts], without answers."""
    given = (np.array(rows, float) for rows in (round_tokens, calls, seconds, tokens))
    own_tokens, calls, *others = given
    return Timings(own_tokens, calls, *np.zeros([2, *np.shape(seconds)]), *others, [])


@pytest.fixture
def timings():
    return {
        # Tokens a second, by prompt: 10, 2, 4, 5 in the first repeat; half of it in the others.
        "jspec plain": make_timings(
            [[1, 5, 1, 2], [2, 10, 2, 4], [2, 10, 2, 4]],
            [[10, 10, 4, 10]] * 3, [[9, 9, 3, 9]] * 3, [[9, 9, 3, 9]] * 3,
        ),
        # 20, 10, 4, 5; then 10, 2, 2, 10; then 10, 5, 2, 2.5.
        "jspec lookup": make_timings(
            [[0.5, 1, 1, 2], [1, 5, 2, 1], [1, 2, 2, 4]],
            [[10, 10, 4, 10]] * 3, [[9, 9, 3, 9]] * 3, [[3, 6, 3, 0], [3, 6, 3, 0], [3, 3, 3, 0]],
        ),
    }  # fmt: skip


def test_figures_by_hand(timings):
    """A task's speed is the mean of its answers' speeds, its speed-up the median over repeats.

    Totals would give "qa" 4 in the first repeat instead of 2.5.
    """
    lookup = columns_by_method(timings, PLAIN_OF, TASK_OF_PROMPT)["jspec lookup"]
    assert list(lookup["tasks"]) == ["qa", "rag"]
    qa, rag = lookup["tasks"].values()
    # (20 + 10) / (10 + 2), (10 + 2) / (5 + 1), (10 + 5) / (5 + 1)
    assert qa["speedup"]["median"] == pytest.approx(np.median([2.5, 2, 2.5]))
    assert qa["mean_accepted_tokens"] == pytest.approx(6 * 9 / (3 * 3 + 6 + 6 + 3))
    assert qa["num_prompts"] == 2
    assert rag["speedup"]["median"] == pytest.approx(np.median([1, 4, 1]))
    assert (rag["speedup"]["low"], rag["speedup"]["high"]) == pytest.approx((1, 4))
    assert rag["mean_accepted_tokens"] is None  # no call after those that read the prompt
    # (20 + 10 + 4 + 5) / 21, (10 + 2 + 2 + 10) / 10.5, (10 + 5 + 2 + 2.5) / 10.5
    assert lookup["overall"]["speedup"]["median"] == pytest.approx(19.5 / 10.5)
    assert lookup["overall"]["num_prompts"] == 4
    assert lookup["overall"]["mean_accepted_tokens"] == pytest.approx(3 * 30 / (12 + 12 + 9))


def test_table_has_a_line_a_task_and_plain_methods_have_no_column(timings):
    """Guards against figures in the wrong line."""
    columns = columns_by_method(timings, PLAIN_OF, TASK_OF_PROMPT)
    _, head, qa, rag, overall = format_columns(columns, PLAIN_OF).splitlines()
    assert head.split() == ["prompts", "jspec", "lookup"]
    assert qa.split()[:3] == ["qa", "2", "2.50"]
    assert qa.endswith("/ 2.25")
    assert rag.endswith("1.00 [1.00, 4.00] / -")
    assert overall.split()[:3] == ["overall", "4", "1.86"]
    assert len({len(line) for line in (qa, rag, overall)}) == 1


def test_without_plain_decoding_there_are_no_speedups(timings):
    """Guards against another way as the base."""
    del timings["jspec plain"]
    columns = columns_by_method(timings, PLAIN_OF, TASK_OF_PROMPT)
    assert columns["jspec lookup"]["overall"]["speedup"] is None
    assert columns["jspec lookup"]["tasks"]["qa"] == {
        "num_prompts": 2, "speedup": None, "mean_accepted_tokens": 2.25
    }  # fmt: skip
    assert format_columns(columns, PLAIN_OF).splitlines()[-1].endswith("- / 2.73")
    assert format_columns({}, PLAIN_OF) is None


def test_categories_are_grouped_where_all_six_tasks_are_there():
    """ "coding" of another benchmark is no multi-turn conversation."""
    everything = [category for members in TASKS.values() for category in members]
    tasks = tasks_of([*everything, "poems", None])
    assert tasks[:8] == ["multi-turn conversation"] * 8
    assert tasks[8:] == [*list(TASKS)[1:], "poems", None]
    some = ["coding", "math", "qa", None]
    assert tasks_of(some) == some


@pytest.mark.parametrize(
    ("drafters", "expected"),
    [
        (["none"], {("prompt_lookup", 2)}),
        (["prompt_lookup:3", "prompt_lookup:9"], {("prompt_lookup", 3), ("prompt_lookup", 9)}),
        (["prompt_lookup:auto"], {("prompt_lookup", 2)}),
        (["model", "hierarchical:2"], {("model", 7), ("model", 2)}),
        (["model+prompt_lookup:4", "model:auto"], {("model", 4)}),
    ],
)
def test_numbers_of_drafts_are_those_of_jspecs_methods(drafters, expected):
    """Guards against a comparison of unlike numbers of drafts; plain is always there, first."""
    methods = transformers_methods(parse_methods(drafters, "7"))
    assert next(iter(methods.items())) == ("transformers plain", ("none", 0))
    assert set(methods.values()) == {("none", 0), *expected}
    for name, (drafter, number) in list(methods.items())[1:]:
        assert name == f"transformers {drafter}:{number}"


def test_plain_decoding_is_that_of_the_same_program():
    """Or jspec's, where it was not measured."""
    names = ["jspec plain", "jspec model:2", "transformers plain", "transformers model:2",
             "llama.cpp lookup:2"]  # fmt: skip
    assert list(plain_of(names).values()) == [
        "jspec plain", "jspec plain", "transformers plain", "transformers plain", "jspec plain"
    ]  # fmt: skip


def test_a_draft_of_another_vocabulary_is_refused():
    """transformers would raise in the middle of the run."""
    config = dataclasses.replace(target().config, vocab_size=64)
    with pytest.raises(InputError, match=r"draft of 128 ids .* got 64 \(small\)"):
        check_vocabularies(target(), make_model(config, name="small"))
