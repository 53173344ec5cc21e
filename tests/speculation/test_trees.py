"""Tree verification: lossless by enumeration, the same text as plain decoding, and its caches.

Then trees as others got them wrong: each mistake changes the text, and is seen by it. Under
`coupled` the text is that of plain decoding, also with penalties, so a wrong slot, position, mask
or state of a processor shows as another text. What only the drafts' distributions can get wrong is
enumerated.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.common.errors import InputError
from jspec.generation.request import SamplingParams
from jspec.lab.auditing import controls
from jspec.sampling.settings import process_drafts
from jspec.speculation import round as step
from jspec.speculation.acceptance import RULES, get_rule, siblings, traversal, tree
from jspec.speculation.types import Proposal
from tests.cases import slow_unless
from tests.speculation.drive import Engine, emitted_in_row, request_settings
from tests.speculation.enumeration import joint_distribution, target_joint
from tests.speculation.toys import make_tables, softmax, toy_cache
from tests.speculation.tree_toys import (
    SHAPES,
    ToyTreeDrafter,
    depth_of,
    enumerate_tree,
    tree_apply,
)

VOCAB = 3
TABLES = make_tables(seed=6, vocab=VOCAB)
TOLERANCE, VISIBLE = 1e-6, 1e-3
DRAWS = ["with", "without", "least"]


def error(rule, shape, draw, **report):
    """Returns how far the joint distribution of three rounds is from the target's, at most."""
    target, draft = (np.float32(softmax(table)).astype(np.float64) for table in TABLES)
    emitted = enumerate_tree(rule, target, draft, SHAPES[shape], draw, **report)
    total = sum(probs.reshape(VOCAB**2, -1).sum(axis=1) for probs in emitted.values())
    np.testing.assert_allclose(total, 1, atol=2e-6)
    starts = [(0, 0), (1, 2), (2, 1)]
    return max(
        np.abs(joint_distribution(emitted, target, start) - target_joint(target, start)).max()
        for start in starts
    )


@pytest.mark.parametrize(
    ("shape", "draw"),
    [slow_unless(s != "bush" or d == "without", s, d) for s in SHAPES for d in DRAWS],
)
def test_siblings_are_lossless(shape, draw):
    """Guards against a residual that is not updated, and a bias from the second round on."""
    assert error(siblings.RULE, shape, draw) < TOLERANCE


def as_if_sampled(target_probs, proposal, tree_):
    """Scores every child by its own ratio to the target, as if the earlier ones were not there."""
    rows = jnp.arange(proposal.tokens.shape[0])[:, None]
    target = target_probs[rows, tree_.parents, proposal.tokens]
    draft = jnp.take_along_axis(proposal.probs, proposal.tokens[..., None], axis=2)[..., 0]
    return siblings.end_probs_of(jnp.minimum(target / jnp.maximum(draft, 1e-30), 1.0), tree_)


def test_a_stale_residual_is_caught():
    """Negative control: every child compared with the target's own distribution."""
    assert error(siblings.RULE._replace(end_probs=as_if_sampled), "siblings", "without") > VISIBLE


@functools.cache
def engine_of(rule, shapes, draw):
    """Returns the compiled rounds; rows and temperatures are data, or few."""
    drafter = ToyTreeDrafter(shapes, draw)
    return Engine(tree_apply, toy_cache, TABLES, drafter, rule, capacity=64)


def run(rule, shapes, draw="best", temperature=1.0, **options):
    """Returns the result of rows with their own seeds, by rounds with trees."""
    engine = engine_of(rule, tuple(map(tuple, shapes)), draw)
    return engine.generate([[0, 1, 2]] * 6, temperature=temperature, **options)


@functools.cache
def plain_engine():
    return Engine(tree_apply, toy_cache, TABLES, capacity=64)


@functools.cache
def plain(temperature):
    return plain_engine().generate([[0, 1, 2]] * 6, temperature=temperature).tokens


@pytest.mark.parametrize(
    ("rule", "temperature", "draw"),
    [
        slow_unless((rule, draw) == ("coupled", "without"), rule, temperature, draw)
        for rule, temperature in [
            ("greedy", 0.0), ("rejection", 0.0), ("block", 0.0), ("coupled", 0.0), ("coupled", 1.0)
        ]
        for draw in ("best", "without")
    ],
)  # fmt: skip
def test_the_text_is_that_of_plain_decoding(rule, temperature, draw):
    """Invariants 2 and 5 on trees that differ by row and round, up to the context limit.

    The slow ones add more rules that match tokens at temperature 0, and drafts without
    distributions, which `coupled` never reads.
    """
    result = run(rule, SHAPES.values(), draw, temperature)
    assert result.tokens == plain(temperature)
    assert result.num_accepted.max() == max(map(depth_of, SHAPES.values()))


