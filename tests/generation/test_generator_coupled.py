"""The coupled rule through the Generator: one seed, one text, whatever drafts it."""

import pytest

from jspec.generation.request import Request, SamplingParams
from tests.cases import slow_unless
from tests.tiny_models import NUM_DRAFT_TOKENS, shared_generator

PROMPTS = [list(b"say it once"), list(b"and say it again"), list(b"a"), list(b"to the end of it")]
SETTINGS = SamplingParams(max_new_tokens=32, temperature=0.8, seed=7)


@pytest.fixture(scope="module")
def plain():
    """Plain decoding's answers."""
    generator = shared_generator("none")
    return [generator.generate(Request(prompt, SETTINGS)) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("drafter", "num_draft_tokens", "batch_size"),
    [
        ("prompt_lookup", NUM_DRAFT_TOKENS, 1),
        ("model", 1, 4),
        slow_unless(False, "model", NUM_DRAFT_TOKENS, 1),
        slow_unless(False, "prompt_lookup", 7, 4),
        slow_unless(False, "hierarchical", 7, 4),
        slow_unless(False, "model", 7, 4),
        slow_unless(False, "prompt_lookup", 1, 4),
        slow_unless(False, "dflash", 7, 4),
        slow_unless(False, "dflash", NUM_DRAFT_TOKENS, 1),
    ],
)
def test_one_seed_gives_one_text(plain, drafter, num_draft_tokens, batch_size):
    """Guards against noise that depends on the round, the drafter, the batch or the proposal."""
    generator = shared_generator(
        drafter, acceptance="coupled", num_draft_tokens=num_draft_tokens, batch_size=batch_size
    )
    results = generator.generate([Request(prompt, SETTINGS) for prompt in PROMPTS])
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    assert [r.text for r in results] == [r.text for r in plain]
    assert sum(r.stats.num_accepted for r in results) > 0


def test_another_seed_gives_another_text(plain):
    """Negative control: the distributions are random enough to tell seeds apart."""
    reseeded = SamplingParams(max_new_tokens=32, temperature=0.8, seed=8)
    results = [shared_generator("none").generate(Request(p, reseeded)) for p in PROMPTS]
    assert all(a.token_ids != b.token_ids for a, b in zip(results, plain, strict=True))


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_other_rules_give_another_text_of_the_same_distribution(plain, rule):
    """Negative control: that every drafter says the same is not for free."""
    generator = shared_generator("model", acceptance=rule)
    results = generator.generate([Request(prompt, SETTINGS) for prompt in PROMPTS])
    assert [r.token_ids for r in results] != [r.token_ids for r in plain]


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
@pytest.mark.parametrize(
    "drafter", ["prompt_lookup", slow_unless(False, "model"), slow_unless(False, "dflash")]
)
def test_every_lossless_rule_is_plain_decoding_at_temperature_zero(rule, drafter):
    """There all of them keep exactly the drafts that are the most likely token."""
    settings = SamplingParams(max_new_tokens=40)
    request = Request(PROMPTS[1], settings)
    expected = shared_generator("none").generate(request).token_ids
    assert shared_generator(drafter, acceptance=rule).generate(request).token_ids == expected
