"""Blocks of different widths side by side: what a row says and remembers is what it does alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.prompt_lookup import PromptLookupDrafter
from jspec.kernels import attend, attend_pages, product, write_pages, write_rows
from jspec.speculation.budget import CallSize
from jspec.speculation.packing import Packing
from jspec.speculation.round import speculative_step
from jspec.speculation.types import Drafter
from tests import tiny
from tests.cases import slow_unless
from tests.speculation.drive import Engine
from tests.speculation.test_cache_consistency import run_checked

WIDTH = 4
SIZES = (8, 20)  # of four rows: the last has room for all drafts
MAX_LENGTHS = [30, 41, 44, 38]


class Varying(Drafter):
    """A drafter whose rows find other numbers of drafts in every round, 0 and all among them."""

    def __init__(self, inner):
        self.inner, self.num_draft_tokens = inner, inner.num_draft_tokens
        self.kinds, self.hidden_layers = inner.kinds, inner.hidden_layers
        self.init, self.observe = inner.init, inner.observe

    def propose(self, params, state, inputs):
        proposal, state = self.inner.propose(params, state, inputs)
        length = inputs.view.cache.length
        number = (7 * length + 3 * jnp.arange(len(length))) % (self.num_draft_tokens + 1)
        # A row in four rounds at a time has none, so that calls of every size are needed.
        number = jnp.where((length // 4 + jnp.arange(len(length))) % 3 == 0, 0, number)
        return proposal.replace(num_tokens=jnp.minimum(proposal.num_tokens, number)), state


@pytest.fixture(scope="module")
def packed(tiny_pair, make_engine):
    """Returns the engine of the coupled rule whose blocks lie side by side."""
    return Engine(
        tiny_pair.apply, tiny.empty_cache, (tiny_pair.target, tiny_pair.draft),
        Varying(make_engine("model", WIDTH).drafter), "coupled",
        step=functools.partial(speculative_step, sizes=[CallSize(n, WIDTH) for n in SIZES]),
    )  # fmt: skip


def test_greedy_output_equals_plain_decoding(packed, make_engine, prompts):
    """Rows of 0 to 4 drafts in one call; some end before others, and have no token from then on."""
    plain = make_engine("plain").generate(prompts, max_length=MAX_LENGTHS)
    result = packed.generate(prompts, max_length=MAX_LENGTHS)
    assert result.tokens == plain.tokens
    counts = result.infos.num_proposed
    assert 0 < result.num_accepted.sum() < counts.sum()
    needed = np.where(result.infos.num_tokens > 0, 1 + counts, 0).sum(axis=1)
    assert set(np.searchsorted(SIZES, needed[counts.any(axis=1)])) == {0, 1}, "every size"
    assert (counts.max(axis=1) > counts.min(axis=1)).sum() > 5, "widths differ within a round"


SAMPLED = {"seeds": [3, 4, 5, 6], "temperature": [0.7, 1.3, 0.0, 1.0], "max_length": MAX_LENGTHS}


def test_coupled_rows_say_what_plain_decoding_says(packed, make_engine, prompts):
    """Their noise is that of their own positions, whatever stands beside them."""
    together = packed.generate(prompts, **SAMPLED)
    assert together.tokens == make_engine("plain").generate(prompts, **SAMPLED).tokens
    assert 0 < together.num_accepted.sum() < together.infos.num_proposed.sum()


def test_rows_by_rejection_say_what_they_say_in_padded_blocks(tiny_pair, prompts):
    """Each verdict is by the distributions of the row's own tokens."""
    together, padded = (
        Engine(
            tiny_pair.apply, tiny.empty_cache, (tiny_pair.target,),
            Varying(PromptLookupDrafter(WIDTH, min_match=1)),
            step=functools.partial(speculative_step, sizes=sizes),
        ).generate(prompts, **SAMPLED)
        for sizes in ([CallSize(SIZES[-1], WIDTH)], ())
    )  # fmt: skip
    assert 0 < together.num_accepted.sum() < together.infos.num_proposed.sum()
    assert together.tokens == padded.tokens
    np.testing.assert_array_equal(together.num_accepted, padded.num_accepted)


def test_caches_equal_a_fresh_prefill_after_every_round(packed, prompts, fresh_cache):
    accepted, proposed = run_checked(packed, prompts, 10, fresh_cache)
    assert set(proposed.flat) >= {0, 1, 2, WIDTH}
    assert set(accepted.flat) >= {0, 1, 2}


def neighbours(monkeypatch):
    """A packed token that reads the row beside its row."""
    of = Packing.of

    def wrong(counts, size, width):
        packing = of(counts, size, width)
        is_draft = (packing.place > 0).astype(jnp.int32)
        return packing.replace(row=(packing.row + is_draft) % len(counts))

    monkeypatch.setattr(Packing, "of", staticmethod(wrong))


