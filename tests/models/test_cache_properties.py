"""The cache through the model: every way to feed a text gives the logits of one full pass."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models import KVCache, causal_mask
from jspec.models import cache as cache_module
from tests.tiny import empty_cache

pytestmark = pytest.mark.usefixtures("optimised")

LENGTH = CAPACITY = 14  # full at the end of the text
BEFORE, BLOCK = 6, 6  # few widths, few programs


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
def expected(run, tokens):
    return run(tokens, empty_cache(3, CAPACITY))[0]


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


def test_verify_equals_teacher_forcing(run, tokens, expected):
    """Blocks on rows of different lengths, one up to the capacity, as a round verifies them."""
    _, cache = run(tokens, empty_cache(3, CAPACITY))
    lengths = jnp.array([1, 5, CAPACITY - BLOCK])
    cache = cache.commit(lengths)
    slots = lengths[:, None] + jnp.arange(BLOCK)
    logits, cache = run(jnp.take_along_axis(tokens, slots, axis=1), cache)
    assert_close(logits, jnp.take_along_axis(expected, slots[..., None], axis=1))
    assert cache.commit(full(BLOCK)).length.tolist() == [7, 11, CAPACITY]


def test_rolled_back_tokens_never_happened(run, tokens, expected):
    """Rejected drafts stay in the arrays; nothing may see them."""
    end = BEFORE + BLOCK
    _, cache = run(tokens[:, :BEFORE], empty_cache(3, CAPACITY))
    cache = cache.commit(full(BEFORE))
    _, dirty = run((tokens[:, BEFORE:end] + 1) % 61, cache)
    dirty = dirty.commit(full(4)).rollback(full(BEFORE))
    logits, redone = run(tokens[:, BEFORE:end], dirty)
    assert_close(logits, expected[:, BEFORE:end])
    _, fresh = run(tokens, empty_cache(3, CAPACITY))
    assert_same_committed(redone.commit(full(BLOCK)), fresh.commit(full(end)))


def test_rollback_touches_no_array(run, tokens):
    _, cache = run(tokens, empty_cache(3, CAPACITY))
    rolled = cache.commit(full(9)).rollback(full(2))
    assert all(a is b for a, b in zip(rolled.keys, cache.keys, strict=True))


@pytest.mark.parametrize("width", [BLOCK, 17, 30], ids=["small", "past the tail", "past all"])
def test_writes_past_the_capacity_leave_good_slots_alone(run, tokens, width):
    """`dynamic_update_slice` shifts a block that does not fit onto committed slots."""
    _, cache = run(tokens, empty_cache(3, CAPACITY))
    lengths = [13, 3, 12]
    cache = cache.commit(jnp.array(lengths))
    _, after = run(jnp.tile(tokens, (1, 3))[:, :width], cache)
    for layer, before in zip(after.keys + after.values, cache.keys + cache.values, strict=True):
        for row, length in enumerate(lengths):
            np.testing.assert_array_equal(layer[row, :, :length], before[row, :, :length])


def test_no_more_is_committed_than_there_are_slots():
    """What lies behind the capacity was never written."""
    cache = empty_cache(2, 20).commit(jnp.array([18, 3]))
    assert cache.commit(jnp.array([5, 5])).length.tolist() == [20, 8]


def test_zero_commit_is_silent(run, tokens):
    """Done rows commit 0 tokens."""
    _, cache = run(tokens[:, :BEFORE], empty_cache(3, CAPACITY))
    committed = cache.commit(full(BEFORE))
    _, after = run(tokens[:, BEFORE : BEFORE + BLOCK], committed)
    assert_same_committed(after.commit(jnp.array([0, 0, 0])), committed)


def test_a_zero_key_is_attended():
    """The mask is "slot committed", never "is it non-zero"."""
    cache = empty_cache(1, 8).commit(jnp.array([3]))
    values = cache.values[0].at[0, :, :3].set(jnp.arange(1.0, 4.0)[None, :, None])
    cache = cache.replace(values=(values, cache.values[1]))
    visible = cache.visible(jnp.zeros([1, 1, 1], bool))
    mixed = cache.layer(0).attend(jnp.ones([1, 1, 4, 6]), visible)
    assert_close(mixed, jnp.full([1, 1, 4, 6], 2.0))


def test_uncommitted_slots_are_invisible(run, tokens, expected):
    """Whatever lies behind `length` and outside the block must not be read."""
    _, cache = run(tokens[:, :BEFORE], empty_cache(3, CAPACITY))
    cache = cache.commit(full(BEFORE))
    keys, values = (
        tuple(layer.at[:, :, BEFORE + 1 :].set(1e4) for layer in layers)
        for layers in (cache.keys, cache.values)
    )
    poisoned = cache.replace(keys=keys, values=values)
    logits, _ = run(tokens[:, BEFORE : BEFORE + 1], poisoned)
    assert_close(logits, expected[:, BEFORE : BEFORE + 1])


def test_logits_at_picks_one_index_a_row(run, tokens, expected):
    """Prefill wants the last real token of every row only: the head is the dearest product."""
    index = jnp.array([0, 13, 7])
    logits, _ = run(tokens, empty_cache(3, CAPACITY), logits_at=index)
    assert logits.shape == (3, 1, 61)
    assert_close(logits[:, 0], expected[jnp.arange(3), index])


def test_embeddings_stand_in_for_tokens(run, tiny_pair, tokens, expected):
    """Trained heads feed vectors that are no token's."""
    logits, _ = run(tiny_pair.target["embedding"][tokens], empty_cache(3, CAPACITY))
    assert_close(logits, expected)


def test_positions_can_be_given(run, tokens, expected):
    """The default follows `cache.length`; other positions give other logits."""
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (3, LENGTH))
    logits, _ = run(tokens, empty_cache(3, CAPACITY), positions=positions)
    assert_close(logits, expected)
    logits, _ = run(tokens, empty_cache(3, CAPACITY), positions=positions * 2)
    assert jnp.abs(logits - expected).max() > 0.1


def test_the_default_mask_is_causal(run, tokens, expected):
    """One mask [1 t t] serves all rows."""
    logits, _ = run(tokens, empty_cache(3, CAPACITY), block_mask=causal_mask(LENGTH))
    assert_close(logits, expected)


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


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="how XLA writes rows on CPU")
def test_writing_many_rows_is_not_a_pass_over_the_layer_for_each(monkeypatch):
    """Guards against time that grows with the square of the batch: 8 s a step at batch size 16."""
    assert num_whole_layers(20) <= num_whole_layers(1)
    monkeypatch.setattr(cache_module, "write_rows", chained)
    assert num_whole_layers(20) >= 20, "the negative control"
