"""Trees of drafts: those that grow, those that are drawn, and those that lookups know."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.drafters import DrafterOptions, check_options
from jspec.drafters.cascade import CascadeDrafter, MergedCascadeDrafter
from jspec.drafters.model import ModelDrafter
from jspec.drafters.prompt_lookup import PromptLookupDrafter
from jspec.drafters.spec import Shape
from jspec.drafters.trees import draw_tree, grow_tree
from jspec.sampling.noise import absolute_keys, independent_draft_keys
from jspec.speculation.types import RoundInputs
from tests import tiny, tiny_eagle
from tests.cases import slow_unless
from tests.drafters.rows import build, paths_of, show
from tests.speculation import drive
from tests.speculation.drive import Engine, settings_of
from tests.speculation.toys import make_tables, softmax, toy_cache
from tests.speculation.tree_toys import tree_apply

# Trees that grow.

GROWN_VOCAB, STARTS = 6, [0, 1, 3]


@functools.cache
def grower(shape, min_confidence):
    """Returns (logits [token, next], last tokens) -> the tree, and the masks of what was fed."""

    @jax.jit
    def run(table, last):
        masks = []

        def feed(memory, level):
            masks.append(level.mask)
            return table[level.tokens], memory

        wanted = jnp.full(len(last), shape.num_draft_tokens, jnp.int32)
        options = {"wanted": wanted, "min_confidence": min_confidence}
        return grow_tree(feed, None, table[last], shape, **options), masks

    return run


def grow(table, shape, min_confidence=0.0):
    """Returns the trees after the tokens `STARTS`, and the masks."""
    last = jnp.asarray(STARTS, jnp.int32)
    grown = grower(shape, min_confidence)(jnp.asarray(table, jnp.float32), last)
    return jax.tree.map(np.asarray, grown)


def best_paths(probs, last, shape):
    """Returns {path: probability} by brute force: each level's best `branches` are extended."""
    level, pool = [((), 1.0)], []
    for _ in range(shape.depth):
        new = []
        for path, prob in level:
            after = probs[path[-1] if path else last]
            best = np.argsort(-after, kind="stable")[: shape.branches]
            new += [((*path, int(token)), prob * after[token]) for token in best]
        pool += new
        level = sorted(new, key=lambda item: -item[1])[: shape.branches]
    return dict(sorted(pool, key=lambda item: -item[1])[: shape.num_draft_tokens])


def tables_of(number):
    return 2 * np.random.default_rng(0).normal(size=(number, GROWN_VOCAB, GROWN_VOCAB))


@pytest.mark.parametrize("shape", [Shape(10, 4, 2), Shape(5, 3, 4), Shape(4, 1, 3)], ids=str)
def test_the_best_paths_are_put_forward(shape):
    """The tokens are those of a search by hand; the first branch comes first."""
    for table in tables_of(5):
        grown, _ = grow(table, shape)
        for row, last in enumerate(STARTS):
            actual = paths_of(grown.proposal, row)
            expected = best_paths(softmax(table), last, shape)
            assert sorted(actual) == sorted(expected)
            likeliest = [path for path in expected if all(
                token == np.argmax(table[before])
                for before, token in zip([last, *path], path, strict=False)
            )]  # fmt: skip
            assert actual[: len(likeliest)] == sorted(likeliest, key=len)


def test_masks_show_each_draft_its_own_path():
    """Guards against siblings that see each other while the tree grows."""
    grown, masks = grow(tables_of(1)[0], Shape(10, 4, 2))
    parents = grown.fed_parents[0]
    for level, mask in enumerate(masks):
        for place in range(2):
            draft, path = 2 * level + place, set()
            while draft >= 0:
                path.add(draft)
                draft = parents[draft]
            assert set(np.flatnonzero(mask[0, place])) == path
    assert len(grown.fed[0]) == 6


