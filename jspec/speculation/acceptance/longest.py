"""Rules without chance on a tree: of the paths whose drafts are all accepted, the longest is kept.

Medusa's choice among its candidates (arXiv 2401.10774, section 2.3.1). A draft is accepted or not
by itself, as on a chain. Of several longest paths the one that comes first in the block counts.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from jspec.common.typing import RowCounts, TargetProbs
from jspec.sampling.distribution import sample
from jspec.sampling.noise import AcceptanceNoise
from jspec.speculation.acceptance.siblings import is_candidate, tree_noise
from jspec.speculation.acceptance.tree import Tree, TreeRule, at_parents, path_of
from jspec.speculation.acceptance.types import Proposal, Verdict


def make_rule(
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
