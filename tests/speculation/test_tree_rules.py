"""Rules for trees: traversal verification, K-SEQ, and the lossy ones."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linprog

from jspec.sampling.noise import AcceptanceNoise
from jspec.speculation.acceptance import (
    RuleOptions,
    block,
    get_rule,
    k_seq,
    siblings,
    traversal,
    tree,
)
from jspec.speculation.acceptance.chain import min_ratio, normalised_or
from jspec.speculation.types import Proposal, as_tree
from tests.cases import slow_unless
from tests.speculation import enumeration
from tests.speculation.enumeration import (
    NUM_TOKENS,
    all_counts,
    enumerate_paths,
    extend,
    joint_distribution,
    kept_probs,
    random_distributions,
)
from tests.speculation.test_trees import DRAWS, TABLES, TOLERANCE, VISIBLE, VOCAB, error
from tests.speculation.toys import softmax
from tests.speculation.tree_toys import (
    SHAPES,
    accept,
    end_probs,
    ends_and_probs,
    enumerate_tree,
    next_token_probs,
)

TRAVERSAL, RECURSIVE, K_SEQ = traversal.RULE, siblings.RULE, k_seq.RULE.tree
WIDE = {"wide": [-1, -1, 0, 0, 1, 1], **SHAPES}


@pytest.mark.parametrize(
    ("shape", "draw"),
    [
        slow_unless((s, d) in (("chain", "with"), ("bush", "without")), s, d)
        for s in SHAPES
        for d in DRAWS
    ],
)
@pytest.mark.parametrize("rule", [TRAVERSAL, K_SEQ], ids=["traversal", "k_seq"])
def test_rules_are_lossless(rule, shape, draw):
    """Jointly over three rounds, as for `rejection`: a whole subtree may have been refused."""
    assert error(rule, shape, draw) < TOLERANCE


@pytest.mark.parametrize("shape", ["siblings", "bush"])
@pytest.mark.parametrize("rule", [RECURSIVE, TRAVERSAL, K_SEQ], ids=["rejection", "block", "k_seq"])
def test_equal_siblings_are_tried_once(rule, shape):
    """Guards against a certain draft that is accepted again after it was refused.

    jspec's own drafters merge equal tokens under one parent; a user's own may not.
    """
    assert error(rule, shape, "twice") < TOLERANCE


def forgetting(target_probs, proposal, tree_):
    """The weights of the right rule, but after a refusal the target's own distribution goes on."""
    rows = jnp.arange(proposal.tokens.shape[0])[:, None]
    weights = jnp.ones(tree_.depths.shape)
    ratio = target_probs[rows, tree_.parents, proposal.tokens] / jnp.maximum(
        jnp.take_along_axis(proposal.probs, proposal.tokens[..., None], axis=2)[..., 0], 1e-30
    )
    for _ in range(tree_.max_depth):
        ratios = jnp.minimum(tree.at_parents(weights, tree_) * ratio, 1.0)
        weights = jnp.pad(ratios, ((0, 0), (1, 0)), constant_values=1.0)
    right = traversal.weigh(target_probs, proposal, tree_)[0]
    is_leaf = ~(tree_.parents[:, None] == jnp.arange(weights.shape[1])[:, None]).any(axis=-1)
    return jnp.where(is_leaf, weights, right)


def ends_of(weigh):
    """Returns `end_probs` of other weights."""

    def end_probs(target_probs, proposal, tree_):
        weights = weigh(target_probs, proposal, tree_)
        before = jnp.where(traversal.decided_before(tree_), 1 - weights[:, None, :], 1.0)
        return weights * jnp.prod(before, axis=-1)

    return end_probs


def rest_of_the_target(target_probs, proposal, tree_, slot):
    """The next token's distribution without the weight: norm(max(target - draft, 0))."""
    return RECURSIVE.next_token_probs(target_probs, proposal, tree_, slot)


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ("siblings", {"end_probs": ends_of(forgetting)}),
        ("bush", {"end_probs": ends_of(forgetting)}),
        ("chain", {"next_token_probs": rest_of_the_target}),
        ("bush", {"end_probs": RECURSIVE.end_probs}),
    ],
)
def test_a_forgotten_refusal_is_caught(shape, changes):
    """Negative controls: a subtree is refused, and what is lacking is not updated with it."""
    assert error(TRAVERSAL._replace(**changes), shape, "with") > VISIBLE


