"""Processors, filters and log-probabilities on their way from a request through speculation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.timing import compile_clock
from jspec.generation.request import Request, SamplingParams
from jspec.models import init_cache, make_apply
from jspec.sampling.settings import Processor
from tests.cases import slow_unless
from tests.tiny_models import CONFIG, make_generator, shared_generator, target

PROMPT = list(b"what is said again")
PENALTIES = {
    "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.5,
    "logit_bias": {97: 1.0, 98: -2.0}, "forbidden_token_ids": (101, 111), "min_new_tokens": 8,
}  # fmt: skip
# What most tests ask for: all processors and log-probabilities, so that they share programs.
ALL = {"logprobs": True, **PENALTIES}
DRAFTERS = ("prompt_lookup", "self", "model", "self tree", "merged tree")
QUICK = ("self", "model", "self tree")
APPLY = jax.jit(make_apply(CONFIG))


def target_logits(answer):
    """Returns the target's logits of each token of an answer, [t v], in one pass."""
    text, tokens = PROMPT + answer[:-1], np.zeros([1, 80], np.int32)  # of one size: one program
    tokens[0, : len(text)] = text
    cache = init_cache(CONFIG, batch_size=1, capacity=80, dtype=jnp.float32)
    logits = APPLY(target().params, jnp.asarray(tokens), cache)[0]
    return np.asarray(logits)[0, len(PROMPT) - 1 : len(text)]


def processed(logits, output, stop_ids=(0,)):
    """Returns one position's logits after PENALTIES, written out anew."""
    logits = logits.astype(np.float64).copy()
    for token, value in PENALTIES["logit_bias"].items():
        logits[token] += value
    for token in {*PROMPT, *output}:
        factor = PENALTIES["repetition_penalty"]
        logits[token] = logits[token] * factor if logits[token] < 0 else logits[token] / factor
    for token in set(output):
        logits[token] -= PENALTIES["presence_penalty"]
        logits[token] -= PENALTIES["frequency_penalty"] * output.count(token)
    logits[list(PENALTIES["forbidden_token_ids"])] = -np.inf
    if len(output) < PENALTIES["min_new_tokens"]:
        logits[list(stop_ids)] = -np.inf
    return logits


def test_greedy_answer_follows_the_processed_logits():
    """Every token is the best one given its own prefix, prompt included."""
    settings = SamplingParams(max_new_tokens=30, **ALL)
    answer = shared_generator("none").generate(Request(PROMPT, settings)).token_ids
    for i, logits in enumerate(target_logits(answer)):
        assert answer[i] == np.argmax(processed(logits, answer[:i]))
    free = shared_generator("none").generate(Request(PROMPT, SamplingParams(max_new_tokens=30)))
    assert answer != free.token_ids


@pytest.mark.parametrize("drafter", [slow_unless(name in QUICK, name) for name in DRAFTERS])
def test_speculation_keeps_processed_answers(drafter):
    """Guards against states that a rejection does not take back."""
    settings = SamplingParams(max_new_tokens=40, **ALL)
    expected = shared_generator("none").generate(Request(PROMPT, settings)).token_ids
    result = shared_generator(drafter).generate(Request(PROMPT, settings))
    assert result.token_ids == expected
    if drafter == "self":  # its distribution is processed as the target's is
        assert result.stats.acceptance_rate == 1


@pytest.mark.parametrize("drafter", [slow_unless(False, "none"), "model"])
def test_rows_of_a_batch_keep_their_own_processors(drafter):
    """Guards against one row's penalties, bias or counts in another's distribution."""
    below_60 = {"forbidden_token_ids": (), "allowed_token_ids": tuple(range(60))}
    settings = [
        SamplingParams(max_new_tokens=20, temperature=0.9, seed=1, **ALL),
        SamplingParams(max_new_tokens=20),
        SamplingParams(max_new_tokens=20, temperature=1.1, seed=2, **(ALL | below_60)),
        SamplingParams(max_new_tokens=20, **(ALL | {"frequency_penalty": 2.0})),
    ]
    requests = [Request(PROMPT[i:], one) for i, one in enumerate(settings)]
    together = shared_generator(drafter, batch_size=4).generate(requests)
    alone = [shared_generator(drafter).generate(request) for request in requests]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert max(together[2].token_ids) < 60


def test_an_answer_does_not_end_early():
    """min_new_tokens holds back the model's own end and stop tokens, in every round."""
    biased = ALL | {"logit_bias": {0: 60.0}, "max_new_tokens": 12}  # the end is the most likely
    for drafter in ("none", "self"):
        for minimum in (1, 7):
            settings = SamplingParams(**(biased | {"min_new_tokens": minimum}))
            result = shared_generator(drafter).generate(Request(PROMPT, settings))
            assert (len(result.token_ids), result.finish_reason) == (minimum + 1, "eos")


