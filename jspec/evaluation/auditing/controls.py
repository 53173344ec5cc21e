"""Negative controls: rules and drafters that are wrong on purpose and must be detected."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jspec.common.typing import RowCounts, RowSeeds, TargetProbs
from jspec.drafters.draw import draw_from_distribution
from jspec.drafters.model import ModelDrafter
from jspec.sampling.distribution import sample
from jspec.sampling.noise import SHARED, AcceptanceNoise, Purpose, acceptance_noise, round_keys
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.acceptance.chain import probs_after
from jspec.speculation.acceptance.tree import Tree, TreeRule, end_of, path_of
from jspec.speculation.acceptance.types import AcceptanceRule, Proposal, Verdict


def without_residual(rule: AcceptanceRule) -> AcceptanceRule:
    """Returns the rule, but after a rejection the target's own distribution is drawn from."""

    def accept(target_probs: TargetProbs, proposal: Proposal, noise: AcceptanceNoise) -> Verdict:
        verdict = rule.accept(target_probs, proposal, noise)
        distribution = probs_after(target_probs, verdict.num_accepted)
        return verdict.replace(next_token=sample(distribution, noise.gumbel))

    def after(verdict: Verdict, probs: TargetProbs, tree: Tree, noise: AcceptanceNoise) -> Verdict:
        assert verdict.path is not None
        distribution = probs_after(probs, end_of(verdict.path, verdict.num_accepted))
        return verdict.replace(next_token=sample(distribution, noise.gumbel))

    return rule._replace(accept=accept, tree=_changed(rule, after))


def keeping_all(rule: AcceptanceRule) -> AcceptanceRule:
    """Returns the rule, but every draft is accepted."""

    def accept(target_probs: TargetProbs, proposal: Proposal, noise: AcceptanceNoise) -> Verdict:
        verdict = rule.accept(target_probs, proposal, noise)
        return verdict.replace(num_accepted=proposal.num_tokens)

    def after(verdict: Verdict, probs: TargetProbs, tree: Tree, noise: AcceptanceNoise) -> Verdict:
        path, num_accepted = path_of(tree, jnp.argmax(tree.depths, axis=1).astype(jnp.int32))
        return verdict.replace(num_accepted=num_accepted, path=path)

    return rule._replace(accept=accept, tree=_changed(rule, after))


def keeping_a_prefix(rule: AcceptanceRule) -> AcceptanceRule:
    """Returns the rule, but of a tree the first drafts of the block are kept, not those of a path.

    As many as the path has; wherever that is not the first branch, they are others.
    """

    def after(verdict: Verdict, probs: TargetProbs, tree: Tree, noise: AcceptanceNoise) -> Verdict:
        assert verdict.path is not None
        prefix = jnp.arange(verdict.path.shape[1], dtype=jnp.int32)
        return verdict.replace(path=jnp.broadcast_to(prefix, verdict.path.shape))

    return rule._replace(tree=_changed(rule, after))


def _changed(rule: AcceptanceRule, after: Callable[..., Verdict]) -> TreeRule | None:
    """Returns the rule for trees with its verdicts changed by `after`; None where there is none."""
    if rule.tree is None:
        return None

    def accept(
        target_probs: TargetProbs, proposal: Proposal, tree: Tree, noise: AcceptanceNoise
    ) -> Verdict:
        verdict = rule.tree.accept(target_probs, proposal, tree, noise)
        return after(verdict, target_probs, tree, noise)

    return rule.tree._replace(accept=accept)


def tree_controls(rule: AcceptanceRule) -> dict[str, AcceptanceRule]:
    """Returns what an audit of trees must reject: the rule made wrong, by what is wrong with it."""
    if rule.tree is None:
        return {}
    changed = {"a prefix kept": keeping_a_prefix(rule)}
    if rule.noise is not SHARED:  # there the next token is the target's own, never a residual
        changed["no residual"] = without_residual(rule)
    return changed


def with_absolute_uniforms(rule: AcceptanceRule) -> AcceptanceRule:
    """Returns the rule, but each draft's uniform is keyed by its absolute position.

    A round then reuses uniforms that have decided how far an earlier round came.
    """

    def noise(
        seed: RowSeeds, position: RowCounts, width: int, vocab_size: int, is_random: Bool[Array, ""]
    ) -> AcceptanceNoise:
        right = acceptance_noise(seed, position, width, vocab_size, is_random)
        if width == 0:  # a round without drafts has no uniforms
            return right
        keys = [round_keys(seed, position + i, Purpose.ACCEPT, 1) for i in range(width)]
        draw = jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, [], jnp.float32)))
        return right.replace(uniforms=draw(jnp.concatenate(keys, axis=1)))

    return rule._replace(noise=rule.noise._replace(acceptance=noise))


SettingsFn = Callable[[SamplingSettings], SamplingSettings]


def hotter(settings: SamplingSettings) -> SamplingSettings:
    """Returns the settings at twice the temperature."""
    return settings.replace(temperature=2 * settings.temperature)


def greedily(settings: SamplingSettings) -> SamplingSettings:
    """Returns the settings at temperature 0."""
    return settings.replace(temperature=0 * settings.temperature)


def unprocessed(settings: SamplingSettings) -> SamplingSettings:
    """Returns the settings without processors and filters."""
    switches = settings.switches._replace(top_k=False, top_p=False, min_p=False)
    return settings.replace(switches=switches).without_processors()


def misreporting(
    drafter: ModelDrafter, *, drawn: SettingsFn | None = None, reported: SettingsFn | None = None
) -> ModelDrafter:
    """Returns the drafter, but it draws, or reports what it draws from, under changed settings."""

    def draw(logits: Array, settings: SamplingSettings, rng_keys: Array) -> tuple[Array, Array]:
        token, _ = draw_from_distribution(logits, drawn(settings) if drawn else settings, rng_keys)
        under = reported(settings) if reported else settings
        return token, draw_from_distribution(logits, under, rng_keys)[1]

    return dataclasses.replace(drafter, draw=draw)


def claiming_all(drafter: ModelDrafter, *, num_ids: int) -> ModelDrafter:
    """Returns the drafter, but it draws among the first ids and reports the whole distribution."""

    def draw(logits: Array, settings: SamplingSettings, rng_keys: Array) -> tuple[Array, Array]:
        few = jnp.where(jnp.arange(logits.shape[-1]) < num_ids, logits, -jnp.inf)
        token, _ = draw_from_distribution(few, settings, rng_keys)
        return token, draw_from_distribution(logits, settings, rng_keys)[1]

    return dataclasses.replace(drafter, draw=draw)
