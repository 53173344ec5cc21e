"""Blockwise parallel decoding (Stern et al., arXiv 1811.03115): greedy heads for later positions.

    target   | ... tn-1  tn | last |          `last` came from the hidden state at tn
    heads    |           tn | head 0: d1 | head 1: d2 | head 2: d3

The heads share one feed-forward layer and the target's own projection onto the vocabulary. Each
proposes its most likely token under the row's processors. The draft follows from the context alone,
so it has no distribution to report.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float32, Int32, Key

from jspec.common.typing import Params, RowTokens
from jspec.drafters.chain import ChainDrafter
from jspec.drafters.heads.blockwise_heads import (
    BlockwiseConfig,
    inner_layer,
    load_blockwise,
    place_output,
)
from jspec.drafters.memory import ReadingLastOutput
from jspec.drafters.spec import BuiltDrafter, DrafterEntry, DrafterSpec, HeadOptions
from jspec.models import DecoderConfig
from jspec.models.layers import finish_logits, head_kernel, linear
from jspec.sampling.distribution import best_token
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.acceptance.types import Proposal
from jspec.speculation.types import Kind, RoundInputs


class _Asking(struct.PyTreeNode):
    """The heads in the middle of a chain."""

    inner: Float32[Array, "b 1 f"]  # output of the layer that they share, [b 1 h·f]
    index: Int32[Array, ""]  # of the head whose turn it is


def take_best(
    logits: Float32[Array, "b v"], settings: SamplingSettings, rng_keys: Key[Array, "b"]
) -> tuple[RowTokens, Float32[Array, "b v"]]:
    """Takes each row's most likely token, whatever its temperature; see `draw_from_distribution`.

    The distribution has all probability on it. Where every token is forbidden it is `NO_TOKEN`.
    """
    # With processors, so that a token they forbid is never proposed.
    best = best_token(settings.process(logits))
    return best, jax.nn.one_hot(best, logits.shape[-1], dtype=jnp.float32)


@dataclasses.dataclass(frozen=True)
class BlockwiseDrafter(ReadingLastOutput, ChainDrafter):
    """Proposes every head's most likely token.

    Attributes:
      config: of the heads, of which there are at least as many as drafts.
      target: the target's shape.
    """

    config: BlockwiseConfig = dataclasses.field(kw_only=True)
    target: DecoderConfig = dataclasses.field(kw_only=True)
    kind = Kind("blockwise", 0.5, 0.4, is_certain=True)

    def propose(
        self, params: Params, state: Float32[Array, "b d"], inputs: RoundInputs
    ) -> tuple[Proposal, Float32[Array, "b d"]]:
        """Asks one head after the other, in a loop on the device, for as long as any is wanted."""
        target_params = inputs.view.params
        hidden = self.read(target_params, state)
        # The target's own kernel, tied or not: the heads have no vocabulary matrix.
        head = head_kernel(self.target, target_params)

        def place(index: int) -> Callable[[Array], Array]:
            return lambda inner: place_output(params, index, inner, hidden)

        places = [place(index) for index in range(self.num_draft_tokens)]

        def first(asking: _Asking, token: RowTokens) -> tuple[Array, _Asking]:
            # The shared layer runs once a round.
            return later(asking.replace(inner=inner_layer(params, hidden)), token)

        def later(asking: _Asking, token: RowTokens) -> tuple[Array, _Asking]:
            # Only the head whose turn it is goes through the projection, the expensive part.
            outputs = jax.lax.switch(asking.index, places, asking.inner)
            logits = finish_logits(self.target, linear(outputs, head))
            return logits[:, 0, : self.vocab_size], asking.replace(index=asking.index + 1)

        # The loop's state needs the shape of the inner layer before it has run.
        width = self.config.num_heads * self.config.hidden_dim
        nothing = jnp.zeros([state.shape[0], 1, width], jnp.float32)
        asking = _Asking(nothing, jnp.int32(0))
        proposal, _, _ = self.draw_chain(first, later, asking, inputs, draw=take_best)
        # None stands for certain drafts: no [b w v] array goes to the verify call.
        return proposal.replace(probs=None), state


def _build(spec: DrafterSpec) -> BuiltDrafter:
    target = spec.target_config
    heads = load_blockwise(spec.head_folder("blockwise"), target, spec.dtype)
    fields = spec.with_at_most(heads.config.num_heads).chain_fields
    # `draft_confidence` is another member's, if it is set: certain drafts are never unsure.
    fields["min_confidence"] = 0.0
    drafter = BlockwiseDrafter(config=heads.config, target=target, **fields)
    return BuiltDrafter(drafter, heads.params)


ENTRY = DrafterEntry(
    name="blockwise",
    build=_build,
    proposes="the most likely tokens, by smaller heads that share the target's vocabulary matrix",
    source="1811.03115",
    options=HeadOptions,
    needs="draft_head",
    prior_cost=1.43,
)