def test_unlikely_paths_are_not_put_forward():
    """`draft_confidence` is the least probability of a path; each row has its own number."""
    (table,), shape = tables_of(1), Shape(10, 4, 2)
    everything, sure = grow(table, shape)[0], grow(table, shape, min_confidence=0.2)[0]
    for row, last in enumerate(STARTS):
        probs = best_paths(softmax(table), last, shape)
        expected = [path for path in paths_of(everything.proposal, row) if probs[path] >= 0.2]
        assert paths_of(sure.proposal, row) == expected
    assert len(set(sure.proposal.num_tokens.tolist())) > 1


PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7]]


def generate(pair, drafter, draft):
    """Returns a greedy run of the tiny target to the context limit."""
    params = pair.target, draft
    engine = Engine(pair.apply, tiny.empty_cache, params, drafter, "greedy", capacity=48)
    return engine.generate(PROMPTS)


def model_of(pair, num_draft_tokens, **options):
    options = {"apply": pair.apply, "init_cache": tiny.empty_cache, **options}
    return ModelDrafter(num_draft_tokens, 61, 61, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model", "eagle"])
def test_a_tree_of_one_branch_drafts_what_the_chain_drafts(tiny_pair, name):
    """Guards against a wrong position, mask or feature while the tree grows.

    The quick test below would see one of a model's; text and caches are in test_random_rounds.py.
    """
    is_model = name == "model"
    chain = model_of(tiny_pair, 3) if is_model else tiny_eagle.drafter(3)
    draft = tiny_pair.draft if is_model else tiny_eagle.params_for(tiny_pair)
    branch = dataclasses.replace(chain, shape=Shape(3, 3, 1))
    branch, chain = (generate(tiny_pair, drafter, draft) for drafter in (branch, chain))
    assert branch.tokens == chain.tokens
    np.testing.assert_array_equal(branch.num_accepted, chain.num_accepted)
    assert chain.num_accepted.sum() > 3


def test_a_target_that_drafts_for_itself_keeps_a_path_in_every_round(tiny_pair):
    """Invariant 4: of 6 drafts, all that there are, the likeliest path is always kept."""
    drafter = model_of(tiny_pair, 6, shape=Shape(6, 2, 2))
    result = generate(tiny_pair, drafter, tiny_pair.target)
    is_whole = result.infos.num_proposed == 6
    assert is_whole.sum() > 20
    assert (result.num_accepted[is_whole] == 2).all()


# Trees that are drawn.

VOCAB, ROWS = 5, 20_000
TABLE = 1.5 * np.random.default_rng(0).normal(size=(VOCAB, VOCAB))


@functools.cache
def _drawer(draws, is_shared):
    """Returns temperature -> the trees of rows with seeds of their own after token 0, and masks."""
    size, table = 7, jnp.asarray(TABLE, jnp.float32)
    keys_of = absolute_keys if is_shared else independent_draft_keys

    @jax.jit
    def grow(settings):
        masks = []
        inputs = RoundInputs(
            jnp.zeros([ROWS], jnp.int32),
            limit=lambda kind: jnp.full_like(kind, size),
            rng_keys=keys_of(jnp.arange(ROWS, dtype=jnp.uint32), jnp.full([ROWS], 9), size),
            settings=settings,
            view=None,
            has_shared_noise=is_shared,
        )

        def feed(memory, level):
            masks.append((level.depth, level.mask[0]))
            return table[level.tokens], memory

        start, wanted = jnp.broadcast_to(table[0], (ROWS, VOCAB)), jnp.full([ROWS], size)
        shape = Shape(size, 3, 3, draws)
        grown = draw_tree(feed, None, start, shape, inputs, wanted=wanted, vocab_size=VOCAB)
        return grown, masks

    return grow


@functools.cache
def drawn(draws, temperature=1.0, is_shared=False):
    return jax.tree.map(np.asarray, _drawer(draws, is_shared)(settings_of(ROWS, temperature)))


@pytest.mark.parametrize("draws", ["with", "without"])
def test_the_tree_is_what_was_drawn(draws):
    """Tokens, parents and distributions belong together, in every row; masks are branches."""
    grown, masks = drawn(draws)
    tokens, parents, told = grown.proposal.tokens, grown.proposal.parents, grown.proposal.probs
    probs, roots, num_merged = softmax(TABLE), [0, 3, 6], 0  # branches of 3, 3 and 1 drafts
    for row in range(200):
        assert (parents[row, roots] == -1).all()
        for draft in (1, 2, 4, 5):
            parent, place = parents[row, draft], draft - 1
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
    grown, _ = drawn("with")
    tokens, parents = grown.proposal.tokens, grown.proposal.parents
    is_same = tokens[:, 0] == tokens[:, 3]
    assert 0.05 < is_same.mean() < 0.95
    assert (parents[is_same, 4] == 0).all()
    assert (parents[~is_same, 4] == 3).all()
    is_longer = is_same & (tokens[:, 1] == tokens[:, 4])
    assert (parents[is_longer, 5] == 1).all()
    assert grown.fed.shape[1] == 4
    assert (grown.fed_parents[is_same, 3] == 0).all()
    assert (grown.fed_parents[~is_same, 3] == 1).all()


def chi_square(counts, probs):
    expected = probs * counts.sum()
    return ((counts - expected) ** 2 / expected).sum()


def count_pairs(first, second):
    counts = np.zeros((VOCAB, VOCAB))
    np.add.at(counts, (first, second), 1)
    return counts


@pytest.mark.parametrize("draws", ["with", "without"])
def test_siblings_follow_the_distributions_told(draws):
    """20,000 rows' first two siblings jointly, of 24 and 19 degrees of freedom; false alarm 1e-6.

    Negative control: the other kind of draw is not what was drawn.
    """
    tokens = drawn(draws)[0].proposal.tokens
    counts, p = count_pairs(tokens[:, 0], tokens[:, 3]), softmax(TABLE)[0]
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
    tokens = drawn("with")[0].proposal.tokens
    likely = np.bincount(tokens[:, 0]).argmax()
    tried = tokens[(tokens[:, 0] == likely) & (tokens[:, 3] == likely)]
    counts, p = count_pairs(tried[:, 1], tried[:, 4]), softmax(TABLE)[likely]
    assert counts.sum() > 1000
    assert chi_square(counts, p[:, None] * p) < 75
    assert np.trace(counts) < 0.9 * counts.sum()  # what one noise would give


def test_shared_noise_is_that_of_the_position():
    """Under `coupled`: the first level are the largest sums, later ones share a depth's noise."""
    tokens = drawn("without", is_shared=True)[0].proposal.tokens[:300]
    keys = absolute_keys(jnp.arange(300, dtype=jnp.uint32), jnp.full([300], 9), 3)
    gumbel = jax.jit(jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, [VOCAB], mode="high"))))
    noise, scores = np.asarray(gumbel(keys)), np.log(softmax(TABLE))
    best = np.argsort(-(scores[0] + noise[:, 0]), axis=1)[:, :3]
    np.testing.assert_array_equal(tokens[:, [0, 3, 6]], best)
    for draft, depth in itertools.product((0, 3), (1, 2)):
        after = scores[tokens[:, draft + depth - 1]] + noise[:, depth]
        np.testing.assert_array_equal(tokens[:, draft + depth], after.argmax(axis=1))


