"""Heads on the target's last hidden state propose (Medusa, arXiv 2401.10774), as a chain.

    target   | ... tn-1  tn | last |          `last` came from the hidden state at tn
    heads    |           tn | head 0: d1 | head 1: d2 | head 2: d3

Head i was trained for the token i + 2 positions after the one whose hidden state it reads. Its
prediction does not depend on earlier drafts. It is drawn like any other draft, under the row's
processors and settings, from a known distribution: the output is exact at any temperature.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jspec.common.typing import Params, RowTokens
from jspec.drafters.chain import ChainDrafter
from jspec.drafters.heads.medusa_heads import MedusaConfig, load_medusa, medusa_logits
from jspec.drafters.memory import ReadingLastOutput
from jspec.drafters.spec import BuiltDrafter, DrafterEntry, DrafterSpec, DrawnHeadOptions
from jspec.models import DecoderConfig
from jspec.speculation.acceptance.types import Proposal
from jspec.speculation.types import Kind, RoundInputs


@dataclasses.dataclass(frozen=True)
class MedusaDrafter(ReadingLastOutput, ChainDrafter):
    """Proposes a chain to which every head adds one token.

    Attributes:
      config: of the heads, of which there are at least as many as drafts.
      target: the target's shape.
    """

    config: MedusaConfig = dataclasses.field(kw_only=True)
    target: DecoderConfig = dataclasses.field(kw_only=True)
    kind = Kind("medusa", 0.6, 0.5, is_certain=True)

    def propose(
        self, params: Params, state: Float32[Array, "b d"], inputs: RoundInputs
    ) -> tuple[Proposal, Float32[Array, "b d"]]:
        """Asks one head after the other, in a loop on the device, for as long as any is wanted."""
        hidden = self.read(inputs.view.params, state)
        # `lax.switch` needs one branch a head, as each has parameters of its own.
        heads = [
            functools.partial(medusa_logits, self.config, params[f"head_{index}"])
            for index in range(self.num_draft_tokens)
        ]

        def ask(index: Int32[Array, ""], token: RowTokens) -> tuple[Array, Int32[Array, ""]]:
            # Heads that nobody asks are not computed.
            logits = jax.lax.switch(index, heads, hidden)
            return logits[:, 0, : self.vocab_size], index + 1

        # The memory is the head's index: no head needs what another has drawn.
        proposal, _, _ = self.draw_chain(ask, ask, jnp.int32(0), inputs)
        return proposal, state


def _build(spec: DrafterSpec) -> BuiltDrafter:
    target = spec.target_config
    heads = load_medusa(spec.head_folder("medusa"), target, spec.dtype)
    # A chain cannot be longer than there are heads.
    fields = spec.with_at_most(heads.config.num_heads).chain_fields
    return BuiltDrafter(MedusaDrafter(config=heads.config, target=target, **fields), heads.params)


ENTRY = DrafterEntry(
    name="medusa",
    build=_build,
    proposes="what trained heads, one a position, draw from the target's last hidden state",
    source="2401.10774",
    options=DrawnHeadOptions,
    needs="draft_head",
    prior_cost=1.25,
)
