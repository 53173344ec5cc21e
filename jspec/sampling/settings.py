"""How each row of a batch samples: its temperature, its filters and its processors' states."""

import functools
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float32, Int32

from jspec.common.typing import DraftTokens, Logits, RowTokens, Tokens
from jspec.sampling.processors import Processor, ProcessorState

COLDEST = float(jnp.finfo(jnp.float32).tiny)  # smaller temperatures are flushed to 0


class Switches(NamedTuple):
    """What a compiled program contains. Rows that do not use a part give it a neutral value.

    The processors stand in the order in which they are applied.
    """

    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    processors: tuple[Processor, ...] = ()
    logprobs: bool = False
    top_logprobs: bool = False
    draft_filters: bool = False  # a top-k and a top-p of the drafter's own


class SamplingSettings(struct.PyTreeNode):
    """How tokens are drawn, for each row.

    Attributes:
      temperature: [b]; 0, and what float32 flushes to it, takes the most likely token.
      top_k: [b]; how many of the most likely tokens to keep; 0 keeps all.
      top_p: [b]; keep the fewest most likely tokens whose probability reaches this; 1 keeps all.
      min_p: [b]; keep tokens at least this likely relative to the most likely one; 0 keeps all.
      states: one for each processor: what each row has committed so far.
      wants_top: [b]; rows that want the log-probabilities of the likeliest tokens; None where the
        switch for them is off.
      switches: what is compiled in.
    """

    temperature: Float32[Array, "b"]
    top_k: Int32[Array, "b"]
    top_p: Float32[Array, "b"]
    min_p: Float32[Array, "b"]
    states: tuple[ProcessorState, ...] = ()
    wants_top: Bool[Array, "b"] | None = None
    switches: Switches = struct.field(pytree_node=False, default=Switches())

    @property
    def is_random(self) -> Bool[Array, ""]:
        """Whether any row draws at random at all."""
        return (self.temperature >= COLDEST).any()

    def after(self, token: RowTokens) -> Self:
        """Returns the settings of the next position, after one more token of each row, [b]."""
        pairs = zip(self.switches.processors, self.states, strict=True)
        return self.replace(states=tuple(p.update(state, token) for p, state in pairs))

    def after_all(self, tokens: Tokens, valid: Bool[Array, "b t"]) -> Self:
        """Returns the settings after the valid tokens of [b t], the first few of each row."""
        settings = self
        for i in range(tokens.shape[1] if self.switches.processors else 0):
            new = settings.after(tokens[:, i])
            settings = jax.tree.map(functools.partial(_choose_rows, valid[:, i]), new, settings)
        return settings

    def process(self, logits: Float32[Array, "b v"]) -> Float32[Array, "b v"]:
        """Applies the processors at one position of each row."""
        for processor, state in zip(self.switches.processors, self.states, strict=True):
            logits = processor.apply(state, logits)
        return logits

    def without_processors(self) -> Self:
        """Returns the settings for logits that have been processed already."""
        return self.replace(states=(), switches=self.switches._replace(processors=()))


def _choose_rows(condition: Bool[Array, "b"], new: Array, old: Array) -> Array:
    if new is old:  # a leaf that no token changes, often [b v]: no program is needed for it
        return old
    return jnp.where(condition.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def process_drafts(
    logits: Logits,
    settings: SamplingSettings,
    drafts: DraftTokens,
    parents: Int32[Array, "b w"] | None = None,
) -> Logits:
    """Applies the processors along a block, each position with the state of its own prefix.

    The block is one token, which the processors have seen, and the drafts: a chain, or a tree with
    the parents at these places of the block, each before its child.
    """
    if not settings.switches.processors:
        return logits
    seen, processed = [settings.states], [settings.process(logits[:, 0])]
    for i in range(drafts.shape[1]):
        if parents is not None:
            # A sibling leaves no trace: the state is the parent's, not that of the draft before.
            states = jax.tree.map(functools.partial(_choose_state, parents[:, i]), *seen)
            settings = settings.replace(states=states)
        settings = settings.after(drafts[:, i])
        seen.append(settings.states)
        processed.append(settings.process(logits[:, i + 1]))
    return jnp.stack(processed, axis=1)


def _choose_state(place: RowTokens, *leaves: Array) -> Array:
    if all(leaf is leaves[0] for leaf in leaves):  # one that no token changes
        return leaves[0]
    return jnp.stack(leaves)[place, jnp.arange(place.shape[0])]
