"""The processed distribution, against transformers' own processors and closed forms."""

import itertools
import operator

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from jspec.generation.request import SamplingParams
from jspec.sampling.distribution import NO_TOKEN, sample, sampling_probs
from jspec.sampling.settings import PROCESSORS, SamplingSettings, Switches, process_drafts
from tests.cases import slow_unless

VOCAB = 23
STOP_IDS = [4, 9]
BIAS = {1: 2.5, 4: -1.0, 22: 30.0}
PIPELINES = {
    "bias": {"logit_bias": BIAS},
    "repetition": {"repetition_penalty": 1.7},
    "encouraged repetition": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.8},
    "allowed": {"allowed_token_ids": (0, 4, 7, 8, 20)},
    "forbidden": {"forbidden_token_ids": (2, 3, 22)},
    "min_new_tokens": {"min_new_tokens": 5},
    "all": {
        "logit_bias": BIAS,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "allowed_token_ids": tuple(range(1, 23)),
        "forbidden_token_ids": (2,),
        "min_new_tokens": 6,
        "temperature": 0.8,
        "top_k": 12,
        "top_p": 0.9,
        "min_p": 0.02,
    },
}


def settings_of(prompt, options, processors=PROCESSORS):
    options = SamplingParams(**({"temperature": 1.0} | options))
    kinds = {"prompt": list(prompt), "stop_ids": STOP_IDS, "vocab_size": VOCAB}
    states = tuple(processor.init(options, **kinds) for processor in processors)
    return SamplingSettings(
        temperature=jnp.array([options.temperature], jnp.float32),
        top_k=jnp.array([options.top_k], jnp.int32),
        top_p=jnp.array([options.top_p], jnp.float32),
        min_p=jnp.array([options.min_p], jnp.float32),
        states=jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], states),
        switches=Switches(True, True, True, processors),
    )


def oracle(logits, prompt, output, options):
    """Returns the distribution that transformers' processors give after `output`.

    They have no presence and no frequency penalty: these are as OpenAI defines them.
    """
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process

    text = torch.tensor([[*prompt, *output]])
    scores = torch.tensor(np.asarray(logits))[None]
    options = SamplingParams(**({"temperature": 1.0} | options))
    if options.logit_bias:
        bias = [[[token], value] for token, value in options.logit_bias]
        scores = logits_process.SequenceBiasLogitsProcessor(bias)(text, scores)
    if options.repetition_penalty != 1:
        penalty = logits_process.RepetitionPenaltyLogitsProcessor(options.repetition_penalty)
        scores = penalty(text, scores)
    counts = torch.tensor(np.bincount(np.asarray(output, int), minlength=VOCAB))
    scores = scores - options.presence_penalty * (counts > 0) - options.frequency_penalty * counts
    if options.min_new_tokens:
        scores = logits_process.MinNewTokensLengthLogitsProcessor(
            len(prompt), options.min_new_tokens, STOP_IDS
        )(text, scores)
    forbidden = set(options.forbidden_token_ids)
    if options.allowed_token_ids is not None:
        forbidden |= set(range(VOCAB)) - set(options.allowed_token_ids)
    if forbidden:
        scores = logits_process.SuppressTokensLogitsProcessor(sorted(forbidden))(text, scores)
    scores = logits_process.TemperatureLogitsWarper(options.temperature)(text, scores)
    if options.top_k:
        scores = logits_process.TopKLogitsWarper(options.top_k)(text, scores)
    if options.top_p < 1:
        scores = logits_process.TopPLogitsWarper(options.top_p)(text, scores)
    if options.min_p:
        scores = logits_process.MinPLogitsWarper(options.min_p)(text, scores)
    return torch.softmax(scores.double(), dim=-1)[0].numpy()


FILTERS = {"cold": {"temperature": 0.6}, "top_k": {"top_k": 5}, "top_p": {"top_p": 0.8},
           "min_p": {"min_p": 0.1}}  # fmt: skip
SINGLE = {name: options for name, options in PIPELINES.items() if name != "all"} | FILTERS


def pairs_of(single):
    """Returns the options of every two of them."""
    pairs = itertools.combinations(single, 2)
    return {f"{left}, {right}": single[left] | single[right] for left, right in pairs}


FILTER_PAIRS = pairs_of(FILTERS)
PAIRS = PIPELINES | pairs_of(SINGLE)
after = jax.jit(SamplingSettings.after)
probs_of = jax.jit(lambda logits, settings: sampling_probs(logits[:, None], settings)[:, 0])


