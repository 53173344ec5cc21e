"""Negative controls: rules and drafters that are wrong on purpose and must be detected."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jspec.common.text_table import NOTHING, format_table
from jspec.common.typing import ApplyFn, Params, RowCounts, RowSeeds, TargetProbs
from jspec.drafters.chain import draw_from_distribution
from jspec.drafters.model import ModelDrafter
from jspec.sampling.distribution import sample
from jspec.sampling.noise import SHARED, AcceptanceNoise, Purpose, acceptance_noise, round_keys
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.acceptance import RULES, RuleOptions
from jspec.speculation.acceptance.chain import probs_after
from jspec.speculation.acceptance.tree import Tree, TreeRule, along, end_of, path_of, tree_of
from jspec.speculation.types import (
    AcceptanceRule,
    Drafter,
    Proposal,
    RoundInputs,
    Temperatures,
    Verdict,
)

SettingsFn = Callable[[SamplingSettings], SamplingSettings]
_COLUMNS = "rule", "temperature", "lossless", "negative control", "and on trees"


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

    return rule._replace(accept=accept, matches_at_zero=False, tree=_changed(rule, after))


def keeping_all(rule: AcceptanceRule) -> AcceptanceRule:
    """Returns the rule, but every draft is accepted."""

    def accept(target_probs: TargetProbs, proposal: Proposal, noise: AcceptanceNoise) -> Verdict:
        verdict = rule.accept(target_probs, proposal, noise)
        return verdict.replace(num_accepted=proposal.num_tokens)

    def after(verdict: Verdict, probs: TargetProbs, tree: Tree, noise: AcceptanceNoise) -> Verdict:
        path, num_accepted = path_of(tree, jnp.argmax(tree.depths, axis=1).astype(jnp.int32))
        return verdict.replace(num_accepted=num_accepted, path=path)

    return rule._replace(accept=accept, matches_at_zero=False, tree=_changed(rule, after))


def keeping_a_prefix(rule: AcceptanceRule) -> AcceptanceRule:
    """Returns the rule, but of a tree the first drafts of the block are kept, not those of a path.

    There are as many as the path has; they differ unless the path is the first branch.
    """

    def after(verdict: Verdict, probs: TargetProbs, tree: Tree, noise: AcceptanceNoise) -> Verdict:
        assert verdict.path is not None
        prefix = jnp.arange(verdict.path.shape[1], dtype=jnp.int32)
        return verdict.replace(path=jnp.broadcast_to(prefix, verdict.path.shape))

    return rule._replace(tree=_changed(rule, after))


def _changed(rule: AcceptanceRule, after: Callable[..., Verdict]) -> TreeRule | None:
    if rule.tree is None:
        return None

    def accept(
        target_probs: TargetProbs, proposal: Proposal, tree: Tree, noise: AcceptanceNoise
    ) -> Verdict:
        verdict = rule.tree.accept(target_probs, proposal, tree, noise)
        return after(verdict, target_probs, tree, noise)

    return rule.tree._replace(accept=accept)


def misreported(proposal: Proposal, vocab_size: int) -> Proposal:
    """Returns a tree's proposal, but with distributions that its drafts were not drawn from.

    Deterministic drafts get probability 1/2, with the rest spread over all other tokens; siblings
    drawn with replacement are reported as drawn without, and the reverse.
    """
    tree = tree_of(proposal)
    is_draft = jnp.arange(vocab_size) == proposal.tokens[..., None]
    if proposal.probs is None:
        halves = jnp.where(is_draft, 0.5, 0.5 / (vocab_size - 1))
        probs = jnp.where(tree.is_real[..., None], halves, 0.0)
        return proposal.replace(probs=probs, scores=None)  # by which `auto` would make it anew
    is_sibling = tree.parents[:, :, None] == tree.parents[:, None, :]
    first = along(jnp.argmax(is_sibling, axis=-1), proposal.probs)
    is_taken = (tree.is_earlier_sibling[..., None] & is_draft[:, None]).any(axis=2)
    left = jnp.where(is_taken, 0.0, proposal.probs)
    total = left.sum(axis=-1, keepdims=True)
    is_same = (proposal.probs == first).all(axis=-1, keepdims=True)
    probs = jnp.where(is_same, left / jnp.where(total > 0, total, 1.0), first)
    return proposal.replace(probs=probs)


def misreporting_trees(drafter: Drafter, vocab_size: int) -> Drafter:
    """Returns the drafter of trees, but its proposals are `misreported`."""

    class MisreportingTrees(type(drafter)):
        def propose(self, params: Params, state: Any, inputs: RoundInputs) -> tuple[Proposal, Any]:
            proposal, state = super().propose(params, state, inputs)
            return misreported(proposal, vocab_size), state

    wrong = copy.copy(drafter)
    object.__setattr__(wrong, "__class__", MisreportingTrees)
    return wrong


def ignoring_depths(apply: ApplyFn) -> ApplyFn:
    """Returns the ApplyFn, but each draft of a tree has the position of its slot."""

    def wrong(*args: Any, positions: Any = None, **options: Any) -> Any:
        return apply(*args, **options)

    return wrong


def seeing_siblings(apply: ApplyFn) -> ApplyFn:
    """Returns the ApplyFn, but each draft sees all those before it in the block."""

    def wrong(*args: Any, block_mask: Any = None, **options: Any) -> Any:
        if block_mask is not None:
            everything = jnp.tri(block_mask.shape[-1], dtype=bool)[-block_mask.shape[-2] :]
            block_mask = jnp.broadcast_to(everything, block_mask.shape)
        return apply(*args, block_mask=block_mask, **options)

    return wrong


class _Rewinding(NamedTuple):
    cache: Any

    @property
    def length(self) -> RowCounts:
        return self.cache.length

    def commit(self, num_tokens: RowCounts, path: Any = None) -> Any:
        return self.cache.commit(num_tokens)


def rewinding(apply: ApplyFn) -> ApplyFn:
    """Returns the ApplyFn, but the cache takes an integer for a path: nothing is moved."""

    def wrong(*args: Any, block_mask: Any = None, **options: Any) -> Any:
        logits, hidden, cache = apply(*args, block_mask=block_mask, **options)
        return logits, hidden, cache if block_mask is None else _Rewinding(cache)

    return wrong


# Around the target: what the check of the caches must reject on trees, whatever the rule.
CALL_CONTROLS = {
    "a path not moved": rewinding,
    "depths ignored": ignoring_depths,
    "siblings seen": seeing_siblings,
}


def tree_controls(
    rule: AcceptanceRule, drafter: Drafter | None, vocab_size: int
) -> dict[str, dict[str, Any]]:
    """Returns what an audit of trees must reject, by what is wrong, as options of `Rows`.

    The test of the distribution must reject a wrong `rule` or `drafter`, the test of the caches a
    wrong call. Without a drafter only the names mean anything.
    """
    if rule.tree is None:
        return {}
    changed: dict[str, dict[str, Any]] = {"a prefix kept": {"rule": keeping_a_prefix(rule)}}
    if rule.noise is not SHARED:  # there the next token is the target's, whatever the drafts
        changed["no residual"] = {"rule": without_residual(rule)}
        changed["drafts misreported"] = {
            "drafter": None if drafter is None else misreporting_trees(drafter, vocab_size)
        }
    return changed | {name: {"around": around} for name, around in CALL_CONTROLS.items()}


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


def hotter(settings: SamplingSettings) -> SamplingSettings:
    """Returns the settings at twice the temperature."""
    return settings.replace(temperature=2 * settings.temperature)


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


def list_rules() -> str:
    """Returns a table of all rules, yours too, and the controls that an audit must reject."""
    lines = [_line(name, make(RuleOptions())) for name, make in RULES.items()]
    whatever = f"on trees, whatever the rule, above temperature 0: {', '.join(CALL_CONTROLS)}"
    return f"{format_table(_COLUMNS, lines)}\n{whatever}"


def _line(name: str, rule: AcceptanceRule) -> tuple[str, ...]:
    on_trees = [name for name in tree_controls(rule, None, 0) if name not in CALL_CONTROLS]
    controls = ["a flatter target", ", ".join(on_trees) or NOTHING]
    if rule.temperatures is Temperatures.ZERO:  # the text says everything
        controls = [NOTHING, NOTHING]
    is_lossless = "yes" if rule.is_lossless else "no"
    return name, rule.temperatures.value, is_lossless, *controls
