"""Branches that are merged, against a plain trie."""

import functools
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from jspec.drafters.branches import Branches, branches_of, join_branches, merge_branches
from jspec.speculation.acceptance.tree import prune
from jspec.speculation.types import Proposal
from tests.drafters.rows import paths_of
from tests.speculation.drive import QUICK

BATCH, NUM, WIDTH, SIZE = 3, 5, 4, 7
NOTHING = -math.inf
_prune = jax.jit(prune)


@functools.cache
def merger(size, num_children):
    """Returns the compiled merge."""

    @functools.partial(jax.jit, compiler_options=QUICK)
    def merge(branches, wanted):
        return merge_branches(branches, size, wanted, num_children)

    return merge


def merge(rows, size=SIZE, num_children=None, wanted=SIZE):
    """Returns the proposal of rows of branches, each [(token, score), ...]."""
    tokens = np.zeros([len(rows), NUM, WIDTH], np.int32)
    scores = np.full([len(rows), NUM, WIDTH], NOTHING, np.float32)
    for row, branches in enumerate(rows):
        for place, branch in enumerate(branches):
            for depth, (token, score) in enumerate(branch):
                tokens[row, place, depth], scores[row, place, depth] = token, score
    wanted = jnp.full(len(rows), wanted, jnp.int32)
    branches = Branches(jnp.asarray(tokens), jnp.asarray(scores))
    return jax.tree.map(np.asarray, merger(size, num_children)(branches, wanted))


def trie_of(branches):
    """Returns {path: score} of one row, in the order in which the paths appear."""
    scores = {}
    for branch in branches:
        path, lowest = (), 0.0
        for token, score in branch:
            path, lowest = (*path, token), min(lowest, score)
            scores[path] = max(scores.get(path, NOTHING), lowest)
    return scores


def best_of(branches, size, num_children=None):
    """Returns the best paths of one row, the best first; of equals the one that appears first."""
    scores = trie_of(branches)
    best = sorted(scores, key=lambda path: -scores[path])
    if num_children is not None:
        siblings = {}
        for path in best:
            siblings.setdefault(path[:-1], []).append(path)
        few = {path for all_ in siblings.values() for path in all_[:num_children]}
        best = [p for p in best if all(p[: i + 1] in few for i in range(len(p)))]
    return best[:size]


def branch_first(best):
    """Returns the paths with the best child of the best child and so on in front."""
    first, path = [], ()
    while children := [one for one in best if one[:-1] == path and len(one) == len(path) + 1]:
        path = children[0]
        first.append(path)
    return first + [one for one in best if one not in first]


node = st.tuples(st.integers(0, 2), st.sampled_from([-0.25, -0.5, -1.0, -1.5, -2.0]))
row = st.lists(st.lists(node, max_size=WIDTH), max_size=NUM)


@hypothesis.settings(deadline=None, max_examples=80, derandomize=True)
@hypothesis.given(
    rows=st.lists(row, min_size=BATCH, max_size=BATCH),
    limits=st.sampled_from([(3, 2), (SIZE, None), (40, 1)]),
)
def test_the_tree_is_that_of_a_plain_trie(rows, limits):
    """Three letters, so that most branches begin alike, and scores with ties."""
    size, num_children = limits
    proposal = merge(rows, size, num_children, wanted=size)
    assert proposal.tokens.shape == (BATCH, size)
    assert proposal.max_depth == min(WIDTH, size)
    parents = np.asarray(proposal.parents)
    assert (parents < np.arange(size)).all()
    assert (parents >= -1).all()
    for index, branches in enumerate(rows):
        actual = paths_of(proposal, index)
        expected = branch_first(best_of(branches, size, num_children))
        assert actual == expected
        scores = [trie_of(branches)[path] for path in actual]
        np.testing.assert_array_equal(proposal.scores[index, : len(actual)], np.float32(scores))


def test_fewer_drafts_are_a_beginning_of_the_same_tree():
    """Guards against a limit that leaves a draft without its parent."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 3, (BATCH, NUM, WIDTH)).tolist()
    scores = np.cumsum(-rng.random((BATCH, NUM, WIDTH)), axis=2).tolist()
    rows = [
        [list(zip(*branch, strict=True)) for branch in zip(*row, strict=True)]
        for row in zip(tokens, scores, strict=True)
    ]
    everything = merge(rows)
    for wanted in range(SIZE):
        fewer = merge(rows, wanted=wanted)
        for index in range(BATCH):
            assert paths_of(fewer, index) == paths_of(everything, index)[:wanted]


def test_a_proposal_comes_back_from_its_branches():
    """A tree with its scores, and a chain with the estimates of its kind."""
    rows = [[[(1, -0.1), (2, -0.2)], [(1, -0.1), (0, -0.7)], [(2, -0.9)]], [[(0, -0.5)]], []]
    tree = merge(rows)
    half = jnp.full(BATCH, 0.5)
    compiled = jax.jit(branches_of)
    again = merger(SIZE, None)(compiled(tree, half, half), tree.num_tokens)
    for leaf in ("tokens", "num_tokens", "parents", "scores"):
        is_real = np.arange(SIZE) < np.asarray(tree.num_tokens)[:, None]
        if leaf == "num_tokens":
            is_real = np.array(True)
        np.testing.assert_array_equal(
            np.where(is_real, getattr(again, leaf), 0), np.where(is_real, getattr(tree, leaf), 0)
        )
    chain = Proposal(jnp.asarray([[4, 5, 6]] * BATCH), jnp.asarray([3, 1, 0], jnp.int32))
    branches = jax.tree.map(np.asarray, compiled(chain, half, jnp.full(BATCH, 0.25)))
    assert branches.tokens.tolist() == [[[4, 5, 6]]] * BATCH
    expected = np.log(np.float32([0.5, 0.125, 0.03125]))
    for index, number in enumerate((3, 1, 0)):
        np.testing.assert_allclose(branches.scores[index, 0, :number], expected[:number], rtol=1e-6)
        assert (branches.scores[index, 0, number:] == NOTHING).all()
    merged = jax.jit(join_branches)([compiled(tree, half, half), branches])
    merged = merger(SIZE, None)(merged, jnp.full(BATCH, SIZE))
    assert set(paths_of(merged, 0)) == {
        (1,), (1, 2), (1, 0), (2,), (4,), (4, 5), (4, 5, 6)
    }  # fmt: skip


@hypothesis.settings(deadline=None, max_examples=30, derandomize=True)
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
def test_a_pruned_tree_has_the_best_nodes(seed):
    """Each row another number of them, parents first, its best branch first, the rest in order.

    Guards against nodes that the tree no longer had: past its number, whatever their scores are.
    """
    rng = np.random.default_rng(seed)
    rows = [
        [[(int(rng.integers(3)), float(-depth - rng.uniform())) for depth in range(1 + WIDTH // 2)]
         for _ in range(NUM)]
        for _ in range(BATCH)
    ]  # fmt: skip
    whole = merge(rows, wanted=int(rng.integers(0, SIZE + 1)))
    numbers = rng.integers(0, SIZE + 1, BATCH)
    pruned = _prune(whole, jnp.asarray(numbers, jnp.int32))
    for row, number in enumerate(numbers.tolist()):
        scores = dict(zip(paths_of(whole, row), whole.scores[row].tolist(), strict=False))
        best = sorted(scores, key=lambda path: -scores[path])[:number]
        actual = paths_of(pruned, row)
        assert set(actual) == set(best)
        assert all(
            path[:-1] in actual[:place] or len(path) == 1 for place, path in enumerate(actual)
        )
