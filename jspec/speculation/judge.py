"""Which drafts stay: the rule applied to the target's logits."""

import jax
import jax.numpy as jnp

from jspec.common.typing import Logits, RowCounts, RowSeeds, TargetProbs
from jspec.sampling.distribution import SamplingSettings, sample
from jspec.sampling.noise import AcceptanceNoise
from jspec.speculation.acceptance import is_match_at_zero
from jspec.speculation.acceptance.chain import match
from jspec.speculation.acceptance.types import AcceptanceRule, Proposal, Verdict


def judge(
    rule: AcceptanceRule,
    logits: Logits,
    settings: SamplingSettings,
    proposal: Proposal,
    seed: RowSeeds,
    position: RowCounts,
) -> tuple[Verdict, TargetProbs | None]:
    """Decides which drafts stay, and what follows them.

    For a chain in a batch of temperature 0 only, no lossless rule needs a distribution.

    Args:
      rule: what decides.
      logits: the target's at each block token, processed, [b w+1 v].
      settings: without processors.
      proposal: the drafts.
      seed: of each row's request.
      position: of the round's first token.

    Returns:
      The verdict; the target's distributions, [b w+1 v], where log-probabilities are wanted.
    """
    width, has_logprobs = proposal.width, settings.switches.logprobs

    def by_distribution() -> tuple[Verdict, TargetProbs | None]:
        probs = rule.distribution(logits, settings)
        noise = rule.noise.acceptance(seed, position, width, probs.shape[-1], settings.is_random)
        return _decide(rule, probs, proposal, noise), probs if has_logprobs else None

    def by_match() -> tuple[Verdict, TargetProbs | None]:
        return match(logits, proposal), rule.distribution(
            logits, settings
        ) if has_logprobs else None

    if proposal.parents is not None or not is_match_at_zero(rule):
        return by_distribution()
    return jax.lax.cond(settings.is_random, by_distribution, by_match)


def _decide(
    rule: AcceptanceRule, probs: TargetProbs, proposal: Proposal, noise: AcceptanceNoise
) -> Verdict:
    """Applies the rule; where there is no draft at all, it only draws the next token."""
    if proposal.width > 0:
        return rule.accept(probs, proposal, noise)
    none = jnp.zeros_like(proposal.num_tokens)
    gumbel = noise.gumbel if noise.gumbel.ndim == 2 else noise.gumbel[:, 0]
    return Verdict(none, sample(rule.next_token_probs(probs, proposal, none), gumbel))
