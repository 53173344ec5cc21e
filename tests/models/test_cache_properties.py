"""The cache through the model: every way to feed a text gives the logits of one full pass.

Token trees are a block mask and positions, no new model: each path equals the chain.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models import KVCache, causal_mask
from jspec.models import cache as cache_module
from tests.tiny import empty_cache

LENGTH = CAPACITY = 14  # full at the end of the text
BEFORE = BLOCK = 7  # few widths, few programs
# Block tokens of a tree: 0 is the root; the others hang below the block token named here.
PARENTS = [None, 0, 0, 1, 1, 2, 3]
DEPTHS = np.array([0, 1, 1, 2, 2, 2, 3])


def ancestors(node):
    return [] if node is None else [*ancestors(PARENTS[node]), node]


TREE = np.array([[node in ancestors(query) for node in range(7)] for query in range(7)])[None]


@pytest.fixture(scope="module")
def run(tiny_pair):
    @jax.jit
    def call(tokens, cache, **options):
        logits, _, cache = tiny_pair.apply(tiny_pair.target, tokens, cache, **options)
        return logits, cache

    return call


@pytest.fixture(scope="module")
def tokens():
    return jnp.asarray(np.random.default_rng(0).integers(0, 61, (3, LENGTH)), jnp.int32)


@pytest.fixture(scope="module")
def whole(run, tokens):
    """Returns the logits and the cache of one full pass."""
    return run(tokens, empty_cache(3, CAPACITY))


@pytest.fixture(scope="module")
def expected(whole):
    return whole[0]


@pytest.fixture(scope="module")
def read(run, tokens):
    """Returns a cache with the first tokens, uncommitted."""
    return run(tokens[:, :BEFORE], empty_cache(3, CAPACITY))[1]


def full(count):
    return jnp.full([3], count, jnp.int32)


def assert_close(actual, desired):
    """Few rows and many may be summed in different orders; a wrong slot is off by about 1."""
    np.testing.assert_allclose(actual, desired, atol=5e-5, rtol=0)


def assert_same_committed(cache, expected):
    np.testing.assert_array_equal(cache.length, expected.length)
    leaves = cache.keys + cache.values, expected.keys + expected.values
    for ours, theirs in zip(*leaves, strict=True):
        for row, length in enumerate(np.asarray(cache.length)):
            assert_close(ours[row, :, :length], theirs[row, :, :length])


def test_prefill_and_decode_equal_one_full_pass(run, tokens, expected):
    """Token by token after a prefill: a wrong slot, position or mask shows at once."""
    logits, cache = run(tokens[:, :BEFORE], empty_cache(3, CAPACITY))
    assert_close(logits, expected[:, :BEFORE])
    cache = cache.commit(full(BEFORE))
    for i in range(BEFORE, LENGTH):
        logits, cache = run(tokens[:, i : i + 1], cache)
        assert_close(logits[:, 0], expected[:, i])
        cache = cache.commit(full(1))


def test_verify_equals_teacher_forcing(run, tokens, whole):
    """Blocks on rows of different lengths, one up to the capacity, as a round verifies them."""
    expected, cache = whole
    lengths = jnp.array([1, 5, CAPACITY - BLOCK])
    cache = cache.commit(lengths)
    slots = lengths[:, None] + jnp.arange(BLOCK)
    logits, cache = run(jnp.take_along_axis(tokens, slots, axis=1), cache)
    assert_close(logits, jnp.take_along_axis(expected, slots[..., None], axis=1))
    assert cache.commit(full(BLOCK)).length.tolist() == [8, 12, CAPACITY]


def test_rolled_back_tokens_never_happened(run, tokens, whole, read):
    """Rejected drafts stay in the arrays; nothing may see them."""
    expected, fresh = whole
    _, dirty = run((tokens[:, BEFORE:] + 1) % 61, read.commit(full(BEFORE)))
    dirty = dirty.commit(full(4)).rollback(full(BEFORE))
    logits, redone = run(tokens[:, BEFORE:], dirty)
    assert_close(logits, expected[:, BEFORE:])
    assert_same_committed(redone.commit(full(BLOCK)), fresh.commit(full(LENGTH)))


def test_rollback_touches_no_array(read):
    rolled = read.commit(full(9)).rollback(full(2))
    assert all(a is b for a, b in zip(rolled.keys, read.keys, strict=True))


@pytest.mark.parametrize("width", [BLOCK, 30], ids=["small", "past all"])
def test_writes_past_the_capacity_leave_good_slots_alone(run, tokens, whole, width):
    """`dynamic_update_slice` shifts a block that does not fit onto committed slots."""
    lengths = [13, 3, 12]
    cache = whole[1].commit(jnp.array(lengths))
    _, after = run(jnp.tile(tokens, (1, 3))[:, :width], cache)
    for layer, before in zip(after.keys + after.values, cache.keys + cache.values, strict=True):
        for row, length in enumerate(lengths):
            np.testing.assert_array_equal(layer[row, :, :length], before[row, :, :length])


def test_no_more_is_committed_than_there_are_slots():
    """What lies behind the capacity was never written."""
    cache = empty_cache(2, 20).commit(jnp.array([18, 3]))
    assert cache.commit(jnp.array([5, 5])).length.tolist() == [20, 8]


def test_zero_commit_is_silent(run, tokens, read):
    """Done rows commit 0 tokens."""
    committed = read.commit(full(BEFORE))
    _, after = run(tokens[:, BEFORE:], committed)
    assert_same_committed(after.commit(full(0)), committed)


def test_a_zero_key_is_attended():
    """The mask is "slot committed", never "is it non-zero"."""
    cache = empty_cache(1, 8).commit(jnp.array([3]))
    values = cache.values[0].at[0, :, :3].set(jnp.arange(1.0, 4.0)[None, :, None])
    cache = cache.replace(values=(values, cache.values[1]))
    mask, queries = jnp.zeros([1, 1, 1], bool), jnp.ones([1, 1, 4, 6])
    mixed = jax.jit(lambda cache: cache.layer(0).attend(queries, cache.visible(mask)))(cache)
    assert_close(mixed, jnp.full([1, 1, 4, 6], 2.0))


def test_uncommitted_slots_are_invisible(run, tokens, expected, read):
    """Whatever lies behind `length` and outside the block must not be read."""
    keys, values = (
        tuple(layer.at[:, :, BEFORE + 1 :].set(1e4) for layer in layers)
        for layers in (read.keys, read.values)
    )
    poisoned = read.commit(full(BEFORE)).replace(keys=keys, values=values)
    logits, _ = run(tokens[:, BEFORE : BEFORE + 1], poisoned)
    assert_close(logits, expected[:, BEFORE : BEFORE + 1])


def test_embeddings_stand_in_for_tokens_and_logits_come_at_one_index(
    run, tiny_pair, tokens, expected
):
    """Trained heads feed vectors that are no token's. Prefill wants each row's last real token."""
    index, inputs = jnp.array([0, 13, 7]), tiny_pair.target["embedding"][tokens]
    logits, _ = run(inputs, empty_cache(3, CAPACITY), logits_at=index)
    assert logits.shape == (3, 1, 61)
    assert_close(logits[:, 0], expected[jnp.arange(3), index])


def test_positions_and_mask_can_be_given(run, tokens, expected):
    """By default those of a chain: one mask [1 t t] serves all rows; other positions count."""
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (3, LENGTH))
    mask, cache = causal_mask(LENGTH), empty_cache(3, CAPACITY)
    logits, _ = run(tokens, cache, positions=positions, block_mask=mask)
    assert_close(logits, expected)
    logits, _ = run(tokens, cache, positions=positions * 2, block_mask=mask)
    assert jnp.abs(logits - expected).max() > 0.1


@pytest.fixture(scope="module")
def prefix(read):
    """Returns a cache whose three rows hold 5, 3 and 4 tokens."""
    return read.commit(jnp.array([5, 3, 4]))


@pytest.fixture(scope="module")
def block():
    return jnp.asarray(np.random.default_rng(1).integers(0, 61, (3, 7)), jnp.int32)


@pytest.fixture(scope="module")
def tree(run, prefix, block):
    positions = prefix.length[:, None] + DEPTHS
    return run(block, prefix, positions=positions, block_mask=jnp.asarray(TREE))


@pytest.mark.parametrize("path", [[0, 1, 3, 6], [0, 1, 4, 4], [0, 2, 5, 5]], ids=str)
def test_each_path_of_a_tree_equals_the_chain(run, prefix, block, tree, path):
    """Siblings share a position and must not see their siblings. The last token is padding."""
    length = len(set(path))
    logits, _ = run(block[:, np.array(path)], prefix)
    assert_close(tree[0][:, np.array(path[:length])], logits[:, :length])


def test_rows_commit_paths_of_their_own(run, prefix, block, tree):
    """The kept slots move together, in each row others; all were computed at their positions."""
    counts = jnp.array([4, 2, 3])
    paths = jnp.array([[0, 1, 3, 6], [0, 1, 4, 0], [0, 2, 5, 0]])
    _, chain = run(jnp.take_along_axis(block, paths, axis=1), prefix)
    assert_same_committed(tree[1].commit(counts, paths), chain.commit(counts))


def test_a_tree_can_be_fed_level_by_level(run, prefix, block, tree):
    """A drafter grows a tree in several calls: u > t, earlier block slots are uncommitted."""
    cache, outputs, start = prefix, [], 0
    for stop in (3, 7):
        options = {"positions": prefix.length[:, None] + DEPTHS[start:stop],
                   "block_mask": jnp.asarray(TREE[:, start:stop, :stop])}  # fmt: skip
        logits, cache = run(block[:, start:stop], cache, **options)
        outputs.append(logits)
        start = stop
    assert_close(jnp.concatenate(outputs, axis=1), tree[0])


def test_later_chunks_of_a_chain_default_to_the_right_positions(run, prefix, block):
    """With u > t and no positions given, the chain goes on where the earlier slots end."""
    expected, _ = run(block, prefix)
    _, cache = run(block[:, :4], prefix)
    logits, _ = run(block[:, 4:], cache, block_mask=causal_mask(7)[:, 4:])
    assert_close(logits, expected[:, 4:])


def chained(layer, new, start):
    """The natural way to write rows, which XLA fuses into one pass over the layer for each row."""
    new = new.astype(layer.dtype).transpose(0, 2, 1, 3)
    for row in range(new.shape[0]):
        layer = jax.lax.dynamic_update_slice(layer, new[row : row + 1], (row, 0, start[row], 0))
    return layer


def num_whole_layers(batch_size):
    """Returns how many operations of a loop that writes a token a row give a whole layer.

    XLA for CPUs of jax 0.10 also makes float32 of the bfloat16 layer for each of them.
    """
    cache = KVCache.init(1, (batch_size, 2, 112, 8), jnp.bfloat16)

    def write(_, cache):
        new = jnp.broadcast_to(cache.length[:, None, None, None], (batch_size, 1, 2, 8))
        new = new.astype(jnp.float32)
        return cache.write(new, new).commit(jnp.ones_like(cache.length))

    run = jax.jit(lambda cache: jax.lax.fori_loop(0, 5, write, cache), donate_argnums=0)
    program = run.lower(cache).compile().as_text()
    layer = rf"\[{batch_size},2,{cache.keys[0].shape[2]},8\]"
    given = re.findall(rf"= \w+{layer}\S* ([\w-]+)\(", program)
    return sum(op not in ("parameter", "get-tuple-element") for op in given)


@pytest.mark.usefixtures("optimised")
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="how XLA writes rows on CPU")
def test_writing_many_rows_is_not_a_pass_over_the_layer_for_each(monkeypatch):
    """Guards against time that grows with the square of the batch: 8 s a step at batch size 16."""
    assert num_whole_layers(20) <= num_whole_layers(1)
    monkeypatch.setattr(cache_module, "write_rows", chained)
    assert num_whole_layers(20) >= 20, "the negative control"