@pytest.mark.parametrize("draws", ["with", "without"])
def test_temperature_zero_takes_the_likeliest_for_certain(draws):
    """Guards against three equal branches."""
    proposal = drawn(draws, temperature=0.0)[0].proposal
    best = np.argsort(-TABLE[0])[:3]
    assert proposal.tokens[0, [0, 3, 6]].tolist() == best.tolist()
    assert proposal.tokens[0, [1, 4]].tolist() == TABLE[best[:2]].argmax(1).tolist()
    assert (proposal.probs.max(axis=-1) == 1).all()


@pytest.mark.parametrize(
    ("draws", "rule"),
    [
        slow_unless((draws, rule) == ("with", "rejection"), draws, rule)
        for draws in ("with", "without")
        for rule in ("rejection", "block", "k_seq", "coupled")
    ],
)
def test_a_target_that_draws_for_itself_keeps_a_path_in_every_round(draws, rule):
    """Invariant 4: the first branch is drawn from the target, and that is kept.

    The slow ones add the other rules: what they accept is enumerated in test_tree_rules.py.
    """
    options = {"apply": tree_apply, "init_cache": toy_cache, "shape": Shape(4, 2, 3, draws)}
    drafter, (table, _) = ModelDrafter(4, VOCAB, VOCAB, **options), make_tables()
    engine = Engine(tree_apply, toy_cache, (table, table), drafter, rule, capacity=48)
    result = engine.generate([[1, 2, 3], [4], [0, 2]], temperature=1.0)
    is_whole = result.infos.num_proposed == 4
    assert is_whole.sum() > 15
    assert (result.num_accepted[is_whole] == 2).all()


