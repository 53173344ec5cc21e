"""Training of block drafters computes what the drafter computes: blocks, masks, anchors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.training.chain_loss import steps_after
from jspec.training.dflash import block_outputs, draw_anchors
from jspec.training.packing import block_mask, pack, packed_hidden
from jspec.training.target_states import TargetStates
from jspec.training.texts import Text
from tests import tiny, tiny_dflash

SEQ_LEN = 40


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 61, n).tolist() for n in (17, 12, 30, 9, 20)]
    return pack([Text(tuple(ids[:4]), tuple(ids[4:])) for ids in texts], SEQ_LEN)


@pytest.fixture(scope="module")
def states(tiny_pair, rows):
    config, params = tiny.CONFIG, tiny_pair.target
    layers = tiny_dflash.CONFIG.feature_layers
    run = jax.jit(lambda params, *layers: packed_hidden(config, params, rows, jnp.float32, *layers),
                  static_argnums=1)  # fmt: skip
    features, hidden = run(params, layers), run(params)
    embedded = params["embedding"][jnp.asarray(rows.tokens)]
    return TargetStates(embedded, features, hidden, hidden @ params["head"].T)


@pytest.mark.parametrize("says_next", [False, True])
def test_blocks_in_training_are_those_of_drafting(tiny_pair, rows, states, says_next):
    """Several blocks of a packed row in one call, each beside numpy's block of its text alone."""
    config = dataclasses.replace(tiny_dflash.CONFIG, block_size=4, says_next=says_next)
    head, anchors = tiny_dflash.params(config), draw_anchors(rows, 6)
    run = jax.jit(block_outputs, static_argnums=0)
    outputs = run(config, head, states, rows, anchors)
    is_scored = np.asarray(rows.is_scored(1))
    num_checked = 0
    for row, places in enumerate(np.asarray(anchors)):
        for index, place in enumerate(places):
            if not is_scored[row, place]:
                continue
            first = place - int(rows.positions[row, place])
            expected = tiny_dflash.reference_hidden(
                config, head, tiny_pair.target, states.features[row, first:place],
                int(rows.tokens[row, place]), config.block_size,
            )[-config.most_drafts :]  # fmt: skip
            np.testing.assert_allclose(outputs[row, index], expected, rtol=2e-3, atol=2e-3)
            num_checked += 1
    assert num_checked > 8


def test_anchors_are_drawn_from_answers(rows):
    """Each is followed by a token of an answer; those of a row are different ones."""
    anchors, is_scored = np.asarray(draw_anchors(rows, 6)), np.asarray(rows.is_scored(1))
    for row, places in enumerate(anchors):
        assert len(set(places.tolist())) == 6
        assert is_scored[row, places].sum() == min(6, is_scored[row].sum())
    again = np.asarray(draw_anchors(rows, 6))
    np.testing.assert_array_equal(anchors, again)


def test_the_target_is_asked_about_the_token_that_a_slot_says(rows, states):
    """Step s is the token s + 1 places after the anchor, in the anchor's text."""
    anchors, ids = draw_anchors(rows, 6), np.arange(61)
    step = steps_after(rows, states.logits, anchors, ids, first=1)(2)
    for row, places in enumerate(np.asarray(anchors)):
        for index, place in enumerate(places):
            is_there = place + 3 < SEQ_LEN and rows.text[row, place + 3] == rows.text[row, place]
            is_there = is_there and rows.text[row, place] > 0
            assert bool(step.is_scored[row, index]) == (
                bool(is_there) and bool(rows.is_answer[row, min(place + 3, SEQ_LEN - 1)])
            )
            if is_there:
                expected = jax.nn.softmax(states.logits[row, place + 2])
                np.testing.assert_allclose(step.probs[row, index], expected, rtol=1e-5)


def test_a_block_sees_neither_its_anchors_feature_nor_later_tokens(rows):
    """The anchor's feature is not known when its block is drafted."""
    anchors = draw_anchors(rows, 6)
    mask = np.asarray(block_mask(rows, anchors, np.ones([3, 3]), sees_anchor=False))
    for row, places in enumerate(np.asarray(anchors)):
        for index, place in enumerate(places):
            for slot in range(3):
                seen = mask[row, 3 * index + slot]
                block = SEQ_LEN + 3 * index + np.arange(3)
                first = place - int(rows.positions[row, place])
                expected = {*range(first, place), *block} if rows.text[row, place] else set(block)
                assert set(np.flatnonzero(seen).tolist()) - {*range(place)} == set(block.tolist())
                if rows.text[row, place]:
                    assert set(np.flatnonzero(seen).tolist()) == {int(i) for i in expected}
