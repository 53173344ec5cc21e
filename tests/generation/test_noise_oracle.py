"""Every token that is drawn is the one that an oracle of its own draws, from the first on.

The oracle knows the seed and the position, and nothing of jspec but the model: it folds the keys
itself. Statistics cannot see two positions that share their noise where each alone is right; this
can, and so can the joint distribution of the first two tokens.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.generation.request import Request, SamplingParams
from jspec.models import init_cache, make_apply
from jspec.speculation import plain
from tests.cases import slow_unless
from tests.speculation.drive import Engine, compiled_anew
from tests.speculation.toys import VOCAB, make_tables, softmax, toy_apply, toy_cache
from tests.tiny_models import CONFIG, shared_generator, target

PROMPT = [10, 84, 104, 101, 32]
NUM_NEW = 24
TEMPERATURE = 1.5  # hot, so that the noise decides every token
SEEDS = [0, 1, 2, 3, 7, 2**24 + 7, 2**31, 2**32 - 1]
NUM_ROWS = 20_000
# The 99.9999 % point of chi-square with VOCAB ** 2 - 1 = 24 degrees of freedom.
LARGEST = 74.0


def oracle_gumbel(seed, position, size):
    """Returns the noise of one position: the seed, then "plain", the position, and offset 0."""
    key = jax.random.key(np.uint32(seed), impl="threefry2x32")
    for number in (0, position, 0):
        key = jax.random.fold_in(key, number)
    return np.asarray(jax.random.gumbel(key, [size], jnp.float32, mode="high"))


@functools.cache
def model_logits():
    """Returns the model as a function of NUM_NEW + len(PROMPT) tokens."""
    config, size = CONFIG, len(PROMPT) + NUM_NEW
    empty = init_cache(config, batch_size=1, capacity=size, dtype=jnp.float32)
    return jax.jit(lambda tokens: make_apply(config)(target().params, tokens, empty)[0][0])


def oracle_answer(seed):
    """Returns the tokens that plain decoding must draw, each by one full pass."""
    tokens = list(PROMPT)
    for position in range(len(PROMPT), len(PROMPT) + NUM_NEW):
        padded = np.zeros([1, len(PROMPT) + NUM_NEW], np.int32)
        padded[0, : len(tokens)] = tokens
        logits = np.asarray(model_logits()(padded))[position - 1]
        noise = oracle_gumbel(seed, position, CONFIG.vocab_size)
        tokens.append(int(np.argmax(logits / TEMPERATURE + noise)))
        if tokens[-1] in CONFIG.eos_ids:
            break
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("kind", ["plain", "coupled"])
def test_tokens_are_those_of_the_oracle(kind):
    """Guards against a wrong position, a seed cut short, and coarser noise.

    Under the coupled rule the text is that of plain decoding, so the same oracle holds.
    """
    drafter, rule = ("none", "rejection") if kind == "plain" else ("model", "coupled")
    generator = shared_generator(drafter, acceptance=rule)
    requests = [
        Request(PROMPT, SamplingParams(max_new_tokens=NUM_NEW, temperature=TEMPERATURE, seed=seed))
        for seed in SEEDS
    ]
    answers = [result.token_ids for result in generator.generate(requests)]
    assert answers == [oracle_answer(seed) for seed in SEEDS]
    assert len({tuple(answer[:1]) for answer in answers}) > 2, "the first token is decided already"


@functools.cache
def engine(kind):
    """Returns the compiled rounds over toy tables: [previous, newest] -> distribution."""
    from tests.speculation.test_statistics import LOOKUP, MODEL

    drafter, rule = {
        "plain": (None, "rejection"),
        "lookup, rejection": (LOOKUP, "rejection"),
        "model, block": (MODEL, "block"),
        "model, coupled": (MODEL, "coupled"),
    }[kind]
    return Engine(toy_apply, toy_cache, make_tables(seed=3), drafter, rule, max_rounds=2)


def first_two_statistic(kind):
    """Returns chi-square of the first two tokens' joint counts against their distribution."""
    prompt = [2, 0, 1, 2, 0, 3]
    # CacheSize for more than two tokens, else the first round would draft nothing.
    result = engine(kind).generate([prompt] * NUM_ROWS, max_length=len(prompt) + 5, temperature=1.2)
    assert kind == "plain" or result.infos.num_proposed[0].any()
    answers = [tokens[:2] for tokens in result.tokens]
    table = np.asarray(make_tables(seed=3)[0])
    first = softmax(table[prompt[-2], prompt[-1]], 1.2)
    second = softmax(table[prompt[-1], np.arange(VOCAB)], 1.2)
    expected = NUM_ROWS * first[:, None] * second
    counts = np.zeros([VOCAB, VOCAB])
    np.add.at(counts, tuple(np.array(answers).T), 1)
    return float(np.sum((counts - expected) ** 2 / expected))


@pytest.mark.parametrize(
    "kind", ["plain", "lookup, rejection", "model, block", slow_unless(False, "model, coupled")]
)
def test_the_first_two_tokens_are_independent_draws(kind):
    """The token of the prefill is the first draw: its noise may serve no other draw.

    20,000 rows and 24 degrees of freedom; by chance one of a million choices of seeds fails.
    """
    assert first_two_statistic(kind) < LARGEST


def test_a_prefill_that_shares_its_noise_is_caught(monkeypatch):
    """Negative control: the first token drawn with the noise of the second."""
    draw = plain.draw_next

    def late(logits, settings, seed, position):
        is_first = int(sys._getframe(1).f_code.co_name == "prefill_chunk")
        return draw(logits, settings, seed, position + is_first)

    monkeypatch.setattr(plain, "draw_next", late)
    engine.cache_clear()
    with compiled_anew():
        statistic = first_two_statistic("plain")
    engine.cache_clear()
    assert statistic > 10 * LARGEST