def as_prefix(rule):
    """Takes the kept drafts for the block's first ones, as if the path were a prefix."""

    def end_probs(target_probs, proposal, tree_):
        ends = rule.end_probs(target_probs, proposal, tree_)
        by_depth = tree_.depths[:, None, :] == jnp.arange(ends.shape[1])[:, None]
        return jnp.sum(jnp.where(by_depth, ends[:, None, :], 0.0), axis=-1)

    return rule._replace(end_probs=end_probs)


@pytest.mark.parametrize(
    "rule", [TRAVERSAL, slow_unless(False, RECURSIVE), slow_unless(False, K_SEQ)]
)
def test_kept_positions_as_a_prefix_are_caught(rule):
    """Negative control: a path of two drafts is not the block's first two."""
    assert error(as_prefix(rule), "bush", "with") > VISIBLE
    assert error(as_prefix(rule), "chain", "with") < TOLERANCE  # where it is right


def longest_alone(target_probs, proposal, tree_):
    """Two whole drafts of two tokens, each judged alone, as a chain; the longer one is kept."""
    rows = jnp.arange(proposal.tokens.shape[0])[:, None]
    drawn = jnp.take_along_axis(proposal.probs, proposal.tokens[..., None], axis=2)[..., 0]
    accept = min_ratio(target_probs[rows, tree_.parents, proposal.tokens], drawn).reshape(-1, 2, 2)
    is_one, is_two = accept[..., 0], accept[..., 0] * accept[..., 1]
    length = jnp.stack([1 - is_one, is_one - is_two, is_two], axis=-1)
    shorter = jnp.cumsum(length, axis=-1) - length
    first = length[:, 0] * (shorter + length)[:, 1]  # of equally long ones, the first
    second = length[:, 1] * shorter[:, 0]
    return jnp.concatenate([first, second[:, 1:]], axis=1)


def rest_of_one_draft(target_probs, proposal, tree_, slot):
    """As after a chain: where no draft is kept, what the first has left of the target."""
    target = target_probs[:, 0]
    alone = normalised_or(jnp.maximum(target - proposal.probs[:, 0], 0.0), target)
    others = RECURSIVE.next_token_probs(target_probs, proposal, tree_, slot)
    return jnp.where((slot == 0)[:, None], alone, others)


def test_the_longest_of_whole_drafts_is_caught(monkeypatch):
    """Negative control: each chain alone is lossless, and the longest of several is not."""
    monkeypatch.setitem(SHAPES, "whole", [-1, 0, -1, 2])
    naive = RECURSIVE._replace(end_probs=longest_alone, next_token_probs=rest_of_one_draft)
    assert error(naive, "whole", "with") > VISIBLE
    assert error(RECURSIVE, "whole", "with") < TOLERANCE
    assert error(K_SEQ, "whole", "with") < TOLERANCE


@pytest.mark.parametrize("kind", ["sampled", slow_unless(False, "deterministic")])
def test_on_a_chain_it_is_block_verification(kind):
    """The same probabilities and, by the same uniforms, the same verdicts; of fewer drafts, too."""
    rng = np.random.default_rng(2)
    target, draft = (random_distributions(rng, (3,) * 3, zeros=0.2) for _ in range(2))
    paths = enumerate_paths(target, draft, 3, kind, counts_of=all_counts)
    proposal = as_tree(paths.proposal)
    is_drawn = paths.weights > 0
    ends = end_probs(TRAVERSAL, paths.target_probs, proposal)
    expected = kept_probs(block.RULE, paths)
    np.testing.assert_allclose(ends[is_drawn], expected[is_drawn], atol=1e-6)
    for kept in range(4):
        counts = jnp.full(len(paths.index), kept, jnp.int32)
        mine = next_token_probs(TRAVERSAL, paths.target_probs, proposal, counts)
        theirs = enumeration.next_token_probs(
            block.RULE, paths.target_probs, paths.proposal, counts
        )
        is_reached = is_drawn & (expected[:, kept] > 1e-4)
        np.testing.assert_allclose(mine[is_reached], theirs[is_reached], atol=1e-5)
    noise = AcceptanceNoise(
        jnp.asarray(rng.uniform(size=(len(paths.index), 3)), jnp.float32),
        jnp.asarray(rng.gumbel(size=(len(paths.index), 3)), jnp.float32),
    )
    on_tree = accept(TRAVERSAL, paths.target_probs, proposal, noise)
    on_chain = jax.jit(block.accept)(paths.target_probs, paths.proposal, noise)
    for name in ("num_accepted", "next_token"):
        ours, theirs = getattr(on_tree, name), getattr(on_chain, name)
        np.testing.assert_array_equal(np.asarray(ours)[is_drawn], np.asarray(theirs)[is_drawn])


