"""The Generator: the same tokens whatever the drafter, the batch and the host's visits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.generation.request import Request, SamplingParams
from jspec.generation.result import Result
from jspec.models import init_cache, make_apply
from jspec.sampling.settings import Switches
from tests import tiny_models
from tests.cases import slow_unless
from tests.tiny_models import DRAFTERS, shared_generator

GREEDY = SamplingParams(max_new_tokens=40)
SAMPLED = SamplingParams(max_new_tokens=40, temperature=0.8)


def make_prompt(length, seed=0):
    return np.random.default_rng(seed).integers(1, 128, length).tolist()


def make_requests(settings):
    """Returns requests over one, two and a wide chunk of prefill, each with its own seed."""
    lengths = (1, 5, 17, 63, 64, 65, 100, 130)
    return [
        Request(make_prompt(length, index), change(settings, seed=index, max_new_tokens=20 + index))
        for index, length in enumerate(lengths)
    ]


def change(settings, **values):
    return SamplingParams(**{**vars(settings), **values})


def tokens(results):
    return [result.token_ids for result in results]


@pytest.fixture(scope="module")
def plain_results():
    """Answers of plain decoding, one at a time: greedy and sampled."""
    plain = shared_generator("none")
    return {s: [plain.generate(r) for r in make_requests(s)] for s in (GREEDY, SAMPLED)}


def test_test_models_have_opinions():
    """Guards all other tests: near-uniform distributions would make draft and target agree by
    nature.
    """
    config, prompts = tiny_models.CONFIG, jnp.array([make_prompt(20, seed) for seed in range(8)])

    def distributions(model):
        cache = init_cache(config, batch_size=8, capacity=32, dtype=jnp.float32)
        return jax.nn.softmax(jax.jit(make_apply(config))(model.params, prompts, cache)[0])

    target, draft = distributions(tiny_models.target()), distributions(tiny_models.draft())
    entropy = -jnp.mean(jnp.sum(target * jnp.log(target), axis=-1))
    distance = jnp.mean(jnp.abs(target - draft).sum(axis=-1)) / 2
    assert entropy <= 0.7 * np.log(config.vocab_size)
    assert 0.2 <= distance <= 0.8


def test_one_prompt_gives_a_result_and_many_a_list_in_order():
    """Guards against answers in the order in which they were finished."""
    generator = shared_generator("none")
    single = generator.generate("hello", GREEDY)
    assert isinstance(single, Result)
    assert single.prompt_token_ids == list(b"hello")
    assert single.prompt == "hello"
    requests = [Request("hello", change(GREEDY, max_new_tokens=n)) for n in (9, 3, 5)]
    many = generator.generate(requests)
    assert [len(result.token_ids) for result in many] == [9, 3, 5]
    assert [result.settings.max_new_tokens for result in many] == [9, 3, 5]
    assert tokens(many) == [single.token_ids[:n] for n in (9, 3, 5)]
    assert generator.generate([]) == []
    assert tokens(generator.generate(["hello", requests[1]], GREEDY)) == [
        single.token_ids,
        single.token_ids[:3],
    ]


@pytest.mark.parametrize("drafter", [slow_unless(n != "hierarchical", n) for n in DRAFTERS[1:]])
def test_greedy_output_is_plain_decodings(plain_results, drafter):
    """Guards against invariant 2 broken anywhere between prompt and text. Float32, token for
    token.
    """
    generator = shared_generator(drafter)
    results = [generator.generate(request) for request in make_requests(GREEDY)]
    assert tokens(results) == tokens(plain_results[GREEDY])
    accepted = sum(result.stats.num_accepted for result in results)
    proposed = sum(result.stats.num_proposed for result in results)
    assert accepted > 0  # otherwise nothing was tested
    assert accepted < proposed or drafter == "self"


def test_a_model_that_drafts_for_itself_is_always_right():
    """Guards invariant 4, greedy and sampled, many rounds long: the draft hole, keys, positions."""
    generator = shared_generator("self")
    for settings in (GREEDY, SAMPLED):
        for request in make_requests(settings):
            stats = generator.generate(request).stats
            assert stats.num_accepted == stats.num_proposed


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("drafter", "batch_size"),
    [
        ("none", 3),
        slow_unless(False, "prompt_lookup", 3),
        ("model", 3),
        slow_unless(False, "model", 8),
    ],
)
def test_batched_rows_are_strangers(plain_results, drafter, batch_size, settings):
    """Guards invariant 5: noise, lengths or caches that leak between rows, and rows badly replaced.

    Eight prompts of different lengths share three rows, or have one each; two rounds a visit.
    """
    requests = make_requests(settings)
    if drafter == "none":
        single = plain_results[settings]
    else:
        single = [shared_generator(drafter).generate(request) for request in requests]
    batched = shared_generator(drafter, batch_size=batch_size, rounds_per_visit=2)
    results = batched.generate(requests)
    assert tokens(results) == tokens(single)
    assert [r.finish_reason for r in results] == [r.finish_reason for r in single]
    assert [r.stats.accepted_per_round for r in results] == [
        r.stats.accepted_per_round for r in single
    ]
    assert tokens(batched.generate(requests[::-1])) == tokens(single)[::-1]


def test_the_drafters_temperature_changes_drafts_only():
    """Guards against a draft temperature that leaks into the target's distribution."""
    generator, request = shared_generator("model"), make_requests(GREEDY)[2]
    cold = generator.generate(request)
    hot = generator.generate(
        Request(request.prompt, change(request.settings, draft_temperature=3.0))
    )
    assert hot.token_ids == cold.token_ids
    assert hot.stats.accepted_per_round != cold.stats.accepted_per_round