# Of several drafters together.

SIZE, DEPTH = 7, 3
REPEATING = [[4, 9, 23, 4, 9, 23, 4, 9, 23, 4, 9], [5, 9, 8, 3, 9, 7, 2, 9, 7, 4, 9]]


TREE = Shape(SIZE, DEPTH, 2)
LOOKUP = PromptLookupDrafter(SIZE, shape=TREE)
MODEL = ModelDrafter(SIZE, 61, 61, apply=tree_apply, init_cache=toy_cache, shape=TREE)
MERGED = MergedCascadeDrafter((LOOKUP, MODEL))
PARAMS = None, 2 * np.random.default_rng(0).normal(size=(61, 61, 61)).astype(np.float32)


def propose(drafter, state, limit=SIZE, temperature=0.0, *, params=PARAMS, last=(23, 9)):
    """Returns what is proposed after the repeating texts, and the new state."""
    return drive.propose(None, drafter, params, state, last, limit, temperature)


@pytest.fixture(scope="module")
def seen():
    """Returns the state of lookup and model after two texts."""
    return show(MERGED, MERGED.init(2, 96), REPEATING, params=PARAMS)


def test_members_share_the_tree_by_their_scores(seen):
    """The second row's match is short: its nodes are the best of both members'."""
    proposal, _ = propose(MERGED, seen)
    scores = {}
    for member, params, state in zip(MERGED.members, PARAMS, seen, strict=True):
        alone, _ = propose(member, state, params=params)
        for path, score in zip(paths_of(alone, 1), alone.scores[1].tolist(), strict=False):
            scores[path] = max(scores.get(path, -np.inf), score)
    best = sorted(scores, key=lambda path: -scores[path])[:SIZE]
    assert len(scores) > SIZE
    assert set(paths_of(proposal, 1)) == set(best)
    # What is kept of both decides whether the model, which costs more, is asked again.
    assert MERGED.kinds[int(proposal.kind[1])].drafter == "model"


def test_where_one_is_sure_the_next_is_not_asked(seen):
    """The first row repeats itself: the model neither runs nor reads there."""
    proposal, new = propose(MERGED, seen)
    assert paths_of(proposal, 0)[:3] == [(4,), (4, 9), (4, 9, 23)]
    assert MERGED.kinds[int(proposal.kind[0])].drafter == "prompt_lookup"
    assert new[1].cache.length[0] == 0
    assert new[1].cache.length[1] > 0


def test_a_member_that_is_unsure_is_known_as_silent(seen):
    """Guards against a model that runs for nothing beside a lookup, and is asked for ever."""
    unsure = MergedCascadeDrafter((LOOKUP, dataclasses.replace(MODEL, min_confidence=0.999)))
    proposal, _ = propose(unsure, seen)
    names = [unsure.kinds[int(kind)].drafter for kind in proposal.kind]
    assert names == ["prompt_lookup", "prompt_lookup"]
    assert (proposal.num_tokens > 0).all()
    # In the first row, where the lookup is sure, it was not asked.
    assert proposal.silent[:, -1].tolist() == [False, True]
    assert not propose(MERGED, seen)[0].silent[:, -1].any()


def test_limits_hold_for_all_members_together(seen):
    """Guards against members that each keep to the limit, and together do not."""
    whole, _ = propose(MERGED, seen)
    for limit in (0, 2, 5):
        proposal, _ = propose(MERGED, seen, limit)
        assert proposal.num_tokens.tolist() == [min(limit, int(n)) for n in whole.num_tokens]


