"""Rounds of no more rows than run: the same answers, whoever comes and goes."""

import pytest

from jspec.common.timing import compile_clock
from jspec.generation.batch import row_counts
from jspec.generation.request import SamplingParams
from jspec.serving.worker import make_scheduler
from tests.serving.test_slots import submit
from tests.tiny_models import make_generator, shared_generator


@pytest.mark.parametrize(
    ("num_rows", "counts"),
    [(1, (1,)), (3, (3,)), (7, (7,)), (8, (1, 2, 8)), (32, (1, 2, 8, 32)), (24, (1, 6, 24))],
)
def test_few_programs_for_many_rows(num_rows, counts):
    assert row_counts(num_rows) == counts


@pytest.mark.slow
def test_a_batch_grows_and_shrinks_and_no_answer_changes():
    """One, then seven more beside it, then the last one alone; nothing is compiled for it."""
    generator = make_generator("prompt_lookup", batch_size=8)
    scheduler = make_scheduler(generator, max_queue=20, rounds_per_visit=2)
    batch, seen = scheduler.slots._batch, []
    num_programs = compile_clock().num_programs
    asked = [SamplingParams(max_new_tokens=60 if seed in (0, 7) else 5, temperature=0.9, seed=seed)
             for seed in range(8)]  # fmt: skip

    def step():
        for update in scheduler.step():
            update.job.on_update(update)
        seen.append(len(batch._state.last_token))

    answers = [submit(generator, scheduler, [5, 6, 7], asked[0])[1]]
    step()
    answers += [
        submit(generator, scheduler, [5, 6, 7], settings_of_one)[1] for settings_of_one in asked[1:]
    ]
    while scheduler.is_busy:
        step()
    assert seen[0] == 1
    assert max(seen) == 8
    assert compile_clock().num_programs == num_programs
    answers.append(submit(generator, scheduler, [5, 6, 7], asked[1])[1])
    while scheduler.is_busy:
        step()
    assert seen[-1] == 1
    assert compile_clock().num_programs == num_programs
    alone = shared_generator("prompt_lookup")
    for settings, results in zip([*asked, asked[1]], answers, strict=True):
        (expected,) = alone.generate([[5, 6, 7]], settings)
        assert results[0].token_ids == expected.token_ids