@pytest.mark.parametrize(
    "drafter", ["none", *(slow_unless(name in QUICK, name) for name in DRAFTERS)]
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logprobs_are_the_targets_own(drafter, temperature):
    """Guards against a neighbour position's distribution, the draft's distribution, or a
    residual's.
    """
    settings = SamplingParams(max_new_tokens=24, temperature=temperature, **ALL)
    result = shared_generator(drafter).generate(Request(PROMPT, settings))
    answer = result.token_ids
    assert len(result.logprobs) == len(result.raw_logprobs) == len(answer)
    for i, logits in enumerate(target_logits(answer)):
        distributions = {
            "raw": logits.astype(np.float64),
            "processed": processed(logits, answer[:i]),
        }
        if temperature:
            distributions["processed"] = distributions["processed"] / temperature
        logprob_of = {"raw": result.raw_logprobs[i], "processed": result.logprobs[i]}
        for name, distribution in distributions.items():
            expected = distribution[answer[i]] - np.logaddexp.reduce(distribution)
            if name == "processed" and temperature == 0:
                expected = 0.0
            np.testing.assert_allclose(logprob_of[name], expected, atol=2e-4)


def test_a_draft_equal_to_its_target_is_always_accepted_under_penalties():
    """Guards against processors that have not seen the last token when the first draft is drawn."""
    strong = {"repetition_penalty": 3.0, "presence_penalty": 2.0, "frequency_penalty": 2.0}
    requests = [
        Request(PROMPT, SamplingParams(seed=seed, temperature=1.0, **(ALL | strong)))
        for seed in range(4)
    ]
    for answer in shared_generator("self").generate(requests):
        assert answer.stats.num_proposed > 20
        assert answer.stats.acceptance_rate == 1


def test_log_probabilities_end_with_the_tokens():
    """Guards against those of a round's tokens after a stop string."""
    generator = shared_generator("self")
    answer = generator.generate(Request(PROMPT, SamplingParams(max_new_tokens=30, **ALL)))
    for begin in range(8, 16):  # some end inside a round
        stop = answer.text[begin : begin + 2]
        settings = SamplingParams(max_new_tokens=30, stop=(stop,), **ALL)
        result = generator.generate(Request(PROMPT, settings))
        assert result.finish_reason == "stop"
        assert len(result.logprobs) == len(result.raw_logprobs) == len(result.token_ids)


def test_other_processor_settings_compile_nothing():
    """Guards invariant 6: penalties, biases, allowed tokens and minimum lengths are data."""
    generator = shared_generator("model")
    settings = SamplingParams(max_new_tokens=12, temperature=0.7, **ALL)
    generator.generate(Request(PROMPT, settings))
    before = compile_clock().num_programs
    changed = SamplingParams(
        max_new_tokens=9, temperature=0.3, seed=5, repetition_penalty=0.9, presence_penalty=-1.0,
        logit_bias={5: 2.0}, allowed_token_ids=tuple(range(3, 90)), min_new_tokens=2, logprobs=True,
    )  # fmt: skip
    generator.generate(Request(PROMPT[3:], changed))
    assert compile_clock().num_programs == before


def test_a_users_own_processor_is_applied():
    only_seven = Processor(
        "only seven",
        is_used=lambda settings: settings.seed == 7,
        init=lambda settings, **_: np.bool_(settings.seed == 7),
        apply=lambda state, logits: jnp.where(
            state[:, None] & (jnp.arange(logits.shape[1]) != 7), -jnp.inf, logits
        ),
        update=lambda state, token: state,
    )
    generator = make_generator("prompt_lookup", processors=[only_seven], batch_size=2)
    settings = [SamplingParams(max_new_tokens=6, seed=7), SamplingParams(max_new_tokens=6, seed=8)]
    results = generator.generate([Request(PROMPT, one) for one in settings])
    assert results[0].token_ids == [7] * 6
    expected = shared_generator("none").generate(Request(PROMPT, settings[1]))
    assert results[1].token_ids == expected.token_ids


# All filters on, none of which takes anything away: one program serves them all.
_OPEN = {"temperature": 1.3, "seed": 5, "top_k": CONFIG.vocab_size, "top_p": 1 - 2**-20,
         "min_p": 1e-30}  # fmt: skip
_FILTERS = [("top_k", 3), ("top_p", 0.6), ("min_p", 0.2)]


@pytest.mark.parametrize("drafter", ["none", "self", slow_unless(False, "prompt_lookup")])
def test_filters_reach_the_target(drafter):
    """Guards against values that reach another filter, or none: each has its own check here."""
    generator = shared_generator(drafter)
    greedy, *answers = (
        generator.generate(Request(PROMPT, SamplingParams(max_new_tokens=40, **settings))).token_ids
        for settings in ({}, _OPEN | {"top_k": 1}, *(_OPEN | {name: x} for name, x in _FILTERS))
    )
    assert answers[0] == greedy
    for (name, _), answer in zip(_FILTERS, answers[1:], strict=True):
        probs = np.exp(np.float64(target_logits(answer)) / 1.3)
        probs /= probs.sum(axis=1, keepdims=True)
        for distribution, token in zip(probs, answer, strict=True):
            above = distribution[distribution > distribution[token]]
            kept = {
                "top_k": len(above) < 3,
                "top_p": above.sum() < 0.6 + 1e-4,
                "min_p": distribution[token] >= 0.2 * distribution.max() - 1e-4,
            }
            assert kept[name]


@pytest.mark.parametrize("temperature", [1e-8, 1e-12, 1e-44])
def test_a_temperature_near_zero_is_greedy(temperature):
    """Guards against logits that overflow when divided, and a NaN that becomes token 0."""
    settings = _OPEN | {"temperature": temperature, "top_p": 1e-44}
    greedy, cold = (
        shared_generator("none").generate(Request(PROMPT, SamplingParams(max_new_tokens=12, **own)))
        for own in ({}, settings)
    )
    assert cold.token_ids == greedy.token_ids


@pytest.mark.parametrize(("name", "value"), _FILTERS)
def test_the_draft_is_filtered_like_the_target(name, value):
    """Guards against drafts that the target's filter has ruled out: right, and always refused."""
    settings = SamplingParams(max_new_tokens=60, **(_OPEN | {name: value}))
    stats = shared_generator("self").generate(Request(PROMPT, settings)).stats
    assert stats.num_accepted == stats.num_proposed > 0