@pytest.mark.parametrize("rule", ["rejection", slow_unless(False, "block")])
def test_a_row_does_not_depend_on_its_company(rule):
    """One's own tree, and noise that is keyed by depth and rank."""
    seeds = np.arange(6)
    together = run(rule, [SHAPES["bush"]], "without", seeds=seeds)
    moved = run(rule, [SHAPES["bush"]], "without", seeds=seeds[::-1])
    assert moved.tokens == together.tokens[::-1]
    assert len(set(map(tuple, moved.tokens))) == 6


class AsChain(ToyTreeDrafter):
    """Says that its tree of one branch is a chain."""

    def propose(self, params, state, inputs):
        proposal, state = super().propose(params, state, inputs)
        return proposal.replace(parents=None, max_depth=0), state


@pytest.mark.parametrize(
    ("rule", "draw"),
    [
        slow_unless((rule, draw) == ("block", "with"), rule, draw)
        for rule in ("rejection", "block", "k_seq", "coupled")
        for draw in ("best", "with")
    ],
)
def test_a_tree_that_is_a_chain_is_the_chain(rule, draw):
    """Guards against a one-node tree that differs from the one-token chain."""

    chain = AsChain((tuple(SHAPES["chain"]),), draw)
    engine = Engine(tree_apply, toy_cache, TABLES, chain, rule, capacity=64)
    expected = engine.generate([[0, 1, 2]] * 6, temperature=1.0)
    result = run(rule, [SHAPES["chain"]], draw)
    assert result.tokens == expected.tokens
    np.testing.assert_array_equal(result.num_accepted, expected.num_accepted)


def proposal_of(parents, num_tokens=None):
    parents = np.asarray([parents], np.int32)
    count = parents.shape[1] if num_tokens is None else num_tokens
    tokens = jnp.asarray(np.arange(parents.shape[1], dtype=np.int32)[None])
    return Proposal(tokens, jnp.array([count]), parents=jnp.asarray(parents), max_depth=count)


@pytest.mark.parametrize(
    ("parents", "message"),
    [([[-1, 0, 0], [-1, 1, 0]], "from -1 to 0 for draft 1 of row 1; got 1"),
     ([[-2, 0, 0], [-1, 0, 0]], "from -1 to -1 for draft 0 of row 0; got -2"),
     ([[-1, 0, 1], [-1, 0, 0]], "a tree of depth 2 at most of row 0, got 3")],
)  # fmt: skip
def test_parents_come_before_their_children(parents, message):
    """In one line with the first wrong parent, or a tree too deep; padding may be anything."""
    tokens, counts = jnp.zeros([2, 3], jnp.int32), jnp.array([3, 2], jnp.int32)
    wrong = Proposal(tokens, counts, parents=jnp.array(parents, jnp.int32), max_depth=2)
    with pytest.raises(InputError, match=message):
        tree.tree_of(wrong)
    tree.tree_of(wrong.replace(parents=jnp.array([[-1, 0, 0], [-1, 0, 9]], jnp.int32)))


def test_masks_and_depths():
    """The picture in `acceptance.tree`, and padding, which hangs on the root."""
    actual = jax.jit(tree.tree_of)(proposal_of([-1, -1, 0, 0, 2]))
    assert actual.depths.tolist() == [[0, 1, 1, 2, 2, 3]]
    paths = [np.flatnonzero(row).tolist() for row in np.asarray(actual.mask[0])]
    assert paths == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 1, 3, 5]]
    padded = jax.jit(tree.tree_of)(proposal_of([-1, 0, 1, 2], num_tokens=2))
    assert padded.depths.tolist() == [[0, 1, 2, 1, 1]]


@pytest.mark.parametrize("depth", [1, 5])
def test_masks_of_long_chains(depth):
    """Guards against too few squarings."""
    actual = jax.jit(tree.tree_of)(proposal_of(list(range(-1, depth - 1))))
    np.testing.assert_array_equal(actual.mask[0], np.tril(np.ones((depth + 1, depth + 1), bool)))


def test_rules_for_trees():
    """The docs say that every rule is one for trees."""
    assert [name for name in RULES if get_rule(name).tree is None] == []


def test_nothing_is_moved_where_the_first_branch_is_kept():
    """A path that lies in order already costs nothing; any other is moved, once."""
    cache = toy_cache(2, 16)
    keys = jnp.arange(10, dtype=jnp.float32).reshape(2, 5, 1, 1)
    cache = cache.write(keys, keys)
    path = jnp.array([[0, 1, 2], [0, 2, 4]])
    moved = jax.jit(lambda cache, path: cache.commit(jnp.array([3, 3]), path))(cache, path)
    assert np.asarray(moved.keys[0][:, 0, :3, 0]).tolist() == [[0, 1, 2], [5, 7, 9]]


