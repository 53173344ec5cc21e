"""Drafting with the target's own layers through the Generator."""

import pytest

from jspec.drafters import DrafterOptions
from jspec.generation.request import Request, SamplingParams
from tests.cases import slow_unless
from tests.generation.test_generator_processors import PENALTIES
from tests.tiny_models import make_generator, shared_generator

REQUESTS = [
    Request(list(b"what is said again"), SamplingParams(max_new_tokens=40, **PENALTIES)),
    Request([97], SamplingParams(max_new_tokens=30)),
    Request(
        list(b"1 2 3 4 1 2"),
        SamplingParams(max_new_tokens=36, temperature=0.9, seed=3, **PENALTIES),
    ),
    Request(list(b"to the end of it"), SamplingParams(max_new_tokens=25, temperature=1.2, seed=4)),
]


@pytest.mark.parametrize("layers", [(0,), slow_unless(False, (1,))])
def test_a_batch_of_strangers_says_what_plain_decoding_says(layers):
    """Greedy and sampled rows, with and without penalties, in one batch, under the coupled rule."""
    expected = [shared_generator("none").generate(request) for request in REQUESTS]
    generator = make_generator(
        "layer_skip",
        acceptance="coupled",
        drafter_options=DrafterOptions(draft_layers=layers),
        batch_size=4,
    )
    results = generator.generate(REQUESTS)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    assert generator.describe()["drafter_options"]["draft_layers"] == layers
    stats = [result.stats for result in results]
    assert 0 < sum(s.num_accepted for s in stats) < sum(s.num_proposed for s in stats)
