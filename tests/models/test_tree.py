"""Token trees: a block mask and positions, no new model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.test_cache_properties import assert_close, assert_same_committed, full
from tests.tiny import empty_cache

# Block tokens: 0 is the root; the others hang below the block token named here.
PARENTS = [None, 0, 0, 1, 1, 2, 3]
PATHS = [[0, 1, 3, 6], [0, 1, 4], [0, 2, 5]]
DEPTHS = [0, 1, 1, 2, 2, 2, 3]
PREFIX = 5


def ancestors(node):
    return [] if node is None else [*ancestors(PARENTS[node]), node]


def tree_mask():
    mask = np.zeros([1, 7, 7], bool)
    for node in range(7):
        mask[0, node, ancestors(node)] = True
    return jnp.asarray(mask)


@pytest.fixture(scope="module")
def run(tiny_pair):
    @jax.jit
    def call(tokens, cache, **options):
        logits, _, cache = tiny_pair.apply(tiny_pair.target, tokens, cache, **options)
        return logits, cache

    return call


@pytest.fixture(scope="module")
def prefix(run):
    """Returns a cache whose three rows hold 5, 3 and 4 tokens."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (3, PREFIX)), jnp.int32)
    return run(tokens, empty_cache(3, 16))[1].commit(jnp.array([5, 3, 4]))


@pytest.fixture(scope="module")
def block():
    return jnp.asarray(np.random.default_rng(1).integers(0, 61, (3, 7)), jnp.int32)


@pytest.fixture(scope="module")
def tree(run, prefix, block):
    positions = prefix.length[:, None] + jnp.array(DEPTHS)
    return run(block, prefix, positions=positions, block_mask=tree_mask())


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_each_path_of_a_tree_equals_the_chain(run, prefix, block, tree, path):
    """Siblings share a position and must not see their siblings."""
    path = jnp.array(path)
    logits, _ = run(block[:, path], prefix)
    assert_close(tree[0][:, path], logits)


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_committing_a_path_equals_the_chain(run, prefix, block, tree, path):
    """The kept slots move together; what they held was computed at the right positions."""
    chain_tokens = block[:, jnp.array(path)]
    _, chain = run(chain_tokens, prefix)
    padded = jnp.array(path + [0] * (7 - len(path)))
    count = full(len(path))
    committed = tree[1].commit(count, jnp.broadcast_to(padded, (3, 7)))
    assert_same_committed(committed, chain.commit(count))


def test_rows_commit_paths_of_their_own(run, prefix, block, tree):
    """Each row keeps another path, of another length."""
    counts = jnp.array([4, 2, 3])
    paths = jnp.array([[0, 1, 3, 6], [0, 1, 4, 0], [0, 2, 5, 0]])
    _, chain = run(jnp.take_along_axis(block, paths, axis=1), prefix)
    assert_same_committed(tree[1].commit(counts, paths), chain.commit(counts))


def test_a_tree_can_be_fed_level_by_level(run, prefix, block, tree):
    """A drafter grows a tree in several calls: u > t, earlier block slots are uncommitted."""
    mask = tree_mask()
    depths = jnp.array(DEPTHS)
    cache, outputs, start = prefix, [], 0
    for stop in (1, 3, 6, 7):
        positions = prefix.length[:, None] + depths[start:stop]
        logits, cache = run(
            block[:, start:stop], cache, positions=positions, block_mask=mask[:, start:stop, :stop]
        )
        outputs.append(logits)
        start = stop
    assert_close(jnp.concatenate(outputs, axis=1), tree[0])


def test_later_chunks_of_a_chain_default_to_the_right_positions(run, prefix, block):
    """With u > t and no positions given, the chain goes on where the earlier slots end."""
    expected, _ = run(block, prefix)
    _, cache = run(block[:, :4], prefix)
    mask = jnp.tril(jnp.ones([7, 7], bool))[None, 4:]
    logits, _ = run(block[:, 4:], cache, block_mask=mask)
    assert_close(logits, expected[:, 4:])
