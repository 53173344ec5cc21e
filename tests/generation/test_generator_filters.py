"""Top-k, top-p and min-p on their way from a request through speculation to the drawn tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.generation.request import Request, SamplingParams
from jspec.models import init_cache, make_apply
from tests.cases import slow_unless
from tests.tiny_models import CONFIG, shared_generator, target

_PROMPT = list(b"what is likely")
_DRAFTERS = ("none", "prompt_lookup", slow_unless(False, "model"))
_FILTERS = [("top_k", 3), ("top_p", 0.6), ("min_p", 0.2)]
# All filters on, none of which takes anything away: one program serves them all.
_OPEN = {"top_k": CONFIG.vocab_size, "top_p": 1 - 2**-20, "min_p": 1e-30}


def _filtered(drafter, **filters):
    """Returns settings in which the drafts' filters are all switched on, plain decoding's alone."""
    filters = filters if drafter == "none" else _OPEN | filters
    return {"temperature": 1.3, "seed": 5, **filters}


@pytest.mark.parametrize("drafter", _DRAFTERS)
def test_top_k_of_one_is_greedy(drafter):
    """Guards against a filter that the target's distribution or the draft's does not get."""
    greedy = shared_generator(drafter).generate(Request(_PROMPT, SamplingParams(max_new_tokens=24)))
    settings = SamplingParams(max_new_tokens=24, **_filtered(drafter, top_k=1))
    filtered = shared_generator(drafter).generate(Request(_PROMPT, settings))
    assert filtered.token_ids == greedy.token_ids


@pytest.mark.parametrize("drafter", _DRAFTERS)
@pytest.mark.parametrize(("name", "value"), _FILTERS)
def test_every_token_is_one_that_the_filter_keeps(drafter, name, value):
    """Guards against values that reach another filter, or none: each has its own check here."""
    settings = SamplingParams(max_new_tokens=40, **_filtered(drafter, **{name: value}))
    answer = shared_generator(drafter).generate(Request(_PROMPT, settings)).token_ids
    tokens = jnp.asarray([_PROMPT + answer[:-1]], jnp.int32)
    cache = init_cache(CONFIG, batch_size=1, capacity=tokens.shape[1], dtype=jnp.float32)
    logits = make_apply(CONFIG)(target().params, tokens, cache)[0]
    probs = np.exp(np.asarray(logits[0, len(_PROMPT) - 1 :], np.float64) / 1.3)
    probs /= probs.sum(axis=1, keepdims=True)
    for distribution, token in zip(probs, answer, strict=True):
        above = distribution[distribution > distribution[token]]
        kept = {
            "top_k": len(above) < 3,
            "top_p": above.sum() < 0.6 + 1e-4,
            "min_p": distribution[token] >= 0.2 * distribution.max() - 1e-4,
        }
        assert kept[name]


@pytest.mark.parametrize("temperature", [1e-8, 3e-9, 1e-12, 1e-30, 1e-44])
def test_a_temperature_near_zero_is_greedy(temperature):
    """Guards against logits that overflow when divided, and a NaN that becomes token 0."""
    greedy = shared_generator("none").generate(Request(_PROMPT, SamplingParams(max_new_tokens=12)))
    settings = SamplingParams(max_new_tokens=12, temperature=temperature, top_p=1e-44)
    cold = shared_generator("none").generate(Request(_PROMPT, settings))
    assert cold.token_ids == greedy.token_ids


@pytest.mark.parametrize(("name", "value"), _FILTERS)
def test_the_draft_is_filtered_like_the_target(name, value):
    """Guards against drafts that the target's filter has ruled out: right, and always refused."""
    settings = SamplingParams(max_new_tokens=60, **_filtered("self", **{name: value}))
    stats = shared_generator("self").generate(Request(_PROMPT, settings)).stats
    assert stats.num_accepted == stats.num_proposed > 0
