"""Traversal verification (Weng et al., arXiv 2505.12398): the rule `block` on a tree.

Whole paths are judged, from the leaves up. A slot of the block has a weight p, the probability with
which its path is to be kept, and a distribution r of the token after it. At first the root has
p = 1, and r is the target's distribution everywhere. The first child x of a slot, drawn from q, has
the weight min(1, p · r(x) / q(x)), and everything below x is decided before x itself. If all of it
is refused, and x too, the slot goes on with what is lacking:

  S = sum of max(p · r - q, 0),  p <- S / (S + 1 - p),  r <- max(p · r - q, 0) / S,

and so with its next child. With no child left it is kept with probability p, and the next token
is drawn from r. If it is refused as well, its parent goes on. The root, with p = 1, never is.

Why it is exact: a slot and all below it are refused with probability 1 - p, and what is emitted
otherwise begins with y with probability p · r(y) and goes on as the target does. That holds without
children. With one child: x is drawn and kept with probability q(x) · min(1, p · r(x) / q(x)) =
min(q(x), p · r(x)). All is refused with probability 1 - p + S, so y still has to come with
probability max(p · r - q, 0)(y) / (S + 1 - p) given that: the new p times the new r. Neither
depends on x, so the next child may be drawn with replacement or without. On a chain this is
block verification. For deterministic drafts it keeps each path as often as `rejection` does.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from jspec.common.typing import RowCounts, RowSeeds, TargetProbs
from jspec.sampling.distribution import sample
from jspec.sampling.noise import AcceptanceNoise
from jspec.speculation.acceptance.chain import min_ratio, normalised_or, uniforms_of
from jspec.speculation.acceptance.siblings import is_candidate, rest_at, tree_noise, try_all
from jspec.speculation.acceptance.tree import Tree, TreeRule, at_parents, path_of
from jspec.speculation.types import Proposal, Verdict

_Weights = tuple[Float32[Array, "b t"], Float32[Array, "b t v"]]


def weigh(target_probs: TargetProbs, proposal: Proposal, tree: Tree) -> _Weights:
    """Returns p and r of every slot, once all of its children are refused.

    They depend on the drafts alone, not on how they are decided: the whole tree is weighed at once.
    """
    if proposal.probs is None:
        return _weigh_certain(target_probs, proposal, tree)
    rows = jnp.arange(proposal.tokens.shape[0])
    is_possible = is_candidate(proposal, tree)

    def weigh_draft(
        carry: _Weights,
        drawn: tuple[RowCounts, RowCounts, RowCounts, Float32[Array, "b v"], Bool[Array, "b"]],
    ) -> tuple[_Weights, None]:
        (weights, lacking), (slot, token, parent, draft, is_possible) = carry, drawn
        before, distribution = weights[rows, parent], lacking[rows, parent]
        target = before[:, None] * distribution
        draft = jnp.where(draft > 0, draft, 0.0)  # NaN counts as a draft that was never possible
        rest = jnp.maximum(target - draft, 0.0)
        # Where rounding leaves nothing, draft and target agree and the distribution stays.
        distribution = jnp.where(
            is_possible[:, None], normalised_or(rest, distribution), distribution
        )
        after = jnp.where(is_possible, _after_refusal(before, jnp.sum(rest, axis=-1)), before)
        weight = min_ratio(target[rows, token], draft[rows, token])
        weight = jnp.where(is_possible & (draft[rows, token] > 0), weight, 0.0)
        weights = weights.at[rows, parent].set(after).at[rows, slot].set(weight)
        return (weights, lacking.at[rows, parent].set(distribution)), None

    slots = jnp.broadcast_to(jnp.arange(1, proposal.width + 1)[:, None], tree.parents.T.shape)
    operands = (
        slots, proposal.tokens.T, tree.parents.T, jnp.swapaxes(proposal.probs, 0, 1), is_possible.T,
    )  # fmt: skip
    # In the block's order: each draft needs what its parent's earlier children have left.
    start = jnp.ones(tree.depths.shape), target_probs
    return jax.lax.scan(weigh_draft, start, operands)[0]


def _after_refusal(
    weight: Float32[Array, "..."], rest: Float32[Array, "..."]
) -> Float32[Array, "..."]:
    """Returns S / (S + 1 - p) of p and S, and 1 where p is 1, even if nothing is left."""
    left = jnp.where(weight < 1, rest + (1 - weight), 1.0)
    return jnp.where(weight < 1, min_ratio(rest, left), 1.0)


def _weigh_certain(target_probs: TargetProbs, proposal: Proposal, tree: Tree) -> _Weights:
    """Does the same for deterministic drafts: what they have taken are single probabilities."""
    trial = try_all(target_probs, proposal, tree)  # the target's probability, 1 - that of earlier
    weights = jnp.ones(tree.depths.shape)
    for _ in range(tree.max_depth):  # one level more is right after every pass
        above = at_parents(weights, tree)
        path_weights = min_ratio(above * trial.target, 1 - above * (1 - trial.draft))
        weights = jnp.pad(path_weights, ((0, 0), (1, 0)), constant_values=1.0)
    is_child = tree.parents[:, None, :] == jnp.arange(tree.depths.shape[1])[:, None]
    taken = jnp.sum(jnp.where(is_child, trial.target[:, None, :], 0.0), axis=-1)
    return _after_refusal(weights, weights * (1 - taken)), trial.lacking


def decided_before(tree: Tree) -> Bool[Array, "b t t"]:
    """Returns [i, j], whether slot j is decided before slot i: leaves first, left to right."""
    mask = tree.mask.astype(jnp.float32)
    is_earlier = jnp.pad(tree.is_earlier_sibling, ((0, 0), (1, 0), (1, 0))).astype(jnp.float32)
    # Either j is below i, or their paths part at siblings of which that of j comes first.
    left = jnp.einsum("bia,bac,bjc->bij", mask, is_earlier, mask, precision="highest")
    is_left = left > 0
    is_below = tree.mask.swapaxes(1, 2) & ~jnp.eye(mask.shape[1], dtype=bool)
    return is_left | is_below


def end_probs(target_probs: TargetProbs, proposal: Proposal, tree: Tree) -> Float32[Array, "b t"]:
    """Returns the probability that the kept path ends at each slot; see `TreeRule`."""
    weights = weigh(target_probs, proposal, tree)[0]
    return weights * jnp.prod(
        jnp.where(decided_before(tree), 1 - weights[:, None, :], 1.0), axis=-1
    )


def next_token_probs(
    target_probs: TargetProbs, proposal: Proposal, tree: Tree, slot: RowCounts
) -> Float32[Array, "b v"]:
    """Returns r at each row's slot, after all of its children are refused."""
    return rest_at(target_probs, weigh(target_probs, proposal, tree)[1], slot)