@pytest.mark.parametrize(
    "options",
    [slow_unless(name in PIPELINES | FILTER_PAIRS, PAIRS[name]) for name in PAIRS],
    ids=PAIRS,
)
def test_distribution_equals_transformers_along_an_output(options):
    """Guards against another order, a prompt that is not counted, or one that is counted twice.

    Each processor alone, every pair of filters, and all; the slow ones are all other pairs.
    """
    rng = np.random.default_rng(0)
    prompt, output = rng.integers(0, VOCAB, 6), rng.integers(0, VOCAB, 9)
    settings = settings_of(prompt, options)
    for i, token in enumerate(output):
        logits = (4 * rng.normal(size=[1, VOCAB])).astype(np.float32)
        expected = oracle(logits[0], prompt, output[:i], options)
        np.testing.assert_allclose(probs_of(logits, settings)[0], expected, atol=1e-6)
        settings = after(settings, np.array([token], np.int32))


@pytest.mark.parametrize("name", PIPELINES)
def test_every_position_of_a_block_sees_its_own_prefix(name):
    """Guards against one state for the whole block: a penalty would miss the drafts before."""
    rng = np.random.default_rng(1)
    prompt, block = rng.integers(0, VOCAB, 6), rng.integers(0, 4, [1, 5]).astype(np.int32)
    settings = settings_of(prompt, PIPELINES[name])
    logits = jnp.asarray(4 * rng.normal(size=[1, 5, VOCAB]), jnp.float32)
    start = settings.after(jnp.asarray(block[:, 0]))
    processed = jax.jit(process_drafts)(logits, start, jnp.asarray(block[:, 1:]))
    for i in range(5):
        settings = settings.after(jnp.asarray(block[:, i]))
        np.testing.assert_allclose(processed[:, i], settings.process(logits[:, i]), atol=1e-6)


def test_rejected_tokens_never_were():
    """Rolling back: the state behind a round knows only the kept tokens of its row."""
    rows = [settings_of([1], PIPELINES["all"]) for _ in range(3)]
    settings = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *rows)
    tokens = jnp.array([[3, 5, 3], [6, 6, 7], [8, 9, 10]], jnp.int32)
    counts = [0, 3, 1]
    valid = jnp.arange(3) < jnp.array(counts)[:, None]
    actual = jax.jit(SamplingSettings.after_all)(settings, tokens, valid)
    for row, count in enumerate(counts):
        expected = rows[row]
        for token in tokens[row, :count]:
            expected = expected.after(token[None])
        kept = jax.tree.map(operator.itemgetter(slice(row, row + 1)), actual.states)
        jax.tree.map(np.testing.assert_array_equal, kept, expected.states)


def test_default_settings_change_nothing():
    """Guards against rows that pay for a neighbour's processors: theirs must be neutral."""
    logits = np.random.default_rng(3).normal(size=[1, VOCAB]).astype(np.float32)
    settings = settings_of([1, 2, 3], {})
    for token in (1, 5, 5):
        np.testing.assert_array_equal(settings.process(jnp.asarray(logits)), logits)
        settings = settings.after(jnp.array([token], jnp.int32))


def test_a_distribution_that_is_none_gives_no_token():
    """Guards against NaN's argmax, or token 0, taken for an answer; other rows go on."""
    logits = np.zeros([4, 1, VOCAB], np.float32)
    logits[0, 0, 3], logits[1], logits[2, 0, 5] = np.nan, -np.inf, np.inf
    logits[3, 0, 7] = 9
    noise = jnp.zeros([4, VOCAB])
    for temperature in (0.0, 1.0):
        settings = SamplingSettings(
            jnp.full([4], temperature), jnp.zeros([4], jnp.int32), jnp.ones([4]), jnp.zeros([4])
        )
        tokens = sample(jax.jit(sampling_probs)(logits, settings)[:, 0], noise)
        assert tokens.tolist() == [NO_TOKEN, NO_TOKEN, NO_TOKEN, 7]


EXTREMES = st.sampled_from([-np.inf, np.inf, np.nan, 0.0, -0.0, 1e-45, 1e-38, 3e38, -3e38, 1.0])


@hypothesis.settings(deadline=None, max_examples=30, derandomize=True)
@hypothesis.given(
    arrays.arrays(np.float32, (1, VOCAB), elements=EXTREMES | st.floats(-50, 50, width=32)),
    st.sampled_from(sorted(PIPELINES)),
)
def test_extreme_logits_give_a_distribution_or_no_token(logits, name):
    """Guards against NaN, a forbidden token, or a distribution that is none, drawn as if it were a
    token.
    """
    settings = settings_of([1, 2, 3], PIPELINES[name])
    distribution = np.asarray(probs_of(jnp.asarray(logits), settings))[0]
    token = int(sample(jnp.asarray(distribution)[None], jnp.zeros([1, VOCAB]))[0])
    if token == NO_TOKEN:
        assert np.isnan(distribution).any() or not distribution.any()
        return
    np.testing.assert_allclose(distribution.sum(), 1, atol=1e-5)
    assert distribution[token] > 0
    assert not np.isneginf(logits[0, token])
    allowed = PIPELINES[name].get("allowed_token_ids", range(VOCAB))
    assert token in set(allowed) - set(PIPELINES[name].get("forbidden_token_ids", ()))
