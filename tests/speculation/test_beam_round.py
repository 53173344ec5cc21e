"""Rounds of beam search: several steps a call, and caches as a fresh prefill would leave them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.spec import Shape
from jspec.generation.beam_search import ended_beams, running_beam
from jspec.speculation import beam
from jspec.speculation.beam import EARLY_STOPPING, BeamLimits, num_candidates
from tests import tiny
from tests.cases import slow_unless
from tests.speculation.drive import QUICK, Engine, assert_committed_equal

CAPACITY, MOST, K = 96, 20, 3


@pytest.fixture(scope="module")
def engine_of(tiny_pair, make_engine):
    """Returns a function from a name to an engine; "tree" drafts trees of the target's tokens."""

    def build(name):
        if name != "tree":
            return make_engine(name, 0 if name == "plain" else 4)
        drafter = dataclasses.replace(make_engine("self", 8).drafter, shape=Shape(8, 3, 3))
        params = tiny_pair.target, tiny_pair.target
        return Engine(tiny_pair.apply, tiny.empty_cache, params, drafter)

    return build


def begin(engine, prompt):
    """Returns the state before the first step."""
    # What the engine draws is not used; a prompt of one token leaves nothing to read.
    read = engine.start([prompt[:-1]])
    if len(prompt) == 1:
        draft = None if engine.drafter is None else engine.drafter.init(1, CAPACITY)
        read = read.replace(target_cache=tiny.empty_cache(1, CAPACITY), draft=draft)
    limits = BeamLimits(
        jnp.array([5, -1]),
        jnp.int32(MOST),
        jnp.float32(1.0),
        jnp.int32(EARLY_STOPPING.index(False)),
    )
    return beam.BeamState.begin(
        read,
        jnp.array(prompt[-1:], jnp.int32),
        limits,
        num_beams=K,
        num_candidates=num_candidates(K, 1),
        max_steps=CAPACITY,
    )


def compiled(engine):
    """Returns the round of an engine's target and drafter."""
    target = engine.step.keywords["target"]
    call = functools.partial(beam.beam_round, target=target, drafter=engine.drafter)
    return jax.jit(call, compiler_options=QUICK)


def run_checked(engine, a_round, prompt, fresh_cache):
    """Runs to the end, checking the caches after each round; returns the beams and the steps."""
    state, steps = begin(engine, prompt), []
    while not bool(state.is_done):
        state, info = a_round(engine.params, state)
        steps.append(int(info.num_steps[0]))
        beams = jax.device_get(state.beams)
        texts = [prompt + running_beam(beams, int(beams.num_steps), row) for row in range(K)]
        if beams.num_steps == MOST:  # no beam is running any more
            break
        assert [text[-1] for text in texts] == state.last_token.tolist()
        lengths = [len(text) - 1 for text in texts]
        assert state.target_cache.length.tolist() == lengths
        assert_committed_equal(state.target_cache, fresh_cache(engine.params.target, texts))
        if hasattr(state.draft, "history"):
            for row, text in enumerate(texts):
                assert state.draft.history.tokens[row, : lengths[row]].tolist() == text[:-1]
            assert (np.asarray(state.draft.cache.length) <= lengths).all()
            assert_committed_equal(state.draft.cache, fresh_cache(engine.params.draft, texts))
    return ended_beams(beams), steps


@pytest.fixture(scope="module")
def plain(engine_of, prompts, fresh_cache):
    """Returns the ended beams of plain search, for each prompt."""
    engine = engine_of("plain")
    a_round = compiled(engine)
    actual = [run_checked(engine, a_round, prompt, fresh_cache) for prompt in prompts[:2]]
    assert all(set(steps) == {1} for _, steps in actual)
    return [beams for beams, _ in actual]


@pytest.mark.parametrize(
    "name", ["self", slow_unless(False, "prompt_lookup"), slow_unless(False, "tree")]
)
def test_rounds_leave_the_caches_of_a_fresh_prefill(engine_of, prompts, fresh_cache, plain, name):
    """Rows move with their beams, in the draft's cache too; and the beams are plain search's."""
    engine, several = engine_of(name), 0
    a_round = compiled(engine)
    for prompt, expected in zip(prompts[:2], plain, strict=True):
        actual, steps = run_checked(engine, a_round, prompt, fresh_cache)
        assert [text for text, _ in actual] == [text for text, _ in expected]
        np.testing.assert_allclose([s for _, s in actual], [s for _, s in expected], rtol=1e-5)
        several += sum(one > 1 for one in steps)
    # A text of three beams hardly repeats itself in all of them.
    assert several > 0 or name == "prompt_lookup", "no round took several steps"


def test_rows_that_stay_where_they_were_are_seen(engine_of, prompts, fresh_cache, monkeypatch):
    """Negative control: the checks above notice a cache that keeps another beam's row."""
    monkeypatch.setattr(beam, "_reorder", lambda rows, row: rows)
    engine = engine_of("plain")
    with pytest.raises(AssertionError):
        run_checked(engine, compiled(engine), prompts[1], fresh_cache)
