"""Rounds in which the target's own layers draft; see also test_random_rounds.py."""

import functools

import jax
import numpy as np
import pytest

from tests import layered
from tests.cases import slow_unless
from tests.layered import ALL, FIRST, SUBSET, build
from tests.speculation.drive import Engine

WIDTH, CAPACITY = 4, 96


@functools.cache
def make_engine(layers=None, rule="coupled", is_member=False):
    """Returns the compiled rounds with those layers as drafter, or without one."""
    drafter = None if layers is None else build(layers, WIDTH, is_member=is_member)
    params = layered.params(), None
    return Engine(layered.apply, layered.empty_cache, params, drafter, rule, capacity=CAPACITY)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "is_member", [False, slow_unless(False, True)], ids=["shared cache", "own cache"]
)
def test_all_layers_accept_everything(prompts, is_member, temperature):
    """Invariant 4. Sampled acceptance may fail where rounding differs, with odds of about 1e-6 a
    draft.

    With the shared cache nothing is computed twice, and nothing can differ at all.
    """
    result = make_engine(ALL, "rejection", is_member).generate(
        prompts, temperature=temperature, max_length=[80, 85, 90, 96]
    )
    np.testing.assert_array_equal(result.num_accepted, result.infos.num_proposed)
    assert len(result.num_accepted) >= 15


def num_bytes(state):
    """Returns the memory of a state."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def test_the_first_layers_need_no_memory():
    """No second cache, no copy of the text: the drafter's state is nothing."""
    assert num_bytes(build(FIRST, WIDTH).init(4, CAPACITY)) == 0
    cache = layered.empty_cache(4, CAPACITY)
    assert num_bytes(build(SUBSET, WIDTH).init(4, CAPACITY)) > num_bytes(cache) // 2


def test_rows_end_at_the_end_of_the_cache(prompts):
    """Lockstep goes on after a row's end, where the cache has no room: no other slot is hurt."""
    lengths = [CAPACITY, CAPACITY - 1, 60, CAPACITY]
    options = {"seeds": [11, 22, 33, 44], "temperature": 1.0, "max_length": lengths}
    result = make_engine(FIRST).generate(prompts, **options)
    assert result.tokens == make_engine().generate(prompts, **options).tokens
    assert [len(p) + len(t) for p, t in zip(prompts, result.tokens, strict=True)] == lengths
    assert 0 < result.num_accepted.sum() < result.infos.num_proposed.sum()
