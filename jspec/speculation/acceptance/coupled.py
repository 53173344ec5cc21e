"""Coupled sampling (Daliri et al., arXiv 2408.07978): draft and target share their noise.

At every absolute position the target's token is the one that plain decoding draws there, from the
same Gumbel noise. The drafter draws from its own distribution with that noise too, and so it often
draws the same token. Drafts are accepted as long as they are the same.

Why it is exact: the emitted tokens *are* plain decoding's, token for token, whatever the drafter
and the number of drafts. Draft and target agree with probability at least (1 - TV) / (1 + TV),
where TV is the total variation between their distributions.
"""

from jaxtyping import Array, Bool, Float32

from jspec.common.typing import AnyLogits, RowCounts, RowSeeds, TargetProbs
from jspec.sampling.distribution import sample
from jspec.sampling.noise import SHARED, AcceptanceNoise
from jspec.speculation.acceptance import siblings
from jspec.speculation.acceptance.chain import match_tokens, probs_of_drafts, target_after
from jspec.speculation.acceptance.tree import Tree, along, follow
from jspec.speculation.types import AcceptanceRule, Proposal, Verdict


def acceptance_probs(target_probs: TargetProbs, proposal: Proposal) -> Float32[Array, "b w"]:
    """Returns the target's probability of each draft, [b w].

    That is the probability of accepting a draft that was made without the noise, such as one looked
    up in the prompt. A drafter that shares the noise is accepted at least as often on average.
    """
    return probs_of_drafts(target_probs, proposal)


def accept(target_probs: AnyLogits, proposal: Proposal, noise: AcceptanceNoise) -> Verdict:
    """Accepts drafts while they are what the target draws, with Gumbel noise [b w+1 v].

    On a mesh the target's distributions may be those of `sampling_probs` of split logits.
    """
    # The token at the first disagreement is the target's own draw: no residual is needed.
    return match_tokens(sample(target_probs, noise.gumbel), proposal)


def accept_tree(
    target_probs: AnyLogits, proposal: Proposal, tree: Tree, noise: AcceptanceNoise
) -> Verdict:
    """Follows what the target draws, with the Gumbel noise of each depth, [b max_depth+1 v]."""
    return follow(sample(target_probs, along(tree.depths, noise.gumbel)), proposal, tree)


def _tree_noise(
    seed: RowSeeds, position: RowCounts, tree: Tree, vocab_size: int, is_random: Bool[Array, ""]
) -> AcceptanceNoise:
    # A node's absolute position is that of its depth: plain decoding's noise there, again.
    return SHARED.acceptance(seed, position, tree.max_depth, vocab_size, is_random)


RULE = AcceptanceRule(
    acceptance_probs,
    target_after,
    accept,
    SHARED,
    matches_at_zero=True,
    draws_only=True,
    # Without the noise, drafts are accepted and refused as deterministic ones are.
    tree=siblings.RULE._replace(accept=accept_tree, noise=_tree_noise),
)
