"""Invariant 6: other prompts, seeds, temperatures and limits compile nothing; rows can be
replaced.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.prompt_lookup import PromptLookupDrafter
from jspec.speculation.plain import insert
from jspec.speculation.round import speculative_step
from tests import tiny
from tests.cases import slow_unless
from tests.speculation.drive import Engine
from tests.tiny_heads import head_cases

ENGINES = ["plain", "model", slow_unless(False, "prompt_lookup"), slow_unless(False, "suffix"),
           slow_unless(False, "recycle"), *head_cases()]  # fmt: skip
insert_row = jax.jit(insert)


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, make_engine):
    return make_engine(request.param, 0 if request.param == "plain" else 4)


def test_a_second_request_compiles_nothing(engine, prompts):
    """All that a request can ask for is traced."""
    engine.generate(prompts, max_length=20, rounds_per_call=5)
    sizes = engine.prefill._cache_size(), engine.rounds._cache_size()
    engine.generate(
        [[3] * 4, [1], [2, 2], list(range(16))], seeds=[9, 8, 7, 2**32 - 1],
        temperature=[0.0, 0.3, 1.0, 5.0], draft_temperature=0.5, max_length=[20, 31, 9, 40],
        stop_ids=(3, 60), rounds_per_call=3,
    )  # fmt: skip
    assert (engine.prefill._cache_size(), engine.rounds._cache_size()) == sizes


def test_a_round_is_traced_once(tiny_pair):
    """And so is each width of its verify call.

    Guards against another trace where only shapes are asked for: traced for them as well, the round
    was traced twice and the widest call four times.
    """
    calls = collections.Counter()

    def apply(params, tokens, cache, **options):
        calls["target", tokens.shape[1]] += 1
        return tiny_pair.apply(params, tokens, cache, **options)

    class Counting(PromptLookupDrafter):
        def propose(self, params, state, inputs):
            calls["propose"] += 1
            return super().propose(params, state, inputs)

    params, step = (tiny_pair.target, None), functools.partial(speculative_step, widths=(0,))
    engine = Engine(apply, tiny.empty_cache, params, Counting(4), step=step)
    state = engine.start([[7]])
    calls.clear()
    engine.rounds.trace(engine.params, state, jnp.int32(1))
    assert calls == {"propose": 1, ("target", 1): 1, ("target", 5): 1}


def test_a_row_can_be_replaced(engine, prompts):
    """Continuous batching: the others go on untouched and the newcomer is as if alone."""
    options = {"temperature": 1.0, "max_length": [45, 60, 50, 40]}
    undisturbed = engine.generate(prompts, seeds=[1, 2, 3, 4], **options)
    newcomer = {"seeds": [99], "temperature": 0.7, "max_length": 33}
    alone = engine.generate([[8, 9, 10]], **newcomer)

    state = engine.start(prompts, seeds=[1, 2, 3, 4], **options)
    tokens = [[token] for token in state.last_token.tolist()]
    state, infos = engine.advance(state, 3)
    sizes = engine.rounds._cache_size(), insert_row._cache_size()
    extend(tokens, infos)
    prefilled = engine.start([[8, 9, 10]], **newcomer)
    state = insert_row(state, jnp.int32(2), prefilled)
    tokens[2] = prefilled.last_token.tolist()
    state, infos = engine.advance(state, 96)
    extend(tokens, infos)

    assert bool(state.is_done.all())
    assert tokens[2] == alone.tokens[0]
    for row in (0, 1, 3):
        assert tokens[row] == undisturbed.tokens[row]
    assert engine.rounds._cache_size() == sizes[0]
    assert insert_row._cache_size() - sizes[1] <= 1
    insert_row(state, jnp.int32(0), prefilled)
    assert insert_row._cache_size() - sizes[1] <= 1, "the row is traced"


def extend(tokens, infos):
    for counts, blocks in zip(infos.num_tokens, infos.tokens, strict=True):
        for row, (count, block) in enumerate(zip(counts, blocks, strict=True)):
            tokens[row].extend(np.asarray(block[:count]).tolist())


def test_every_leaf_of_the_state_is_per_row(engine, prompts):
    """What is not cannot be replaced row by row."""
    state = engine.start(prompts)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(state)} == {len(prompts)}


def test_insertion_replaces_every_leaf_of_its_row_alone(engine, prompts):
    """Guards against a row that keeps its predecessor's stop tokens: few texts would show it."""
    state = jax.tree.map(jnp.zeros_like, engine.start(prompts))
    prefilled = jax.tree.map(jnp.ones_like, engine.start(prompts[:1]))
    for leaf in jax.tree.leaves(insert_row(state, jnp.int32(2), prefilled)):
        rows = np.asarray(leaf).reshape(len(prompts), -1)
        assert rows[2].all()
        assert not rows[[0, 1, 3]].any()
