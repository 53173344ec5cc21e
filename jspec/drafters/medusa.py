"""Heads on the target's last hidden state propose (Medusa, arXiv 2401.10774): a chain or a tree.

    target   | ... tn-1  tn | last |          `last` came from the hidden state at tn
    heads    |           tn | head 0: d1 | head 1: d2 | head 2: d3

Head i was trained for the token i + 2 positions after the one whose hidden state it reads. Its
prediction does not depend on earlier drafts. It is drawn like any other draft, under the row's
processors and settings, from a known distribution: the output is exact at any temperature.

With `tree_depth` every head's best tokens are combined with those of the heads before, in a tree of
one shape: that which promises the most by how often a head's token of each rank is kept
(section 2.3.3). The rates come from the folder, where `scripts/medusa_rates.py` writes them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jspec.common.typing import Params, RowCounts, RowTokens
from jspec.drafters.chain import ChainDrafter
from jspec.drafters.heads.keep_rates import Rates, read_rates
from jspec.drafters.heads.medusa_heads import MedusaConfig, load_medusa, medusa_logits
from jspec.drafters.memory import ReadingLastOutput
from jspec.drafters.spec import BuiltDrafter, DrafterEntry, DrafterSpec, DrawnHeadOptions
from jspec.drafters.tree_options import DraftingTrees, Shape, TreeSizeOptions, certain_tree_shape
from jspec.drafters.trees import best_static_tree, if_wanted
from jspec.models import DecoderConfig
from jspec.speculation.acceptance.tree import best_tree
from jspec.speculation.acceptance.types import Proposal
from jspec.speculation.runners_up import runners_up
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


@dataclasses.dataclass(frozen=True)
class MedusaTreeDrafter(DraftingTrees, MedusaDrafter):
    """Proposes a tree of the heads' best tokens.

    Attributes:
      shape: of the tree.
      rates: how often the tokens of each rank are kept, by head.
    """

    shape: Shape = dataclasses.field(kw_only=True)
    rates: Rates = dataclasses.field(kw_only=True)

    def propose(
        self, params: Params, state: Float32[Array, "b d"], inputs: RoundInputs
    ) -> tuple[Proposal, Float32[Array, "b d"]]:
        """Asks all heads that the tree has a level for."""
        wanted = inputs.wanted()
        grow = functools.partial(self._grow, params, inputs, wanted)
        return if_wanted(grow, state, wanted)

    def _grow(
        self, params: Params, inputs: RoundInputs, wanted: RowCounts, state: Float32[Array, "b d"]
    ) -> tuple[Proposal, Float32[Array, "b d"]]:
        few = [of_head[: self.shape.branches] for of_head in self.rates[: self.shape.depth]]
        tree = best_static_tree(few, self.shape.num_draft_tokens)
        hidden, levels = self.read(inputs.view.params, state), []
        for index, width in enumerate(tree.widths):
            logits = medusa_logits(self.config, params[f"head_{index}"], hidden)
            levels.append(runners_up(logits[..., : self.vocab_size], width)[:, 0])
        pairs = zip(tree.depths, tree.ranks, strict=True)
        nodes = jnp.stack([levels[depth - 1][:, rank] for depth, rank in pairs], axis=1)
        scores = jnp.broadcast_to(jnp.asarray(tree.scores, jnp.float32), nodes.shape)
        if self.min_confidence > 0:  # the least probability of a path, as in trees that grow
            scores = jnp.where(scores >= jnp.log(self.min_confidence), scores, -jnp.inf)
        parents = jnp.broadcast_to(jnp.asarray(tree.parents, jnp.int32), nodes.shape)
        size, depth = self.shape.num_draft_tokens, self.shape.depth
        # A vocabulary has more tokens than a head is asked for: none of them is NO_TOKEN.
        return best_tree(nodes, scores, parents, size, wanted, max_depth=depth), state


@dataclasses.dataclass(frozen=True)
class MedusaOptions(DrawnHeadOptions, TreeSizeOptions):
    """Of `medusa`."""


def _build(spec: DrafterSpec) -> BuiltDrafter:
    target, folder, shape = spec.target_config, spec.head_folder("medusa"), certain_tree_shape(spec)
    heads = load_medusa(folder, target, spec.dtype)
    own = {"config": heads.config, "target": target}
    if shape is None:
        # A chain cannot be longer than there are heads.
        fields = spec.with_at_most(heads.config.num_heads).chain_fields
        return BuiltDrafter(MedusaDrafter(**own, **fields), heads.params)
    rates = read_rates(folder, heads.config.num_heads)
    drafter = MedusaTreeDrafter(**own, **spec.chain_fields, shape=shape, rates=rates)
    return BuiltDrafter(drafter, heads.params)


ENTRY = DrafterEntry(
    name="medusa",
    build=_build,
    proposes="what trained heads, one a position, draw from the target's last hidden state",
    source="2401.10774",
    options=MedusaOptions,
    needs="draft_head",
    prior_cost=1.25,
)