# Trees as others got them wrong.

PENALTIES = SamplingParams(
    temperature=1.0, repetition_penalty=1.6, presence_penalty=0.7, frequency_penalty=0.5
)
ROWS, CAPACITY = 12, 48


def texts(drafter, rule="coupled", apply=tree_apply):
    """Returns the tokens of rows with their own seeds, with penalties."""
    engine = Engine(apply, toy_cache, TABLES, drafter, rule, capacity=CAPACITY)
    prompts = [[0, 1, 2]] * ROWS
    state = engine.start(prompts, temperature=1.0)
    first = state.last_token
    state = state.replace(settings=request_settings(PENALTIES, prompts, VOCAB))
    _, infos = engine.advance(state, 96)
    return [[int(first[row]), *emitted_in_row(infos, row)] for row in range(ROWS)]


@functools.cache
def plain_with_penalties():
    return texts(None)


TREES = ToyTreeDrafter((tuple(SHAPES["bush"]), tuple(SHAPES["comb"])), "best")


def as_a_chain(logits, settings, drafts, parents=None):
    """A sibling's token counts, too: the processors' state is that of the draft before."""
    return process_drafts(logits, settings, drafts)


def without_a_bonus(logits, settings, drafts, parents=None):
    """The distribution after the last draft of a path is left as the model gave it."""
    slots = jnp.arange(logits.shape[1])
    is_leaf = ~(parents[:, None, :] == slots[:, None]).any(axis=-1)
    return jnp.where(is_leaf[..., None], logits, process_drafts(logits, settings, drafts, parents))


def test_the_text_with_penalties_is_that_of_plain_decoding():
    """What the controls change is right without them."""
    assert texts(TREES) == plain_with_penalties()


@pytest.mark.parametrize(
    "wrong",
    [as_a_chain, slow_unless(False, without_a_bonus)],
    ids=["a sibling's penalties", "bonus unprocessed"],
)
def test_a_wrong_round_is_caught(wrong, monkeypatch):
    """Negative controls in the step itself."""
    monkeypatch.setattr(step, "process_drafts", wrong)
    assert texts(TREES) != plain_with_penalties()


@pytest.mark.parametrize(
    "name", [slow_unless(n == "siblings seen", n) for n in controls.CALL_CONTROLS]
)
def test_a_wrong_call_is_caught(name):
    """Negative controls around the target, those of the audit."""
    assert texts(TREES, apply=controls.CALL_CONTROLS[name](tree_apply)) != plain_with_penalties()


@pytest.mark.parametrize(
    "change", [controls.keeping_a_prefix, slow_unless(False, controls.keeping_all)]
)
def test_a_wrong_verdict_is_caught(change):
    """Negative controls: the block's first drafts in place of a path, or its deepest draft."""
    assert texts(TREES, change(get_rule("coupled"))) != plain_with_penalties()


@pytest.mark.slow
def test_a_tree_of_one_node_with_noise_of_its_own_is_caught():
    """Negative control of the noise that a chain and its tree share."""

    def shifted(seed, position, *rest):
        return siblings.tree_noise(seed, position + 1, *rest)

    def first_nodes(rule, is_tree):
        drafter = (ToyTreeDrafter if is_tree else AsChain)((tuple(SHAPES["one"]),), "with")
        engine = Engine(tree_apply, toy_cache, TABLES, drafter, rule, capacity=CAPACITY)
        return engine.generate([[0, 1, 2]] * ROWS, temperature=1.0).tokens

    rule = get_rule("rejection")
    expected = first_nodes(rule, is_tree=False)
    assert first_nodes(rule, is_tree=True) == expected
    mistaken = rule._replace(tree=rule.tree._replace(noise=shifted))
    assert first_nodes(mistaken, is_tree=True) != expected


@pytest.mark.parametrize(
    ("rule", "draw"),
    [
        slow_unless(
            (rule, draw) in ((siblings.RULE, "with"), (traversal.RULE, "without")), rule, draw
        )
        for rule in (siblings.RULE, traversal.RULE)
        for draw in DRAWS
    ],
)
def test_misreported_drafts_are_caught(rule, draw):
    """Negative control: certain children scored as drawn, or another replacement than the true."""
    report = functools.partial(controls.misreported, vocab_size=VOCAB)
    assert error(rule, "siblings", draw) < TOLERANCE
    assert error(rule, "siblings", draw, report=report) > VISIBLE