def accepted(rule, tables, shape, draw):
    """Returns how many drafts are kept on average in each context."""
    emitted = enumerate_tree(rule, *tables, WIDE[shape], draw)
    return sum((m - 1) * out.reshape(len(out), -1).sum(axis=1) for m, out in emitted.items())


def random_tables(seed):
    rng = np.random.default_rng(seed)
    return [random_distributions(rng, (VOCAB,) * 3, zeros=0.1) for _ in range(2)]


@pytest.mark.parametrize(
    ("shape", "draw"),
    [
        slow_unless(s == "bush" and d == "without", s, d)
        for s in ("chain", "siblings", "bush", "wide", "comb")
        for d in DRAWS
    ],
)
def test_traversal_keeps_at_least_as_many_as_rejection(shape, draw):
    """Guards against a lossless rule that gains nothing: in each of 18 random contexts."""
    gains = np.concatenate([
        accepted(TRAVERSAL, tables, shape, draw) - accepted(RECURSIVE, tables, shape, draw)
        for tables in map(random_tables, range(2))
    ])  # fmt: skip
    assert gains.min() > -1e-6
    if draw == "least" or shape == "siblings":
        assert gains.max() < 2e-6  # the same rule
    else:
        assert (gains > 1e-3).mean() > 0.2


def statistic(rule, noise_of):
    """Returns the chi-square of 4,000 verdicts on one tree, of 6 degrees of freedom."""
    parents, rng, n = WIDE["wide"], np.random.default_rng(9), 4_000
    spread = lambda x: jnp.broadcast_to(x, (n, *x.shape))  # noqa: E731
    tokens = np.array([0, 1, 2, 1, 0, 2])
    # Likelier drafts than the target finds them: hardly one is sure to be kept.
    draft = 0.2 * np.eye(VOCAB)[tokens] + 0.8 * rng.dirichlet([8.0] * VOCAB, 6)
    draft[[1, 3, 5]] = draft[[0, 2, 4]] = (draft[[0, 2, 4]] + draft[[1, 3, 5]]) / 2  # siblings'
    proposal = Proposal(
        spread(jnp.asarray(tokens, jnp.int32)),
        jnp.full(n, 6, jnp.int32),
        spread(jnp.asarray(draft, jnp.float32)),
        parents=spread(jnp.asarray(parents, jnp.int32)),
        max_depth=2,
    )
    probs = spread(jnp.asarray(rng.dirichlet([8.0] * VOCAB, 7), jnp.float32))
    ends, expected = ends_and_probs(rule, noise_of, probs, proposal)
    expected = n * expected[0].astype(np.float64)
    counts = np.bincount(ends, minlength=7)
    assert (counts[expected == 0] == 0).all()
    is_possible = expected > 0
    return ((counts - expected)[is_possible] ** 2 / expected[is_possible]).sum()


@pytest.mark.parametrize(
    "rule", [RECURSIVE, TRAVERSAL, K_SEQ], ids=["rejection", "traversal", "k_seq"]
)
def test_verdicts_follow_the_probabilities(rule):
    """`accept` keeps paths as often as `end_probs` says; false alarm 1e-6."""
    assert statistic(rule, rule.noise) < 40


def test_cousins_that_share_their_uniforms_are_caught():
    """Negative control: keyed by the rank among siblings, cousins' verdicts are not independent."""
    assert statistic(TRAVERSAL, siblings.tree_noise) > 40


