"""The next turn of a conversation begins with an answer, which is not read again."""

import pathlib
import tempfile

import jax
import numpy as np
import pytest

from jspec.generation.request import Request, SamplingParams
from jspec.generation.rows import Row
from jspec.kernels import PAGE
from tests import meshes
from tests.cases import slow_unless
from tests.serving.served import answer
from tests.serving.test_paused import build
from tests.serving.test_slots import make
from tests.tiny_models import shared_generator

QUESTION = [1 + n * n % 97 for n in range(20)]
MORE = [7, 8, 9]
MANY = {"max_new_tokens": 62, "min_new_tokens": 60}
SETTINGS = {
    "greedy": SamplingParams(**MANY),
    "sampled": SamplingParams(**MANY, temperature=0.9, seed=3),
}
# Drafter, acceptance, how tokens are chosen.
CASES = [
    ("model", "rejection", "sampled"),
    *(
        slow_unless(False, case)
        for case in (
            ("model", "rejection", "greedy"),
            ("model", "coupled", "sampled"),
            ("none", "rejection", "greedy"),
            ("prompt_lookup", "rejection", "sampled"),
            ("hierarchical", "rejection", "sampled"),
            ("tree", "rejection", "greedy"),
            ("eagle", "rejection", "sampled"),
            ("dflash", "rejection", "sampled"),
            ("mtp", "rejection", "sampled"),
            ("medusa", "rejection", "sampled"),
            ("translated", "rejection", "sampled"),
        )
    ),
]
TRAINED = ("eagle", "dflash", "mtp", "medusa")


@pytest.fixture(scope="module")
def made():
    return make(shared_generator("model", batch_size=3))


def of(drafter, acceptance="rejection", batch_size=1):
    """Returns a Generator; one of a single row reads all of its prompts."""
    options = {"acceptance": acceptance, "batch_size": batch_size}
    if drafter == "translated":
        return build(drafter, **options)
    if drafter not in TRAINED:
        return shared_generator(drafter, **options)
    with tempfile.TemporaryDirectory() as folder:
        head = meshes.drafter_options(drafter, pathlib.Path(folder))
        return meshes.make_generator(drafter, None, drafter_options=head, **options)


def draft_length_of(scheduler, function):
    """Returns the slots of the drafter's caches as the function began each prompt."""
    batch, lengths = scheduler.slots._batch, []
    begin_in = batch.begin_in

    def noted(*arguments, **options):
        lengths.append(options["draft_length"])
        return begin_in(*arguments, **options)

    batch.begin_in = noted
    try:
        function()
    finally:
        del batch.begin_in
    return lengths


@pytest.mark.parametrize("case", CASES)
def test_the_next_turn_reads_only_what_is_new(made, case):
    """By the tokens that an undisturbed Generator gives; of the drafter's pages, too."""
    drafter, acceptance, chosen = case
    settings = SETTINGS[chosen]
    is_made = drafter == "model" and acceptance == "rejection"
    generator, scheduler = made if is_made else make(of(drafter, acceptance, batch_size=3))
    alone = of(drafter, acceptance)
    scheduler.slots.clear()
    text, answers = list(QUESTION), []
    for _ in range(3):
        num_known = max(len(text) - len(MORE) - 1, 0) // PAGE * PAGE if answers else 0

        def ask():
            answers.append(answer(generator, scheduler, text, settings))  # noqa: B023

        (draft_length,) = draft_length_of(scheduler, ask)
        num_cached, result = answers[-1]
        assert num_cached == num_known
        if drafter in ("model", "hierarchical", "tree", "eagle", "dflash", "mtp"):
            assert draft_length == max(num_cached - PAGE, 0)
        expected = alone.generate(Request(text, settings))
        assert result.token_ids == expected.token_ids
        text += [*result.token_ids, *MORE]
    assert answers[-1][0] == 2 * PAGE
    assert all(node.num_pins == 0 for node in scheduler.slots.tree._by_use)


def test_what_two_answers_share_is_not_written(made):
    """Both go on from the same pages, of target and drafter, with other words."""
    generator, scheduler = made
    scheduler.slots.clear()
    settings, slots = SETTINGS["sampled"], scheduler.slots
    _, first = answer(generator, scheduler, QUESTION, settings)
    _, second = answer(generator, scheduler, [*QUESTION, *first.token_ids, *MORE], settings)
    text = [*QUESTION, *first.token_ids, *MORE, *second.token_ids]

    def contents():
        nodes = [node.page for node in slots.tree._by_use]
        numbers = (
            [page for node in nodes for page in node.pages],
            [page for node in nodes for page in node.draft_pages],
        )
        return numbers, [
            np.array(leaf[np.array(numbers[part])])
            for part in range(2)
            for leaf in jax.tree.leaves(slots._batch._layers[part])
        ]

    numbers, before = contents()
    assert list(map(len, numbers)) == [2, 1]
    for word in (3, 4):  # one after another, after 128 tokens
        num_cached, result = answer(generator, scheduler, [*text, word], settings)
        assert num_cached == 2 * PAGE
        expected = of("model").generate(Request([*text, word], settings))
        assert result.token_ids == expected.token_ids
    for part, pages in enumerate(numbers):
        leaves = jax.tree.leaves(slots._batch._layers[part])
        half = before[part * len(leaves) : (part + 1) * len(leaves)]
        for leaf, old in zip(leaves, half, strict=True):
            np.testing.assert_array_equal(np.array(leaf[np.array(pages)]), old)


@pytest.mark.parametrize("drafter", ["recycle", "prompt_lookup+recycle"])
def test_a_drafter_that_counts_cannot_be_cut(drafter):
    """What it has counted up to the end of an answer is not what the beginning alone leaves."""
    assert not build(drafter).engine.drafter.can_roll_back
    assert build("prompt_lookup").engine.drafter.can_roll_back


def test_sampled_rows_that_choose_find_what_they_would_find_alone(made):
    """What a drafter has yet to read is among the costs by which they choose their tokens."""
    batch = made[1].slots._batch
    row = Row(SETTINGS["sampled"], QUESTION, (0,), 100)
    assert batch.shares_drafter_pages(row)
    engine = batch.engine
    try:
        engine.numbers = (0, 1, 2)
        assert not batch.shares_drafter_pages(row)
        greedy = row._replace(settings=SETTINGS["greedy"])
        assert batch.shares_drafter_pages(greedy)
        engine.is_lossless = False
        assert not batch.shares_drafter_pages(greedy), "its tokens follow from its drafts, too"
        engine.is_lossless = engine.is_coupled = True
        assert batch.shares_drafter_pages(row)
    finally:
        engine.numbers, engine.is_coupled, engine.is_lossless = (), False, True
