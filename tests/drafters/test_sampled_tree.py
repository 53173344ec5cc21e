"""Branches that are drawn: from what they claim, exactly; through whole rounds."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.drafters import DrafterOptions, DrafterSpec, make_drafter
from jspec.drafters.model import ModelDrafter
from jspec.drafters.spec import Shape
from jspec.drafters.trees import draw_tree
from jspec.sampling.noise import absolute_keys, independent_draft_keys
from jspec.speculation.types import RoundInputs
from tests import tiny
from tests.cases import slow_unless
from tests.speculation.drive import Engine, propose, settings_of
from tests.speculation.toys import softmax

VOCAB = 5
TABLE = 1.5 * np.random.default_rng(0).normal(size=(VOCAB, VOCAB))


@functools.cache
def drawn(draws, size=7, depth=3, branches=3, rows=4000, temperature=1.0, is_shared=False):
    """Returns the tree of rows with seeds of their own after token 0, and the masks fed."""
    shape, table = Shape(size, depth, branches, draws), jnp.asarray(TABLE, jnp.float32)
    keys_of = absolute_keys if is_shared else independent_draft_keys

    @jax.jit
    def grow():
        masks = []
        inputs = RoundInputs(
            jnp.zeros([rows], jnp.int32),
            limit=lambda kind: jnp.full_like(kind, size),
            rng_keys=keys_of(jnp.arange(rows, dtype=jnp.uint32), jnp.full([rows], 9), size),
            settings=settings_of(rows, temperature),
            view=None,
            has_shared_noise=is_shared,
        )

        def feed(memory, level):
            masks.append((level.depth, level.mask[0]))
            return table[level.tokens], memory

        start = jnp.broadcast_to(table[0], (rows, VOCAB))
        wanted = jnp.full([rows], size)
        grown = draw_tree(feed, None, start, shape, inputs, wanted=wanted, vocab_size=VOCAB)
        return grown, masks

    return jax.tree.map(np.asarray, grow())


def test_levels_are_filled_evenly():
    """The first level has all branches; those after it are as long as the number allows."""
    assert Shape(7, 3, 3, "with").levels == (3, 2, 2)
    assert Shape(8, 4, 3, "with").levels == (3, 2, 2, 1)
    assert Shape(12, 4, 3, "with").levels == (3, 3, 3, 3)
    assert Shape(3, 1, 3, "with").num_fed == 0


@pytest.mark.parametrize("draws", ["with", "without"])
def test_the_tree_is_what_was_drawn(draws):
    """Tokens, parents and distributions belong together, in every row; masks are branches."""
    grown, masks = drawn(draws)
    proposal, probs = grown.proposal, softmax(TABLE)
    tokens, parents, told = (np.asarray(x) for x in (proposal.tokens, proposal.parents,
                                                     proposal.probs))  # fmt: skip
    roots, num_merged = [0, 3, 6], 0  # branches of 3, 3 and 1 drafts
    for row in range(200):
        assert (parents[row, roots] == -1).all()
        for draft in (1, 2, 4, 5):
            parent = parents[row, draft]
            place = draft - 1
            assert parent <= place < draft
            assert tokens[row, parent] == tokens[row, place]
            num_merged += parent != place
            np.testing.assert_allclose(told[row, draft], probs[tokens[row, place]], atol=1e-6)
        left = probs[0].copy()
        for draft in roots:
            np.testing.assert_allclose(told[row, draft], left / left.sum(), atol=1e-6)
            left[tokens[row, draft]] *= draws == "with"
    assert (num_merged > 20) == (draws == "with")
    assert [depth for depth, _ in masks] == [1, 2]
    assert masks[1][1].tolist() == [[True, False, True, False], [False, True, False, True]]


def test_branches_that_begin_alike_are_one_path():
    """A draft's parent is the first draft with the same path; fed drafts likewise."""
    proposal = drawn("with")[0].proposal
    tokens, parents = np.asarray(proposal.tokens), np.asarray(proposal.parents)
    is_same = tokens[:, 0] == tokens[:, 3]
    assert 0.05 < is_same.mean() < 0.95
    assert (parents[is_same, 4] == 0).all()
    assert (parents[~is_same, 4] == 3).all()
    is_longer = is_same & (tokens[:, 1] == tokens[:, 4])
    assert (parents[is_longer, 5] == 1).all()
    grown = drawn("with")[0]
    assert grown.fed[is_longer].shape[1] == 4
    fed_parents = np.asarray(grown.fed_parents)
    assert (fed_parents[is_same, 3] == 0).all()
    assert (fed_parents[~is_same, 3] == 1).all()


def chi_square(counts, probs):
    expected = probs * counts.sum()
    return ((counts - expected) ** 2 / expected).sum()


@pytest.mark.parametrize("draws", ["with", "without"])
def test_siblings_follow_the_distributions_told(draws):
    """4,000 rows' first two siblings jointly, of 24 and 19 degrees of freedom; false alarm 1e-6.

    Negative control: the other kind of draw is not what was drawn.
    """
    tokens = np.asarray(drawn(draws)[0].proposal.tokens)
    counts = np.zeros((VOCAB, VOCAB))
    np.add.at(counts, (tokens[:, 0], tokens[:, 3]), 1)
    p = softmax(TABLE)[0]
    joint = {
        "with": p[:, None] * p,
        "without": np.where(np.eye(VOCAB), 0, p[:, None] * p / (1 - p[:, None])),
    }
    possible = joint[draws] > 0
    assert counts[~possible].sum() == 0
    assert chi_square(counts[possible], joint[draws][possible]) < 75
    wrong = joint["without" if draws == "with" else "with"] + 1e-3
    assert chi_square(counts, wrong / wrong.sum()) > 75


