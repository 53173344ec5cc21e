"""At temperature 0 the drafts' distributions are not read: the text is that of any of them."""

import jax.numpy as jnp
import pytest

from jspec.generation.generator import Generator
from jspec.generation.request import Request, SamplingParams
from jspec.speculation import types
from tests.cases import slow_unless
from tests.tiny_models import draft, shared_generator, target

PROMPTS = ["one two one two one", "abcabcabc", "z"]


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
    requests = [Request(list(prompt.encode()), settings) for prompt in PROMPTS]
    options = {"drafter": drafter, "acceptance": acceptance, "num_draft_tokens": 3}
    answers = Generator(target(), draft(), batch_size=2, **options).generate(requests)
    plain = shared_generator("none").generate(requests)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]
    assert sum(answer.stats.num_proposed for answer in answers) > 10