def test_a_path_that_the_target_never_says_is_refused_at_u_zero():
    """A draft of probability 0 on the path, whatever comes after it."""
    target = jnp.array([[[0.0, 0.5, 0.5], [1.0, 0.0, 0.0], [0.3, 0.3, 0.4]]])
    probs = jnp.array([[[0.5, 0.5, 0.0], [0.1, 0.8, 0.1]]])
    for tokens, draft in itertools.product(([0, 0], [1, 1]), (probs, None)):
        proposal = as_tree(Proposal(jnp.array([tokens], jnp.int32), jnp.array([2]), draft))
        noise = AcceptanceNoise(jnp.zeros([1, 2]), jnp.zeros([1, 3]))
        verdict = accept(TRAVERSAL, target, proposal, noise)
        assert int(verdict.num_accepted[0]) == (0 if tokens[0] == 0 else 1)
        assert int(verdict.next_token[0]) != tokens[int(verdict.num_accepted[0])]


# K-SEQ, and the best rule there is.


def one_position(rule, target, draft, number):
    """Returns the probability that one of `number` independent drafts is accepted."""
    tokens = np.array(list(itertools.product(range(len(target)), repeat=number)))
    n, weights = len(tokens), np.prod(draft[tokens], axis=1)
    proposal = Proposal(
        jnp.asarray(tokens, jnp.int32),
        jnp.full(n, number, jnp.int32),
        jnp.broadcast_to(jnp.asarray(draft, jnp.float32), (n, number, len(draft))),
        parents=jnp.full((n, number), -1, jnp.int32),
        max_depth=1,
    )
    probs = jnp.broadcast_to(jnp.asarray(target, jnp.float32), (n, number + 1, len(target)))
    ends = np.asarray(end_probs(rule, probs, proposal), np.float64)
    return weights @ ends[:, 1:].sum(axis=1)


def optimal_transport(target, draft, number):
    """Returns the most that any rule accepts: a linear program over tuples and tokens (SpecTr)."""
    v = len(target)
    tuples = list(itertools.product(range(v), repeat=number))
    mass = [np.prod(draft[list(one)]) for one in tuples]
    cost = np.array([[-float(y in one) for y in range(v)] for one in tuples])
    rows = np.kron(np.eye(len(tuples)), np.ones(v))
    columns = np.kron(np.ones(len(tuples)), np.eye(v))
    actual = linprog(cost.ravel(), A_eq=np.vstack([rows, columns]), b_eq=[*mass, *target])
    return -actual.fun


@pytest.mark.parametrize("number", [slow_unless(False, 1), 2, slow_unless(False, 3)])
def test_no_rule_accepts_more_than_the_optimal_transport(number):
    """And K-SEQ at least 1 - 1/e of it; with one draft all are `rejection`."""
    rng, shares = np.random.default_rng(5), []
    for _ in range(8):
        target, draft = random_distributions(rng, (2, 4), 0.7, zeros=0.1)
        best = optimal_transport(target, draft, number)
        for rule in (K_SEQ, RECURSIVE):
            share = one_position(rule, target, draft, number) / best
            assert share < 1 + 1e-5
            assert share > 1 - np.exp(-1) or rule is RECURSIVE
            shares.append(share)
            if number == 1:
                np.testing.assert_allclose(share * best, np.minimum(target, draft).sum(), atol=1e-6)
    assert number == 1 or min(shares) < 1 - 1e-4  # the yardstick measures something


def test_the_threshold_is_the_smallest_one():
    """A tenth less and the residual is negative somewhere: such a rule is not lossless."""
    target, draft = (np.float32(softmax(table)) for table in TABLES)

    def eager(target_probs, proposal, built):
        trial = k_seq.try_all(target_probs, proposal, built)
        return trial._replace(draft=0.9 * trial.draft)

    assert error(siblings.make_rule(eager), "siblings", "with") > VISIBLE
    number = jnp.full(VOCAB**2, 3)
    rho, gain = k_seq.threshold(
        *(jnp.asarray(x.reshape(1, -1, VOCAB)) for x in (target, draft)), number[None]
    )
    assert (rho >= 1).all()
    assert (rho <= 3).all()
    np.testing.assert_allclose(gain, rho, atol=1e-5)


# The lossy rules.


