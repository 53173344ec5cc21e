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
from jaxtyping import Array, Float32, Int32, Key

from jspec.common.typing import Params, RowTokens
from jspec.drafters.chain import draw_chain
from jspec.drafters.heads.medusa_checkpoint import load_medusa
from jspec.drafters.heads.medusa_module import MedusaConfig, medusa_logits
from jspec.drafters.memory import ReadingLastOutput, StopsUnsure
from jspec.drafters.spec import (
    BuiltDrafter,
    DrafterEntry,
    DrafterSpec,
    DrawnHeadOptions,
    required_head,
)
from jspec.models import LlamaConfig
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.acceptance.types import Proposal
from jspec.speculation.types import Kind, LimitFn, TargetView

_ASSUMED = 0.6, 0.5  # acceptance, before it is known


@dataclasses.dataclass(frozen=True)
class MedusaDrafter(StopsUnsure, ReadingLastOutput):
    """Proposes a chain to which every head adds one token.

    Attributes:
      config: of the heads.
      target: the target's shape.
      num_draft_tokens: drafts a round, at most one a head.
      vocab_size: ids that are really used; the padding beyond them is cut.
      min_confidence: it proposes no further where no token is this likely; 0 never stops it.
    """

    config: MedusaConfig
    target: LlamaConfig
    num_draft_tokens: int
    vocab_size: int
    min_confidence: float = 0.0

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """One: a chain with at most one draft a head."""
        return (Kind("medusa", *_ASSUMED, most=self.num_draft_tokens),)

    def propose(
        self,
        params: Params,
        state: Float32[Array, "b d"],
        last_token: RowTokens,
        *,
        limit: LimitFn,
        rng_keys: Key[Array, "b w"],
        settings: SamplingSettings,
        view: TargetView,
    ) -> tuple[Proposal, Float32[Array, "b d"]]:
        """Asks one head after the other, in a loop on the device, for as long as any is wanted."""
        hidden = self.read(view.params, state)
        # `lax.switch` needs one branch a head, as each has parameters of its own.
        heads = [
            functools.partial(medusa_logits, self.config, params[f"head_{index}"])
            for index in range(self.num_draft_tokens)
        ]

        def ask(index: Int32[Array, ""], token: RowTokens) -> tuple[Array, Int32[Array, ""]]:
            del token
            # Heads that nobody asks are not computed.
            logits = jax.lax.switch(index, heads, hidden)
            return logits[:, 0, : self.vocab_size], index + 1

        proposal, _, _ = draw_chain(
            ask,
            ask,
            # The memory is the head's index: no head needs what another has drawn.
            jnp.int32(0),
            last_token,
            limit=limit(jnp.zeros_like(last_token)),
            rng_keys=rng_keys,
            settings=settings,
            vocab_size=self.target.vocab_size,
            min_confidence=self.min_confidence,
        )
        return proposal, state


def build_medusa(spec: DrafterSpec) -> BuiltDrafter:
    """Returns the drafter over the heads in `spec.options.draft_head`.

    Raises:
      InputError: there are none, or they are another target's.
    """
    folder = required_head(spec, "medusa")
    heads = load_medusa(folder, spec.target_config, spec.dtype)
    drafter = MedusaDrafter(
        config=heads.config,
        target=spec.target_config,
        # A chain cannot be longer than there are heads.
        num_draft_tokens=min(spec.num_draft_tokens, heads.config.num_heads),
        vocab_size=spec.vocab_size,
        min_confidence=spec.options.draft_confidence,
    )
    return BuiltDrafter(drafter, heads.params)


ENTRY = DrafterEntry(
    name="medusa",
    build=build_medusa,
    proposes="what trained heads, one a position, draw from the target's last hidden state",
    source="2401.10774",
    options=DrawnHeadOptions,
    needs="draft_head",
    prior_cost=1.25,
)