@pytest.mark.parametrize("drafter", ["none", "model"])
def test_prompts_at_the_limits_of_the_context(drafter):
    """Guards against a clamp at the cache's end, and one token too many or too few there."""
    generator = shared_generator(drafter)
    limit = tiny_models.CONFIG.max_seq_len
    for length, expected in ((limit - 1, 1), (limit - 2, 2), (limit - 9, 9)):
        result = generator.generate(Request(make_prompt(length), GREEDY))
        assert (len(result.token_ids), result.finish_reason) == (expected, "length")
    whole = generator.generate(Request(make_prompt(limit - 9), GREEDY)).token_ids
    plain = shared_generator("none").generate(Request(make_prompt(limit - 9), GREEDY))
    assert whole == plain.token_ids
    for length in (limit, limit + 1):
        with pytest.raises(InputError, match=f"context's {limit}, got {length}"):
            generator.generate(Request(make_prompt(length), GREEDY))


def test_plain_decoding_says_what_full_passes_say(plain_results):
    """Guards against a prompt that is not consumed whole, of one token or of a chunk and one more.

    All drafters share the prefill, and would make the same mistake.
    """
    config, results = tiny_models.CONFIG, plain_results[GREEDY]
    texts = np.zeros([len(results), config.max_seq_len], np.int32)
    for row, result in enumerate(results):
        text = result.prompt_token_ids + result.token_ids
        texts[row, : len(text)] = text
    cache = init_cache(config, batch_size=len(texts), capacity=texts.shape[1], dtype=jnp.float32)
    logits = jax.jit(make_apply(config))(tiny_models.target().params, jnp.asarray(texts), cache)[0]
    best = np.argmax(logits, axis=-1)
    for row, result in enumerate(results):
        first = len(result.prompt_token_ids) - 1
        assert result.token_ids == best[row, first : first + len(result.token_ids)].tolist()


def test_rows_without_a_request_are_done():
    """Guards against rounds that are run for nobody, in rows that wait for a request."""
    state = shared_generator("model").engine.empty_state(3, 256, Switches())
    assert state.is_done.all()