def test_cousins_are_drawn_apart():
    """Second drafts of two branches with one token are independent: 16 degrees, false alarm 1e-6.

    Guards against one noise for a depth, under which traversal verification is biased.
    """
    tokens = np.asarray(drawn("with", rows=20_000)[0].proposal.tokens)
    likely = np.bincount(tokens[:, 0]).argmax()
    tried = tokens[(tokens[:, 0] == likely) & (tokens[:, 3] == likely)]
    counts = np.zeros((VOCAB, VOCAB))
    np.add.at(counts, (tried[:, 1], tried[:, 4]), 1)
    p = softmax(TABLE)[likely]
    assert counts.sum() > 1000
    assert chi_square(counts, p[:, None] * p) < 75
    assert np.trace(counts) < 0.9 * counts.sum()  # what one noise would give


def test_shared_noise_is_that_of_the_position():
    """Under `coupled`: the first level are the largest sums, later ones share a depth's noise."""
    proposal = drawn("without", rows=300, is_shared=True)[0].proposal
    keys = absolute_keys(jnp.arange(300, dtype=jnp.uint32), jnp.full([300], 9), 3)
    noise = jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, [VOCAB], mode="high")))(keys)
    noise, tokens = np.asarray(noise), np.asarray(proposal.tokens)
    scores = np.log(softmax(TABLE))
    best = np.argsort(-(scores[0] + noise[:, 0]), axis=1)[:, :3]
    np.testing.assert_array_equal(tokens[:, [0, 3, 6]], best)
    for draft, depth in itertools.product((0, 3), (1, 2)):
        after = scores[tokens[:, draft + depth - 1]] + noise[:, depth]
        np.testing.assert_array_equal(tokens[:, draft + depth], after.argmax(axis=1))


@pytest.mark.parametrize("draws", ["with", "without"])
def test_temperature_zero_takes_the_likeliest_for_certain(draws):
    """Guards against three equal branches."""
    proposal = drawn(draws, rows=2, temperature=0.0)[0].proposal
    best = np.argsort(-TABLE[0])[:3]
    assert np.asarray(proposal.tokens)[0, [0, 3, 6]].tolist() == best.tolist()
    assert np.asarray(proposal.tokens)[0, [1, 4]].tolist() == TABLE[best[:2]].argmax(1).tolist()
    assert (np.asarray(proposal.probs).max(axis=-1) == 1).all()


PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7]]


@pytest.mark.parametrize(
    ("draws", "rule"),
    [
        slow_unless((draws, rule) == ("with", "rejection"), draws, rule)
        for draws in ("with", "without")
        for rule in ("rejection", "block", "k_seq", "coupled")
    ],
)
def test_a_target_that_drafts_for_itself_keeps_a_path_in_every_round(tiny_pair, draws, rule):
    """Invariant 4: the first branch is drawn from the target, and that is kept.

    The slow ones add the other rules: what they accept is enumerated in test_tree_rules.py.
    """
    chain = ModelDrafter(7, 61, 61, apply=tiny_pair.apply, init_cache=tiny.empty_cache)
    drafter, params = dataclasses.replace(chain, shape=Shape(7, 3, 3, draws)), tiny_pair.target
    engine = Engine(tiny_pair.apply, tiny.empty_cache, (params, params), drafter, rule, capacity=48)
    result = engine.generate(PROMPTS, temperature=1.0)
    is_whole = result.infos.num_proposed == 7
    assert is_whole.sum() > 15
    assert (result.num_accepted[is_whole] == 3).all()


def test_members_of_a_cascade_leave_each_others_rows_alone(tiny_pair):
    """Guards against what is on record for a row in which another member drafts: it would add up.

    In rows whose text repeats itself the lookup drafts, in the others the model does.
    """
    options = DrafterOptions(tree_depth=3, tree_branches=3, tree_draws="with")
    spec = DrafterSpec(7, tiny.CONFIG, 61, tiny.CONFIG, jnp.float32, tiny_pair.draft, options)
    drafter, params = make_drafter("prompt_lookup+model", spec)
    model_params = tiny_pair.target, params
    engine = Engine(tiny_pair.apply, tiny.empty_cache, model_params, drafter, capacity=48)
    state = engine.start([[4, 9, 23] * 3, [5, 8, 3, 7]]).draft
    proposal, _ = propose(None, drafter, params, state, [4, 2], 7, temperature=1.0)
    actual = [drafter.kinds[kind].drafter for kind in proposal.kind.tolist()]
    assert actual == ["prompt_lookup", "model"]
    is_draft = np.arange(7) < np.asarray(proposal.num_tokens)[:, None]
    assert is_draft.sum() > 7
    np.testing.assert_allclose(proposal.probs.sum(axis=-1), is_draft, atol=1e-6)


@pytest.mark.parametrize(
    ("number", "options", "message"),
    [
        (4, {}, r"num_draft_tokens from 5 to 9, .* 3 branches of at most 3; got 4"),
        (10, {}, r"from 5 to 9, .*; got 10"),
        (7, {"draft_confidence": 0.5}, r"draft_confidence 0 with tree_draws=with, got 0.5"),
    ],
)
def test_trees_that_cannot_be(number, options, message):
    """One line that says what was expected."""
    options = DrafterOptions(tree_depth=3, tree_draws="with", **options)
    spec = DrafterSpec(number, tiny.CONFIG, 61, tiny.CONFIG, jnp.float32, {}, options)
    with pytest.raises(InputError, match=message):
        make_drafter("model", spec)
