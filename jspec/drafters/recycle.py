"""Token recycling (arXiv 2408.08696): what the target would have said, kept for the next time.

    a verify call    last: "the"    draft: "cat"     draft: "sat" (rejected)
    the likeliest    cat dog ...    ran sat ...      down on ...
    the table        the -> cat dog ...   cat -> ran sat ...   sat -> down on ...

A table holds, for each token of the vocabulary, the tokens that the target found likeliest the last
time that it read this token, in whatever context: after committed tokens, and after rejected drafts
as well. Drafts follow the table from the newest token on, by the likeliest at each step, or with
`tree_depth` by the likeliest few: a tree of one shape, by how often each rank is right. The table
is a row's own and begins empty; nothing is trained. It follows from the row's past alone, so the
drafts' distribution is one-hot.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jspec.common.typing import BlockFlags, Params, Tokens
from jspec.drafters.spec import BuiltDrafter, DrafterSpec, DraftingTrees, Shape, certain_tree_shape
from jspec.drafters.trees import best_static_tree
from jspec.sampling.distribution import NO_TOKEN
from jspec.speculation.acceptance.tree import best_tree
from jspec.speculation.types import Kind, Proposal, RoundInputs

Table = Int32[Array, "b v k"]

# How often each of the tokens kept after one is the next: SmolLM2-135M on 18 prompts of Spec-Bench
# at temperature 0. (The first is so more often after a draft that was kept, 0.49, than at first.)
_ASSUMED = (0.43, 0.11, 0.046, 0.039, 0.03, 0.014, 0.014, 0.01)


@dataclasses.dataclass(frozen=True)
class RecycleDrafter(DraftingTrees):
    """Proposes the tokens that the target found likeliest after each token, a chain or a tree.

    Attributes:
      num_draft_tokens: drafts a round.
      vocab_size: the target's, rows of the table.
      num_runners_up: tokens that are kept after each; a chain follows the first.
    """

    num_draft_tokens: int
    vocab_size: int
    num_runners_up: int = 1

    @property
    def chain_kinds(self) -> tuple[Kind, ...]:
        """One, whatever the table holds."""
        return (Kind("recycle", 0.25, 0.35),)

    def init(self, batch_size: int, capacity: int) -> Table:
        """Returns empty tables."""
        return jnp.full([batch_size, self.vocab_size, self.num_runners_up], NO_TOKEN, jnp.int32)

    def observe_runners_up(
        self,
        state: Table,
        tokens: Tokens,
        runners_up: Int32[Array, "b t k"],
        is_fed: BlockFlags,
        is_kept: BlockFlags,
    ) -> Table:
        """Writes what followed each token of a block; see `Drafter`.

        Of equal tokens the last that was kept counts, or else the last of all.
        """
        place = jnp.arange(tokens.shape[1])
        # What followed a rejected draft was said of a text that is none.
        rank = jnp.where(is_kept, len(place), 0) + place
        is_equal = tokens[:, :, None] == tokens[:, None]
        is_better = is_equal & is_fed[:, None] & (rank[:, None] > rank[:, :, None])
        # A scatter that writes one place twice may do so in any order.
        is_best = is_fed & ~is_better.any(axis=2) & (tokens >= 0)
        rows = jnp.arange(len(tokens))[:, None]
        tokens = jnp.where(is_best, tokens, self.vocab_size)  # past the end: dropped
        return state.at[rows, tokens].set(runners_up, mode="drop")

    def propose(self, params: Params, state: Table, inputs: RoundInputs) -> tuple[Proposal, Table]:
        """Follows the table until it has no entry, or enough are drafted."""
        if self.shape is not None:
            return self._propose_tree(self.shape, state, inputs), state
        rows, token, tokens = jnp.arange(len(state)), inputs.last_token, []
        for _ in range(self.num_draft_tokens):
            known = state[rows, jnp.maximum(token, 0), 0]
            token = jnp.where(token >= 0, known, NO_TOKEN)
            tokens.append(token)
        drafts = jnp.stack(tokens, axis=1)
        num_known = jnp.sum(drafts >= 0, axis=1, dtype=jnp.int32)
        num_tokens = jnp.minimum(num_known, inputs.wanted())
        return Proposal(jnp.maximum(drafts, 0), num_tokens), state

    def _propose_tree(self, shape: Shape, state: Table, inputs: RoundInputs) -> Proposal:
        """Follows the table along the nodes of a tree that is the same in every round."""
        size, rows = shape.num_draft_tokens, jnp.arange(len(state))
        rates = [_ASSUMED[: self.num_runners_up]] * shape.depth
        # More nodes than are put forward, for where the table has no entry.
        tree, tokens = best_static_tree(rates, 2 * size), []
        for parent, rank in zip(tree.parents, tree.ranks, strict=True):
            above = inputs.last_token if parent < 0 else tokens[parent]
            known = state[rows, jnp.maximum(above, 0), rank]
            tokens.append(jnp.where(above >= 0, known, NO_TOKEN))
        nodes = jnp.stack(tokens, axis=1)
        scores = jnp.where(nodes >= 0, jnp.asarray(tree.scores, jnp.float32), -jnp.inf)
        parents = jnp.broadcast_to(jnp.asarray(tree.parents, jnp.int32), nodes.shape)
        nodes = jnp.maximum(nodes, 0), scores, parents
        return best_tree(*nodes, size, inputs.wanted(), max_depth=shape.depth)


def build(spec: DrafterSpec) -> BuiltDrafter:
    """Returns the drafter, of chains or of trees."""
    sizes = spec.num_draft_tokens, spec.target_config.vocab_size
    shape = certain_tree_shape(spec)
    # Of later ranks nothing is kept: a static tree would hardly ever have room for them.
    num_runners_up = 1 if shape is None else min(shape.branches, len(_ASSUMED))
    return BuiltDrafter(RecycleDrafter(*sizes, num_runners_up, shape=shape))
