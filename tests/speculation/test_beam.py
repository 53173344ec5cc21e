"""One step of a beam search, against a brute-force search over lists."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.generation.beam_search import ended_beams, running_beam
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.beam import (
    EARLY_STOPPING,
    BeamLimits,
    Beams,
    Candidates,
    beam_step,
    best_candidates,
    num_candidates,
)
from tests.cases import slow_unless

VOCAB, STOPS, MOST = 9, (2, 5), 12
step = jax.jit(beam_step)


def make_limits(max_tokens=MOST, penalty=1.0, early=False, stops=STOPS):
    """Returns the limits in arrays."""
    return BeamLimits(
        jnp.array([*stops, -1], jnp.int32),
        jnp.int32(max_tokens),
        jnp.float32(penalty),
        jnp.int32(EARLY_STOPPING.index(early)),
    )


def make_table(seed):
    """Returns log-probabilities of the next token, by step and last token, [s v v].

    With the same ones in every step, texts of the same pairs in another order would tie.
    """
    logits = 1.5 * np.random.default_rng(seed).normal(size=(MOST, VOCAB, VOCAB))
    return np.asarray(jax.nn.log_softmax(logits.astype(np.float32)))


def brute_force(table, k, limits, early):
    """Returns (tokens, score) of the ended beams, best first: transformers' rules over lists."""
    most, penalty = int(limits.max_tokens), float(limits.length_penalty)
    running, pool = [([], 0.0)], []
    for length in range(1, most + 1):
        actual = [
            ([*text, token], score + float(table[len(text), text[-1] if text else 0, token]))
            for text, score in running
            for token in range(VOCAB)
        ]
        actual.sort(key=lambda beam: -beam[1])
        is_end = [text[-1] in STOPS or length == most for text, _ in actual]
        pool += [
            (text, score / length**penalty)
            for (text, score), ends in zip(actual[:k], is_end[:k], strict=True)
            if ends
        ]
        pool = sorted(pool, key=lambda beam: -beam[1])[:k]
        running = [beam for beam, ends in zip(actual, is_end, strict=True) if not ends][:k]
        if not running or (len(pool) == k and early is True):
            break
        goal = most if early == "never" and penalty > 0 else length
        if len(pool) == k and running[0][1] / goal**penalty <= pool[-1][1]:
            break
    return pool


def search(table, k, limits, first=0):
    """Returns the beams after all steps, each step taken by `beam_step`."""
    beams, last = Beams.init(k, MOST), np.full([k], first)
    number = min(num_candidates(k, len(STOPS)), VOCAB)
    while not beams.is_done:
        logprobs, tokens = jax.lax.top_k(jnp.asarray(table)[beams.num_steps, last], number)
        beams, _, last = step(beams, Candidates(logprobs, tokens), limits)
    return jax.device_get(beams)


@pytest.mark.parametrize("k", [1, 2, slow_unless(False, 4)])
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    max_tokens=st.integers(1, MOST),
    penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    early=st.sampled_from(EARLY_STOPPING),
)
def test_steps_find_what_brute_force_finds(k, seed, max_tokens, penalty, early):
    """Tables of random reals have no ties, so that rounding decides nothing."""
    table, limits = make_table(seed), make_limits(max_tokens, penalty, early)
    actual = ended_beams(search(table, k, limits))
    expected = brute_force(table, k, limits, early)
    assert [text for text, _ in actual] == [text for text, _ in expected]
    np.testing.assert_allclose([s for _, s in actual], [s for _, s in expected], rtol=2e-5)


def test_brute_force_sees_every_rule():
    """Negative control: tables like those above tell the three stops and penalties apart."""
    cases = [(1.0, early) for early in EARLY_STOPPING] + [(-1.0, False)]
    actual = {
        str([brute_force(make_table(seed), 2, make_limits(penalty=p), early) for seed in range(40)])
        for p, early in cases
    }
    assert len(actual) == 4


def test_of_equals_the_first_beam_and_the_lower_token_come_first():
    """As a sort of all continuations has it; plain and speculative search break ties alike."""
    table = np.full([MOST, VOCAB, VOCAB], -2.0, np.float32)
    beams = search(table, 2, make_limits(max_tokens=3))
    assert beams.parents[:2].tolist() == [[0, 0], [0, 0]]
    assert beams.tokens[:2].tolist() == [[0, 1], [0, 1]]
    assert running_beam(beams, 2, 1) == [0, 1]


@pytest.mark.parametrize("bad", [np.nan, -np.nan, -np.inf])
def test_a_model_without_a_distribution_ends_the_search(bad):
    """NaN of either sign, which sorts may put first or last; or every token forbidden."""
    logits = jnp.zeros([2, 1, VOCAB]).at[:, :, 3].set(bad)
    zeros = jnp.zeros([2], jnp.float32)
    logits = jnp.full_like(logits, bad) if bad == -np.inf else logits
    neutral = SamplingSettings(zeros, zeros.astype(jnp.int32), zeros + 1, zeros)
    none = jnp.zeros([2, 0], jnp.int32)
    candidates = best_candidates(logits, neutral, none, None, 6)
    at = jax.tree.map(lambda leaf: leaf[:, 0], candidates)
    beams = step(Beams.init(2, MOST), at, make_limits())[0]
    assert beams.has_failed
    assert beams.is_done
    fine = best_candidates(jnp.zeros_like(logits), neutral, none, None, 6)
    beams = step(Beams.init(2, MOST), jax.tree.map(lambda leaf: leaf[:, 0], fine), make_limits())[0]
    assert not beams.has_failed


def test_where_all_end_enough_candidates_are_left():
    """Two ends that are the best two tokens of every beam: twice k candidates would all end."""
    k = 3
    table = np.full([MOST, VOCAB, VOCAB], -9.0, np.float32)
    table[..., list(STOPS)] = -0.1, -0.2
    table[..., 7] = -0.3
    limits = make_limits(max_tokens=3, penalty=2.0, early="never")
    beams = search(table, k, limits)
    assert running_beam(beams, 2, 0) == [7, 7]
    assert ended_beams(beams)[0][0] == brute_force(table, k, limits, "never")[0][0] == [7, 7, 2]
