"""Several drafts for one position, tried in turn: the rule `rejection` on a tree.

Draft i of a node is accepted with probability min(1, p_i(x) / q_i(x)). Here q_i is the distribution
from which it was drawn, given its earlier siblings; p_1 is the target's distribution at the node;
and p_(i+1) = norm(max(p_i - q_i, 0)) is what the target still lacks after a refusal. After the last
refusal the token is drawn from what is then lacking. Each step is speculative sampling by itself,
so the token follows the target's distribution, however many drafts there are.

With replacement, siblings are independent draws: multi-step speculative sampling (SpecInfer, Miao
et al., arXiv 2305.09781). Without, each is drawn from its distribution with the earlier siblings
taken out and the rest normalised, as by the Gumbel-top-k trick: recursive rejection sampling (Jeon
et al., arXiv 2402.14160; Yang et al., 2401.06706). Deterministic drafts, such as the most likely
tokens of EAGLE-2 (2406.16858), have all probability on the draft: together a node's children are
accepted with the probability that the target gives them.

Rules without chance keep the longest of the paths whose drafts are all accepted: Medusa's choice
among its candidates (arXiv 2401.10774, section 2.3.1). A draft is accepted or not by itself, as on
a chain. Of several longest paths the one that comes first in the block counts.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jspec.common.typing import RowCounts, RowSeeds, TargetProbs
from jspec.sampling.distribution import sample
from jspec.sampling.noise import AcceptanceNoise, Purpose, gumbel_noise, round_keys
from jspec.speculation.acceptance.chain import min_ratio, normalised_or, uniforms_of
from jspec.speculation.acceptance.tree import Tree, TreeRule, at_parents, end_of, kept_path, path_of
from jspec.speculation.types import Proposal, Verdict


class Trial(NamedTuple):
    """What decides about each draft: it is accepted with probability min(1, target / draft)."""

    target: Float32[Array, "b w"]
    draft: Float32[Array, "b w"]
    lacking: Float32[Array, "b t v"]  # at each slot, once all of its children are refused


TryFn = Callable[[TargetProbs, Proposal, Tree], Trial]


def try_all(target_probs: TargetProbs, proposal: Proposal, tree: Tree) -> Trial:
    """Tries all drafts of all nodes, as if every one before had been refused."""
    rows = jnp.arange(proposal.tokens.shape[0])
    if proposal.probs is None:
        return _try_certain(target_probs, proposal, tree)
    is_possible = is_candidate(proposal, tree)

    def try_draft(
        lacking: Float32[Array, "b t v"],
        drawn: tuple[RowCounts, RowCounts, Float32[Array, "b v"], Bool[Array, "b"]],
    ) -> tuple[Float32[Array, "b t v"], tuple[Array, Array]]:
        token, parent, draft, is_possible = drawn
        target = lacking[rows, parent]
        # Where rounding leaves nothing, the two distributions agree and the one before stays.
        rest = normalised_or(jnp.maximum(target - draft, 0.0), target)
        rest = jnp.where(is_possible[:, None], rest, target)
        weights = jnp.where(is_possible & (draft[rows, token] > 0), target[rows, token], 0.0)
        return lacking.at[rows, parent].set(rest), (weights, draft[rows, token])

    # One draft after another: each needs what its earlier siblings have left.
    operands = proposal.tokens.T, tree.parents.T, jnp.swapaxes(proposal.probs, 0, 1), is_possible.T
    lacking, (target, draft) = jax.lax.scan(try_draft, target_probs, operands)
    return Trial(target.T, draft.T, lacking)


def is_candidate(proposal: Proposal, tree: Tree) -> Bool[Array, "b w"]:
    """Returns which drafts may be accepted at all: neither padding nor NO_TOKEN."""
    return tree.is_real & (proposal.tokens >= 0)


def _try_certain(target_probs: TargetProbs, proposal: Proposal, tree: Tree) -> Trial:
    """Does the same for deterministic drafts: what they have taken are single probabilities."""
    tokens, is_possible = proposal.tokens, is_candidate(proposal, tree)
    rows = jnp.arange(tokens.shape[0])[:, None]
    target = target_probs[rows, tree.parents, tokens]
    # A token that was refused once has nothing left.
    is_same = tokens[:, :, None] == tokens[:, None, :]
    is_repeated = (tree.is_earlier_sibling & is_same).any(axis=-1)
    target = jnp.where(is_possible & ~is_repeated, target, 0.0)
    taken = jnp.sum(jnp.where(tree.is_earlier_sibling, target[:, None, :], 0.0), axis=-1)
    # Past the vocabulary's end: dropped.
    refused = jnp.where(is_possible, tokens, target_probs.shape[-1])
    lacking = target_probs.at[rows, tree.parents, refused].set(0.0, mode="drop")
    return Trial(target, jnp.maximum(1 - taken, 0.0), lacking)


def rest_at(
    target_probs: TargetProbs, lacking: Float32[Array, "b t v"], slot: RowCounts
) -> Float32[Array, "b v"]:
    """Returns the distribution of the next token after each row's slot: what is lacking there."""
    rows = jnp.arange(slot.shape[0])
    return normalised_or(lacking[rows, slot], target_probs[rows, slot])


def acceptance_probs(
    target_probs: TargetProbs, proposal: Proposal, tree: Tree, *, trial: TryFn = try_all
) -> Float32[Array, "b w"]:
    """Returns the probability that each draft is accepted, once those before it are refused."""
    tried = trial(target_probs, proposal, tree)
    return min_ratio(tried.target, tried.draft)


