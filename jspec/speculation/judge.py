"""The verdict on a round: the acceptance rule applied to the target's logits."""

import jax
import jax.numpy as jnp

from jspec.common.typing import AnyLogits, RowCounts, RowSeeds, TargetProbs
from jspec.kernels import whole
from jspec.sampling.distribution import sample
from jspec.sampling.noise import AcceptanceNoise
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.acceptance import draws_only, is_match_at_zero
from jspec.speculation.acceptance.chain import match
from jspec.speculation.acceptance.tree import Tree, match_tree
from jspec.speculation.acceptance.types import AcceptanceRule, Proposal, Verdict


def judge(
    rule: AcceptanceRule,
    logits: AnyLogits,
    settings: SamplingSettings,
    proposal: Proposal,
    seed: RowSeeds,
    position: RowCounts,
    tree: Tree | None = None,
) -> tuple[Verdict, TargetProbs | None]:
    """Decides which drafts are accepted, and which token follows them.

    The logits are the target's at each block token, [b w+1 v], after the processors, which the
    settings no longer have. The position of the round's first token keys the noise. The tree is the
    proposal's, if it is one. The target's distributions, [b w+1 v], are returned too if the
    settings ask for log-probabilities.
    """
    width, has_logprobs = proposal.width, settings.switches.logprobs

    def by_distribution() -> tuple[Verdict, TargetProbs | None]:
        probs = rule.distribution(logits if draws_only(rule) else whole(logits), settings)
        size = probs.shape[-1], settings.is_random
        if tree is None:
            noise = rule.noise.acceptance(seed, position, width, *size)
            verdict = _decide(rule, probs, proposal, noise)
        else:
            noise = rule.tree.noise(seed, position, tree, *size)
            verdict = rule.tree.accept(probs, proposal, tree, noise)
        return verdict, probs if has_logprobs else None

    def by_match() -> tuple[Verdict, TargetProbs | None]:
        probs = rule.distribution(logits, settings) if has_logprobs else None
        matched = match(logits, proposal) if tree is None else match_tree(logits, proposal, tree)
        return matched, probs

    if not is_match_at_zero(rule):
        return by_distribution()
    # Where all temperatures are 0, comparing tokens decides the same, and no distribution over the
    # vocabulary need be computed.
    return jax.lax.cond(settings.is_random, by_distribution, by_match)


def _decide(
    rule: AcceptanceRule, probs: TargetProbs, proposal: Proposal, noise: AcceptanceNoise
) -> Verdict:
    """Applies the rule; a proposal of width 0 leaves only the next token to draw."""
    if proposal.width > 0:
        return rule.accept(probs, proposal, noise)
    # Rules may assume at least one draft; without any, all of them draw the next token alike.
    none = jnp.zeros_like(proposal.num_tokens)
    gumbel = noise.gumbel if noise.gumbel.ndim == 2 else noise.gumbel[:, 0]  # shared noise
    return Verdict(none, sample(rule.next_token_probs(probs, proposal, none), gumbel))
