"""Trees of what followed, against plain Python; and trees that follow a table."""

import itertools
import math

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jspec.drafters.prompt_lookup import PromptLookupDrafter
from jspec.drafters.recycle import RecycleDrafter
from jspec.drafters.spec import Shape
from jspec.drafters.suffix import SuffixDrafter
from jspec.drafters.trees import best_static_tree
from tests.drafters.rows import paths_of
from tests.drafters.test_prompt_lookup import propose_after
from tests.drafters.test_suffix import WIDTH, batches, own_places
from tests.speculation import drive

SIZE = 6
SHAPES = Shape(SIZE, WIDTH, 16), Shape(40, 3, 2)
LOOKUPS = [
    PromptLookupDrafter(SIZE, shape=SHAPES[0]),
    PromptLookupDrafter(40, 2, growth=1.0, shape=SHAPES[1]),
]
SUFFIXES = [SuffixDrafter(SIZE, shape=SHAPES[0]), SuffixDrafter(40, min_match=2, shape=SHAPES[1])]


def propose(drafter, texts, limit=99):
    """Returns the tree of each text, whose last token is not committed yet, as {path: score}."""
    return trees_of(propose_after(drafter, texts, (), limit=limit))


def trees_of(proposal):
    """Returns {path: score} of each row, in the order of the block."""
    trees = []
    for row in range(len(proposal.tokens)):
        paths = paths_of(proposal, row)
        assert len(set(paths)) == len(paths), "equal tokens under one parent are one node"
        trees.append(dict(zip(paths, proposal.scores[row].tolist(), strict=False)))
    return trees


def in_turn(drafter, text):
    """Returns {path: score}: each place is believed after those before it that part from it."""
    places = sorted(own_places(text), key=lambda place: -min(place[0], drafter.max_match))[:8]
    places = [(min(n, drafter.max_match), t[: drafter.shape.depth]) for n, t in places]
    places = [place for place in places if place[0] >= drafter.min_match]
    rates, scores = {}, {}
    for length, tokens in places:
        kind = drafter.kinds[length - 1]
        if drafter.growth:
            tokens = tokens[: int(drafter.growth * length)]
        for i in range(len(tokens)):
            path = tuple(tokens[: i + 1])
            if path in rates:
                continue
            rates[path] = kind.later if i else kind.first
            refused = [rates[one] for one in rates if one[:-1] == path[:-1] and one != path]
            log_prob = math.log(rates[path]) + sum(math.log1p(-rate) for rate in refused)
            scores[path] = scores.get(path[:-1], 0.0) + log_prob
    return scores


def by_votes(drafter, text):
    """Returns {path: score}: shares of the votes, and how often such a match is followed."""
    places = own_places(text)
    longest = max((length for length, _ in places), default=-1)
    if longest < max(drafter.min_match, 1):
        return {}
    votes = [(4.0 ** (n - longest) if longest - n <= 6 else 0.0, t) for n, t in places]
    total, kind, scores = sum(vote for vote, _ in votes), drafter.kinds[longest - 1], {}
    for _, tokens in votes:
        for i in range(min(drafter.shape.depth, int(drafter.growth * longest))):
            path = tuple(tokens[: i + 1])
            share = sum(vote for vote, other in votes if tuple(other[: i + 1]) == path) / total
            if share < drafter.min_share:
                break
            scores[path] = math.log(share * kind.first * kind.later**i)
    return scores


def check(actual, scores, shape):
    """Asserts that a tree holds the best nodes, not more than `branches` of one parent."""
    for path, score in actual.items():
        assert score == pytest.approx(scores[path], abs=1e-4)
    values = sorted(scores.values())
    if any(b - a < 1e-5 for a, b in itertools.pairwise(values)):
        return  # which of equals is the last one that is taken is a matter of rounding
    best, taken = [], {(): 0}
    for path in sorted(scores, key=lambda path: -scores[path]):
        if taken.get(path[:-1], shape.branches) < shape.branches:
            taken[path[:-1]] += 1
            taken[path] = 0
            best.append(path)
    assert actual.keys() == set(best[: shape.num_draft_tokens])


@hypothesis.settings(deadline=None, max_examples=60, derandomize=True)
@hypothesis.given(rows=batches, drafter=st.sampled_from(LOOKUPS))
def test_a_lookup_believes_its_places_in_turn(rows, drafter):
    """Three letters, so that many places agree and go on with what others go on with."""
    for text, actual in zip(rows, propose(drafter, rows), strict=True):
        check(actual, in_turn(drafter, text), drafter.shape)


@hypothesis.settings(deadline=None, max_examples=60, derandomize=True)
@hypothesis.given(rows=batches, drafter=st.sampled_from(SUFFIXES))
def test_suffixes_score_by_their_shares(rows, drafter):
    """Every node by the votes for its whole path."""
    for text, actual in zip(rows, propose(drafter, rows), strict=True):
        check(actual, by_votes(drafter, text), drafter.shape)


@pytest.mark.parametrize("drafter", [LOOKUPS[0], SUFFIXES[0]])
def test_limits_cut_the_same_tree(drafter):
    """A smaller limit takes the first nodes of the block."""
    rows = [[1, 2, 0, 1, 2, 0, 1], [0, 1, 0, 2, 0], [2, 1, 2, 1, 2], [0]]
    full = propose(drafter, rows)
    assert max(map(len, full)) == SIZE
    for limit in range(SIZE):
        cut = propose(drafter, rows, limit)
        assert [list(tree) for tree in cut] == [list(tree)[:limit] for tree in full]


def test_a_static_tree_is_the_best_one():
    """Against all paths, by the product of their rates; each node after its parent."""
    rates = [[0.5, 0.2, 0.1], [0.6, 0.3], [0.9, 0.05, 0.02]]
    tree = best_static_tree(rates, 9)
    paths = []
    for parent, rank in zip(tree.parents, tree.ranks, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))
    every = [()]
    for depth in range(3):
        every += [
            (*path, r) for path in every if len(path) == depth for r in range(len(rates[depth]))
        ]
    product = {path: math.prod(rates[d][r] for d, r in enumerate(path)) for path in every[1:]}
    best = sorted(product.values(), reverse=True)[:9]
    assert [product[path] for path in paths] == pytest.approx(best)
    assert np.exp(tree.scores) == pytest.approx(best)
    assert tree.depths == tuple(map(len, paths))
    assert tree.widths == tuple(
        1 + max(path[-1] for path in paths if len(path) == depth) for depth in range(1, 4)
    )
    assert best_static_tree([[0.5, 0.0]], 9).ranks == (0,)


def test_recycled_tokens_branch_by_rank():
    """The table's first entries are followed first; where it has none others take the room."""
    shape = Shape(5, 3, 2)
    drafter = RecycleDrafter(5, 6, 2, shape=shape)
    table = drafter.init(2, 9)
    table = table.at[0, 1].set(jnp.array([2, 3])).at[0, 2].set(jnp.array([4, 1]))
    table = table.at[0, 3].set(jnp.array([5, -1])).at[0, 4].set(jnp.array([0, 5]))
    actual, empty = trees_of(drive.propose(None, drafter, None, table, [1, 1])[0])
    assert list(actual)[:3] == [(2,), (2, 4), (2, 4, 0)]
    assert len(actual) == 5
    assert all(token >= 0 for path in actual for token in path)
    assert empty == {}