def end_probs_of(accept: Float32[Array, "b w"], tree: Tree) -> Float32[Array, "b t"]:
    """Returns the probability that the path ends at each slot, for rules that try siblings in turn.

    `accept` is the probability that each draft is accepted once its parent is kept and its earlier
    siblings are refused.
    """
    accept = jnp.where(tree.is_real, accept, 0.0)
    refused = 1 - accept
    earlier = jnp.where(tree.is_earlier_sibling, refused[:, None, :], 1.0)
    chosen = jnp.pad(accept * jnp.prod(earlier, axis=-1), ((0, 0), (1, 0)), constant_values=1.0)
    reached = jnp.prod(jnp.where(tree.mask, chosen[:, None, :], 1.0), axis=-1)
    is_child = tree.parents[:, None, :] == jnp.arange(tree.depths.shape[1])[:, None]
    return reached * jnp.prod(jnp.where(is_child, refused[:, None, :], 1.0), axis=-1)


def make_rule(trial: TryFn) -> TreeRule:
    """Returns the rule that tries siblings in turn, by what `trial` says of each child."""

    def end_probs(
        target_probs: TargetProbs, proposal: Proposal, tree: Tree
    ) -> Float32[Array, "b t"]:
        return end_probs_of(acceptance_probs(target_probs, proposal, tree, trial=trial), tree)

    def next_token_probs(
        target_probs: TargetProbs, proposal: Proposal, tree: Tree, slot: RowCounts
    ) -> Float32[Array, "b v"]:
        return rest_at(target_probs, trial(target_probs, proposal, tree).lacking, slot)

    def accept(
        target_probs: TargetProbs, proposal: Proposal, tree: Tree, noise: AcceptanceNoise
    ) -> Verdict:
        tried = trial(target_probs, proposal, tree)
        # Strictly: a draft that the target gives probability 0 is refused even at u = 0.
        path, num_accepted = kept_path(tree, uniforms_of(noise) * tried.draft < tried.target)
        distribution = rest_at(target_probs, tried.lacking, end_of(path, num_accepted))
        return Verdict(num_accepted, sample(distribution, noise.gumbel), path)

    return TreeRule(end_probs, next_token_probs, accept, tree_noise)


def tree_noise(
    seed: RowSeeds,
    position: RowCounts,
    tree: Tree,
    vocab_size: int,
    is_random: Bool[Array, ""],
    *,
    rank: Int32[Array, "b w"] | None = None,
) -> AcceptanceNoise:
    """Returns independent noise for a round: [b w] for its drafts, [b v] for the next token.

    A draft's uniform is keyed by its depth and by its `rank`, by default that among its siblings.
    No two drafts of one depth and rank are decided, as only one node of each depth is kept. A tree
    that is a chain takes the noise of a chain.
    """
    keys = round_keys(seed, position, Purpose.ACCEPT, tree.max_depth)
    keys = keys[jnp.arange(seed.shape[0])[:, None], tree.depths[:, 1:] - 1]
    if rank is None:
        rank = jnp.sum(tree.is_earlier_sibling, axis=-1, dtype=jnp.int32)

    def uniform(key: Array, rank: Array) -> Array:
        key = jnp.where(rank > 0, jax.random.fold_in(key, rank), key)
        return jax.random.uniform(key, [], jnp.float32)

    next_keys = round_keys(seed, position, Purpose.NEXT, 1)[:, 0]
    return AcceptanceNoise(
        jax.vmap(jax.vmap(uniform))(keys, rank), gumbel_noise(next_keys, vocab_size, is_random)
    )


RULE = make_rule(try_all)


def make_longest_rule(
    acceptance_probs: Callable[..., Array], next_token_probs: Callable[..., Array]
) -> TreeRule:
    """Returns the rule for trees of a rule for chains whose acceptance probabilities are 0 or 1.

    The two functions are the chain's; what they say of a draft depends on the distribution before
    it, and what they say of the next token on that after the last draft.
    """

    def last_slot(target_probs: TargetProbs, proposal: Proposal, tree: Tree) -> RowCounts:
        # Each draft beside the distribution at its parent, as if the drafts were a chain.
        is_accepted = acceptance_probs(at_parents(target_probs, tree), proposal) > 0
        is_accepted = jnp.pad(
            is_accepted & is_candidate(proposal, tree), ((0, 0), (1, 0)), constant_values=True
        )
        is_whole = ~(tree.mask & ~is_accepted[:, None, :]).any(axis=-1)
        return jnp.argmax(jnp.where(is_whole, tree.depths, -1), axis=-1).astype(jnp.int32)

    def end_probs(
        target_probs: TargetProbs, proposal: Proposal, tree: Tree
    ) -> Float32[Array, "b t"]:
        return jax.nn.one_hot(last_slot(target_probs, proposal, tree), tree.depths.shape[1])

    def next_token_probs_at(
        target_probs: TargetProbs, proposal: Proposal, tree: Tree, slot: RowCounts
    ) -> Float32[Array, "b v"]:
        return next_token_probs(target_probs, proposal, slot)

    def accept(
        target_probs: TargetProbs, proposal: Proposal, tree: Tree, noise: AcceptanceNoise
    ) -> Verdict:
        slot = last_slot(target_probs, proposal, tree)
        path, num_accepted = path_of(tree, slot)
        distribution = next_token_probs(target_probs, proposal, slot)
        return Verdict(num_accepted, sample(distribution, noise.gumbel), path)

    return TreeRule(end_probs, next_token_probs_at, accept, tree_noise)
