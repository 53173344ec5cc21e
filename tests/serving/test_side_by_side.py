"""A server whose rows choose their numbers of drafts verifies their blocks side by side, in C++."""

import dataclasses

import numpy as np
import pytest

from jspec.generation.costs import RoundCosts
from jspec.generation.generator import Generator
from jspec.generation.request import Request
from jspec.sampling.settings import Switches
from jspec.serving.worker import make_scheduler
from jspec.speculation.control import drafters_of
from tests import tiny_models
from tests.serving.test_paused import PROMPTS, SETTINGS, answers, spoil

CONFIG = dataclasses.replace(tiny_models.CONFIG, head_dim=32)  # of which C++ reads rows in place
MANY_PAGES, FEW_PAGES = 20, 7


def make(batch_size, acceptance):
    """Returns a Generator of a lookup and a draft model, of which both are worth their costs."""
    target, draft = (
        tiny_models.make_model(CONFIG, params=tiny_models.peaked_params(CONFIG, disturbance=much))
        for much in (0.0, 0.02)
    )
    options = {
        "drafter": "prompt_lookup+model", "num_draft_tokens": "auto", "acceptance": acceptance,
        "batch_size": batch_size,
    }  # fmt: skip
    engine = Generator(target, draft, **options).engine
    names = drafters_of(engine.drafter.kinds)
    seconds = tuple(1 + 0.05 * number for number in engine.numbers)
    reading = tuple(0.002 * (name == "model") for name in names)
    costs = RoundCosts((512,), engine.numbers, tuple(names), ((seconds,) * 2,), (reading,))
    return Generator(target, draft, costs=costs, **options)


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
def test_a_row_says_what_it_says_alone(acceptance):
    """In few pages, too, where answers wait and what nobody has is not even a number."""
    alone, together = make(1, acceptance), make(4, acceptance)
    if not together.engine.call_sizes(4, Switches()):
        pytest.skip("blocks lie side by side where C++ attends")
    requests = [
        Request(prompt, settings) for prompt, settings in zip(PROMPTS, SETTINGS, strict=True)
    ]
    expected = [alone.generate(request).token_ids for request in requests]
    results = together.generate(requests)
    assert [result.token_ids for result in results] == expected
    assert all(result.stats.num_proposed for result in results)
    for num_pages in (MANY_PAGES, FEW_PAGES):
        # Layers, keys and values, heads, slots, dimensions, bytes, of target and draft.
        size = 2 * 2 * 2 * 64 * CONFIG.head_dim * 4 * 2
        scheduler = make_scheduler(
            together, max_queue=20, rounds_per_visit=3, cache_bytes=num_pages * size + 1
        )
        spoil(scheduler, np.random.default_rng(0))
        assert [result.token_ids for result in answers(together, scheduler)] == expected
        assert (scheduler.num_paused > 0) == (num_pages == FEW_PAGES)