def test_members_of_a_cascade_leave_each_others_rows_alone():
    """Guards against what is on record for a row in which another member drafts: it would add up.

    In rows whose text repeats itself the lookup drafts, in the others the model does.
    """
    model = dataclasses.replace(MODEL, shape=Shape(SIZE, DEPTH, 3, "with"))
    drafter = CascadeDrafter((PromptLookupDrafter(SIZE, 2), model))
    state = show(drafter, drafter.init(2, 96), [[4, 9, 23] * 3, [5, 8, 3, 7]], params=PARAMS)
    proposal, _ = propose(drafter, state, temperature=1.0, last=[4, 2])
    names = [drafter.kinds[kind].drafter for kind in proposal.kind.tolist()]
    assert names == ["prompt_lookup", "model"]
    is_draft = np.arange(SIZE) < np.asarray(proposal.num_tokens)[:, None]
    assert is_draft.sum() > SIZE
    np.testing.assert_allclose(proposal.probs.sum(axis=-1), is_draft, atol=1e-6)


def build_tree(name, pair, **options):
    """Returns the drafter of that name."""
    options = {"tree_depth": DEPTH, "tree_branches": 2} | options
    return build(name, SIZE, draft=pair.draft, **options).drafter


def test_what_is_drawn_is_not_merged(tiny_pair):
    """A drawn tree, or a chain that is drawn, has the row alone."""
    assert type(build_tree("prompt_lookup+model", tiny_pair)) is MergedCascadeDrafter
    for name, options in (
        ("prompt_lookup+model", {"tree_draws": "with", "tree_branches": 3}),
        ("prompt_lookup+random", {}),
        ("prompt_lookup+suffix", {"tree_depth": 0, "tree_branches": 3}),
    ):
        drafter = build_tree(name, tiny_pair, **options)
        assert type(drafter) is CascadeDrafter
        if "model" in name:
            assert [member.tree_depth for member in drafter.members] == [0, DEPTH]


def test_guesses_inside_a_draft_model_stay_a_chain(tiny_pair):
    """The cascade's tree is the outer lookup's alone."""
    drafter = build_tree("prompt_lookup+hierarchical", tiny_pair)
    assert type(drafter) is CascadeDrafter
    assert drafter.members[1].inner.tree_depth == 0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("suffix+recycle", {"tree_draws": "with"}, r"expected tree_draws with a drafter that"),
        ("ngram", {}, r"expected tree_depth with a drafter that reads it \(model, prompt_lookup"),
        ("hierarchical", {}, r"expected tree_depth with a drafter that reads it"),
    ],
)
def test_who_cannot_draft_such_a_tree_says_so(name, options, message):
    """In one line."""
    with pytest.raises(InputError, match=message):
        check_options([name], DrafterOptions(tree_depth=DEPTH, **options))


@pytest.mark.parametrize(
    ("name", "number", "options", "message"),
    [
        ("model", 2, {}, "at least tree_depth, 3; got 2"),
        ("prompt_lookup", 2, {}, "at least tree_depth, 3; got 2"),
        ("model", 4, {"tree_draws": "with"}, r"from 5 to 9, .* 3 branches of at most 3; got 4"),
        ("model", 10, {"tree_draws": "with"}, r"from 5 to 9, .*; got 10"),
        ("model", 7, {"tree_draws": "with", "draft_confidence": 0.5},
         r"draft_confidence 0 with tree_draws=with, got 0.5"),
    ],
)  # fmt: skip
def test_trees_that_cannot_be(name, number, options, message):
    """One line that says what was expected."""
    with pytest.raises(InputError, match=message):
        build(name, number, draft={}, tree_depth=3, **options)


def test_no_more_drafts_than_a_tree_has(tiny_pair):
    """Two children of the root, and two of each of the two best nodes of every later level."""
    drafter = build("model", 200, draft=tiny_pair.draft, tree_depth=3, tree_branches=2).drafter
    assert drafter.num_draft_tokens == drafter.shape.num_draft_tokens == 2 + 4 + 4