def test_a_token_of_another_row_is_seen(tiny_pair, make_engine, prompts, monkeypatch):
    """Negative control of the tests above; mistakes.toml has others."""
    plain = make_engine("plain").generate(prompts, max_length=MAX_LENGTHS)
    neighbours(monkeypatch)
    engine = Engine(
        tiny_pair.apply, tiny.empty_cache, (tiny_pair.target,),
        PromptLookupDrafter(WIDTH, min_match=1), "coupled",
        step=functools.partial(speculative_step, sizes=[CallSize(20, WIDTH)]),
    )  # fmt: skip
    result = engine.generate(prompts, max_length=MAX_LENGTHS)
    assert result.tokens != plain.tokens


@pytest.mark.parametrize(
    ("counts", "size"), [((3, 0, 1, 2), 8), ((1, 1, 1, 1), 4), ((0, 0, 0, 5), 5), ((0, 0), 3)]
)
def test_every_token_is_at_its_place(counts, size):
    packing = Packing.of(jnp.asarray(counts, jnp.int32), size, width=5)
    expected = [(row, place) for row, count in enumerate(counts) for place in range(count)]
    actual = list(zip(packing.row.tolist(), packing.place.tolist(), strict=True))
    assert actual[: len(expected)] == expected
    assert all(place == 5 for _, place in actual[len(expected) :]), "padding is after all blocks"
    blocks = jnp.arange(len(counts) * 5).reshape(len(counts), 5)
    back = packing.unpack(packing.pack(blocks))
    for row, count in enumerate(counts):
        assert back[row, :count].tolist() == blocks[row, :count].tolist()


@pytest.mark.parametrize(
    ("page", "dtype"),
    [
        (None, jnp.float32),
        (16, jnp.bfloat16),
        slow_unless(False, None, jnp.bfloat16),
        slow_unless(False, 16, jnp.float32),
    ],
)
def test_a_rows_attention_and_products_are_the_same_bits_in_any_packing(dtype, page):
    """Alone, padded beside others, side by side in any order: by C++ not one bit differs."""
    rng = np.random.default_rng(0)
    b, t, n, k, h, slots = 3, 4, 4, 2, 32, 80
    counts, length = np.array([4, 1, 2]), np.array([40, 11, 63])

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    layer_keys, layer_values = (
        draw(b, k, slots, h).astype(dtype),
        draw(b, k, slots, h).astype(dtype),
    )
    queries, keys, values = draw(b, t, n, h), draw(b, t, k, h), draw(b, t, k, h)
    start = jnp.asarray(length, jnp.int32)
    visible = np.arange(slots) <= (length[:, None] + np.arange(t))[..., None]
    padded = jax.jit(attend)(
        queries, write_rows(layer_keys, keys, start), write_rows(layer_values, values, start),
        jnp.asarray(visible),
    )  # fmt: skip
    table = jnp.arange(b, dtype=jnp.int32)[:, None]
    if page is not None:  # the same slots in pages that lie in another order
        table = jnp.asarray(rng.permutation(b * slots // page), jnp.int32).reshape(b, -1)
        layer_keys, layer_values = (
            jnp.zeros_like(layer).reshape(-1, k, page, h).at[table.reshape(-1)].set(
                layer.reshape(b, k, -1, page, h).swapaxes(1, 2).reshape(-1, k, page, h)
            )
            for layer in (layer_keys, layer_values)
        )  # fmt: skip
    packing = Packing.of(jnp.asarray(counts, jnp.int32), 9, t)
    order = rng.permutation(9)  # no order of the call's tokens is special
    row, place = packing.row[order], packing.place[order]
    block = jnp.minimum(place, t - 1)
    at, tables = start[row] + place, table[row]
    side = jax.jit(attend_pages)(
        queries[row, block][:, None],
        write_pages(layer_keys, keys[row, block][:, None], at, tables),
        write_pages(layer_values, values[row, block][:, None], at, tables),
        (jnp.arange(slots) <= at[:, None])[:, None],
        tables,
    )
    is_real = np.asarray(place) < t
    expected = np.asarray(padded)[np.asarray(row), np.asarray(block)][is_real]
    actual = np.asarray(side)[:, 0][is_real]
    np.testing.assert_array_equal(actual, expected)
    kernel = draw(24, n * h).astype(dtype)
    rows = jnp.asarray(expected.reshape(len(expected), -1))
    together, alone = product(rows, kernel), [product(row[None], kernel)[0] for row in rows]
    np.testing.assert_array_equal(together, jnp.stack(alone))
