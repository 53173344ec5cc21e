"""What the rounds of one answer look like: alone and in a batch, and in a cascade."""

import jax.numpy as jnp
import pytest

from jspec.drafters import DrafterOptions
from jspec.generation.generator import Generator
from jspec.generation.request import Request, SamplingParams
from jspec.generation.rows import capacity_for
from jspec.speculation import types
from tests.cases import slow_unless
from tests.generation.test_generator_auto import cascade
from tests.tiny_models import draft, shared_generator, target

PROMPTS = ["one two one two one", "abcabcabc", "z", "the cat and the dog and the cow"]


def test_rounds_do_not_depend_on_the_batch():
    """Guards against a model that catches up on what its neighbours were fed.

    The costs make a row lag for a while, so that it has something to catch up on; the number of
    drafts depends on how much that is. The last row is not drawn: its number may follow the batch,
    but its text is plain decoding's (invariant 2).
    """
    *drawn, greedy = (
        Request(prompt, SamplingParams(seed=seed, max_new_tokens=40, temperature=temperature))
        for seed, (prompt, temperature) in enumerate(
            zip(PROMPTS, (0.9, 0.9, 0.9, 0.0), strict=True)
        )
    )
    alone = cascade(1).generate(drawn)
    *together, last = cascade(4).generate([*drawn, greedy])
    assert [a.stats.rounds for a in together] == [a.stats.rounds for a in alone]
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]
    assert last.token_ids == shared_generator("none").generate(greedy).token_ids
    assert last.stats.num_proposed > 0
    proposers = {a_round.drafter for answer in alone for a_round in answer.stats.rounds}
    assert proposers >= {"prompt_lookup", "model"}


def test_an_unsure_member_lets_the_next_one_speak():
    """Guards against a model that has no draft, but takes its turn as if it had one."""
    options = DrafterOptions(draft_confidence=0.5)
    generator = Generator(
        target(), draft(), drafter="model+prompt_lookup", num_draft_tokens=4,
        drafter_options=options,
    )  # fmt: skip
    stats = generator.generate(
        Request("one two one two one", SamplingParams(max_new_tokens=80))
    ).stats
    by_drafter = stats.to_json()["by_drafter"]
    assert by_drafter["prompt_lookup"]["num_accepted"] > 0
    assert by_drafter["model"]["num_accepted"] > 0


@pytest.mark.parametrize(
    ("drafter", "acceptance"),
    [
        ("prompt_lookup+model", "rejection"),
        slow_unless(False, "model", "block"),
        slow_unless(False, "hierarchical", "rejection"),
        slow_unless(False, "model", "typical"),
    ],
)
def test_what_stands_in_memory_that_is_not_read_changes_no_token(drafter, acceptance, monkeypatch):
    """A rule that reads distributions at temperature 0, as `typical` does, finds zeros there."""

    def zeros_or_nan(is_read, *shape):
        return jnp.where(jnp.asarray(is_read), jnp.zeros(shape), jnp.nan)

    monkeypatch.setattr(types, "zeros_if", zeros_or_nan)
    settings = SamplingParams(max_new_tokens=24)
    requests = [Request(list(prompt.encode()), settings) for prompt in PROMPTS[:3]]
    options = {"drafter": drafter, "acceptance": acceptance, "num_draft_tokens": 3}
    answers = Generator(target(), draft(), batch_size=2, **options).generate(requests)
    plain = shared_generator("none").generate(requests)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]
    assert sum(answer.stats.num_proposed for answer in answers) > 10


def test_the_block_counts():
    """Guards against a cache that is full before the longest answer has been verified."""
    assert [capacity_for(507, 5), capacity_for(508, 5)] == [512, 1024]


def test_sizes_double_and_then_lie_closer():
    """Small caches in powers of two; where doubling costs much there is one in between."""
    rooms = (1, 512, 513, 1500, 2049, 3073, 4097, 6145)
    assert [capacity_for(room, 0) for room in rooms] == [
        512, 512, 1024, 2048, 3072, 4096, 6144, 8192,
    ]  # fmt: skip