def accept(
    target_probs: TargetProbs, proposal: Proposal, tree: Tree, noise: AcceptanceNoise
) -> Verdict:
    """Keeps the first slot that is good enough, by uniforms [b w]; draws by Gumbel noise [b v]."""
    weights, lacking = weigh(target_probs, proposal, tree)
    # Strictly below: a path with p = 0 is never kept, not even at u = 0. The root always is.
    is_good = uniforms_of(noise) < weights[:, 1:]
    is_good = jnp.pad(is_good, ((0, 0), (1, 0)), constant_values=True)
    is_first = ~(decided_before(tree) & is_good[:, None, :]).any(axis=-1)
    slot = jnp.argmax(is_good & is_first, axis=-1).astype(jnp.int32)
    path, num_accepted = path_of(tree, slot)
    return Verdict(num_accepted, sample(rest_at(target_probs, lacking, slot), noise.gumbel), path)


def _noise(
    seed: RowSeeds, position: RowCounts, tree: Tree, vocab_size: int, is_random: Bool[Array, ""]
) -> AcceptanceNoise:
    # Whole subtrees are decided, so that cousins meet in one round: a draft's rank is that among
    # all drafts of its depth. A refused subtree's noise has decided something; it is never used
    # again, as the next round is keyed by its own first position, which is later.
    is_same = tree.depths[:, 1:, None] == tree.depths[:, None, 1:]
    is_same &= jnp.tri(tree.parents.shape[1], k=-1, dtype=bool) & tree.is_real[:, None, :]
    rank = jnp.sum(is_same, axis=-1, dtype=jnp.int32)
    return tree_noise(seed, position, tree, vocab_size, is_random, rank=rank)


RULE = TreeRule(end_probs, next_token_probs, accept, _noise)