def tree_proposal(parents, tokens, depth):
    return Proposal(
        jnp.array([tokens], jnp.int32),
        jnp.array([len(tokens)]),
        parents=jnp.array([parents], jnp.int32),
        max_depth=depth,
    )


def test_the_longest_typical_path_wins():
    """The first branch ends after one draft; the second one has two."""
    target = jnp.array([[[0.5, 0.4, 0.1], [0.0, 0.0, 1.0], [0.05, 0.9, 0.05], [0.3, 0.3, 0.4],
                         [0.2, 0.2, 0.6]]])  # fmt: skip
    proposal = tree_proposal([-1, -1, 0, 1], [0, 1, 0, 1], 2)
    rule = get_rule("typical").tree
    noise = AcceptanceNoise(jnp.zeros([1, 4]), jnp.zeros([1, 3]))
    verdict = accept(rule, target, proposal, noise)
    assert (verdict.path.tolist(), verdict.num_accepted.tolist()) == ([[0, 2, 4]], [2])
    assert verdict.next_token.tolist() == [2]
    shorter = proposal.replace(tokens=jnp.array([[0, 1, 0, 0]], jnp.int32))
    verdict = accept(rule, target, shorter, noise)
    assert verdict.path[0, :2].tolist() == [0, 1]  # of two equally long ones, the first
    assert (verdict.num_accepted.tolist(), verdict.next_token.tolist()) == ([1], [2])


@pytest.mark.parametrize("name", ["typical", "lenient_argmax"])
def test_a_chain_is_judged_as_before(name):
    """Guards against a tree's distribution that is that of another slot."""
    rng = np.random.default_rng(6)
    target = jnp.asarray(rng.dirichlet([0.4] * 5, (300, 4)), jnp.float32)
    tokens = jnp.argmax(target[:, :3], axis=-1).astype(jnp.int32)
    tokens = jnp.where(rng.uniform(size=tokens.shape) < 0.8, tokens, 1)
    proposal = Proposal(tokens, jnp.asarray(rng.integers(0, 4, 300), jnp.int32))
    rule, branch = get_rule(name, RuleOptions(lenience=0.3)), as_tree(proposal)
    noise = AcceptanceNoise(
        jnp.zeros([300, 3]), jnp.asarray(rng.gumbel(size=(300, 5)), jnp.float32)
    )
    chain = jax.jit(rule.accept)(target, proposal, noise)
    verdict = accept(rule.tree, target, branch, noise)
    np.testing.assert_array_equal(verdict.num_accepted, chain.num_accepted)
    np.testing.assert_array_equal(verdict.next_token, chain.next_token)
    assert len(set(chain.num_accepted.tolist())) == 4


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("lenience", [0.6, 0.2])
def test_no_token_comes_with_more_than_its_share(lenience, draw):
    """The bound target / l over three rounds holds on a tree, too; and more drafts are kept."""
    tables = random_tables(7)
    rule = get_rule("lenient", RuleOptions(lenience=lenience)).tree
    emitted = enumerate_tree(rule, *tables, SHAPES["bush"], draw)
    joint = joint_distribution(emitted, tables[0], (1, 2))
    for n in range(NUM_TOKENS):
        before, after = (joint.sum(axis=tuple(range(m, NUM_TOKENS))) for m in (n, n + 1))
        assert (after <= extend(before, tables[0], n, (1, 2)) / lenience + 1e-6).all()
    gains = accepted(rule, tables, "bush", draw) - accepted(RECURSIVE, tables, "bush", draw)
    assert gains.min() > -1e-6
    assert gains.max() > 0.01


def test_normalised_residuals_sum_to_one():
    """K-SEQ's residual of equal distributions is nothing: the target's own is taken."""
    same = jnp.array([[0.25, 0.75, 0.0]])
    np.testing.assert_array_equal(normalised_or(jnp.zeros([1, 3]), same), same)
    proposal = tree_proposal([-1, -1], [0, 1], 1).replace(probs=jnp.broadcast_to(same, (1, 2, 3)))
    built = tree.tree_of(proposal)
    target = jnp.broadcast_to(same, (1, 3, 3))
    ends = jax.jit(K_SEQ.end_probs)(target, proposal, built)
    np.testing.assert_allclose(ends, [[0, 1, 0]], atol=1e-6)
