"""Trees that grow: what they hold; model and head as drafters of trees, through whole rounds."""

import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jspec.common.errors import InputError
from jspec.drafters import DrafterOptions, DrafterSpec, make_drafter
from jspec.drafters.model import ModelDrafter
from jspec.drafters.spec import Shape
from jspec.drafters.trees import grow_tree
from tests import tiny, tiny_eagle
from tests.speculation.drive import Engine
from tests.speculation.toys import softmax

VOCAB = 6


def grow(table, last, shape, **options):
    """Returns the tree of each row's last token, with the table's logits [token, next]."""
    last = jnp.asarray(last, jnp.int32)
    wanted = jnp.full(len(last), shape.num_draft_tokens, jnp.int32)
    options = {"wanted": wanted, **options}

    @jax.jit
    def run(table, last):
        seen = []

        def feed(memory, level):
            seen.append(level.mask)
            return table[level.tokens], memory

        return grow_tree(feed, None, table[last], shape, **options), seen

    grown, seen = run(jnp.asarray(table, jnp.float32), last)
    return grown, [np.asarray(mask) for mask in seen]


def paths_of(proposal, row):
    """Returns every draft's path as tokens, of the drafts that are put forward."""
    paths = []
    tokens, parents = np.asarray(proposal.tokens[row]), np.asarray(proposal.parents[row])
    for draft in range(int(proposal.num_tokens[row])):
        before = [] if parents[draft] < 0 else paths[parents[draft]]
        paths.append([*before, int(tokens[draft])])
    return paths


def best_paths(probs, last, shape):
    """Returns the same by brute force: each level's best `branches` are extended."""
    level, pool = [([], 1.0)], []
    for _ in range(shape.depth):
        new = []
        for path, prob in level:
            after = probs[path[-1] if path else last]
            best = np.argsort(-after, kind="stable")[: shape.branches]
            new += [([*path, int(token)], prob * after[token]) for token in best]
        pool += new
        level = sorted(new, key=lambda item: -item[1])[: shape.branches]
    return [path for path, _ in sorted(pool, key=lambda item: -item[1])[: shape.num_draft_tokens]]


@hypothesis.settings(deadline=None, max_examples=6, derandomize=True)
@hypothesis.given(
    seed=st.integers(0, 2**32 - 1),
    depth=st.integers(1, 4),
    branches=st.integers(1, 4),
    size=st.integers(4, 10),
)
def test_the_best_paths_are_put_forward(seed, depth, branches, size):
    """The tokens are those of a search by hand; the first branch comes first."""
    shape = Shape(size, depth, branches)
    table = 2 * np.random.default_rng(seed).normal(size=(VOCAB, VOCAB))
    grown, _ = grow(table, [0, 3], shape)
    for row, last in enumerate((0, 3)):
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
    table = 2 * np.random.default_rng(1).normal(size=(VOCAB, VOCAB))
    grown, masks = grow(table, [0], Shape(8, 3, 2))
    fed, parents = np.asarray(grown.fed[0]), np.asarray(grown.fed_parents[0])
    for level, mask in enumerate(masks):
        for place in range(2):
            draft, path = 2 * level + place, set()
            while draft >= 0:
                path.add(draft)
                draft = parents[draft]
            assert set(np.flatnonzero(mask[0, place])) == path
    assert len(fed) == 4


def test_unlikely_paths_are_not_put_forward():
    """`draft_confidence` is the least probability of a path; each row has its own number."""
    table = 2 * np.random.default_rng(2).normal(size=(VOCAB, VOCAB))
    shape = Shape(9, 3, 3)
    everything, _ = grow(table, [0, 1, 2], shape)
    sure, _ = grow(table, [0, 1, 2], shape, min_confidence=0.2)
    probs = softmax(table)
    for row in range(3):
        kept = paths_of(sure.proposal, row)
        expected = [
            path
            for path in paths_of(everything.proposal, row)
            if np.prod([probs[a, b] for a, b in zip([row, *path], path, strict=False)]) >= 0.2
        ]
        assert kept == expected
    assert len(set(np.asarray(sure.proposal.num_tokens).tolist())) > 1


def model_chain(pair, num_draft_tokens=3):
    return ModelDrafter(num_draft_tokens, 61, 61, apply=pair.apply, init_cache=tiny.empty_cache)


def model_tree(pair, shape):
    return dataclasses.replace(model_chain(pair, shape.num_draft_tokens), shape=shape)


def eagle_tree(shape):
    chain = tiny_eagle.drafter(shape.num_draft_tokens)
    return dataclasses.replace(chain, shape=shape)


PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7]]


@pytest.fixture(scope="module")
def generate(tiny_pair):
    """Returns a function of a drafter's name that runs greedily to the context limit."""
    head = tiny_eagle.params_for(tiny_pair)
    draft_of = {
        "self": (model_tree(tiny_pair, Shape(6, 2, 2)), tiny_pair.target),
        "model branch": (model_tree(tiny_pair, Shape(3, 3, 1)), tiny_pair.draft),
        "model chain": (model_chain(tiny_pair), tiny_pair.draft),
        "eagle branch": (eagle_tree(Shape(3, 3, 1)), head),
        "eagle chain": (tiny_eagle.drafter(3), head),
    }

    def run(name):
        drafter, params = draft_of[name]
        params = tiny_pair.target, params
        engine = Engine(tiny_pair.apply, tiny.empty_cache, params, drafter, "greedy", capacity=48)
        return engine.generate(PROMPTS)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model", "eagle"])
def test_a_tree_of_one_branch_drafts_what_the_chain_drafts(generate, name):
    """Guards against a wrong position, mask or feature while the tree grows.

    The quick test below would see one of a model's; text and caches are in test_random_rounds.py.
    """
    branch, chain = generate(f"{name} branch"), generate(f"{name} chain")
    assert branch.tokens == chain.tokens
    np.testing.assert_array_equal(branch.num_accepted, chain.num_accepted)
    assert chain.num_accepted.sum() > 3


def test_a_target_that_drafts_for_itself_keeps_a_path_in_every_round(generate):
    """Invariant 4: of 6 drafts, all that there are, the likeliest path is always kept."""
    result = generate("self")
    is_whole = result.infos.num_proposed == 6
    assert is_whole.sum() > 20
    assert (result.num_accepted[is_whole] == 2).all()


def test_fewer_drafts_than_levels():
    """One line that says what was expected."""
    spec = DrafterSpec(
        2, tiny.CONFIG, 61, tiny.CONFIG, jnp.float32, {}, DrafterOptions(tree_depth=3)
    )
    with pytest.raises(InputError, match=r"at least tree_depth, 3; got 2"):
        make_drafter("model", spec)


def test_no_more_drafts_than_a_tree_has(tiny_pair):
    """Two children of the root, and two of each of the two best nodes of every later level."""
    options = DrafterOptions(tree_depth=3, tree_branches=2)
    spec = DrafterSpec(200, tiny.CONFIG, 61, tiny.CONFIG, jnp.float32, tiny_pair.draft, options)
    drafter = make_drafter("model", spec).drafter
    assert drafter.num_draft_tokens == drafter.shape.num_draft_tokens == 2 + 4 + 4
