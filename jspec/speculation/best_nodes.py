"""The best nodes of a tree of drafts, in the order of a block.

A node's score is the logarithm of an estimate of the probability that the target says its whole
path. A path is never likelier than its beginning, so the best nodes are a tree. The best child of
the best child and so on comes first in the block: where that branch is kept, no cache has anything
to move.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jspec.common.typing import RowCounts
from jspec.speculation.acceptance.types import Proposal

NEVER = -jnp.inf


def best_tree(
    tokens: Int32[Array, "b c"],
    scores: Float32[Array, "b c"],
    parents: Int32[Array, "b c"],
    num_draft_tokens: int,
    wanted: RowCounts,
    max_depth: int,
) -> Proposal:
    """Returns the nodes with the best scores as a proposal.

    Args:
      tokens: of the nodes, [b c].
      scores: of their paths, [b c]; a parent's is at least its children's. Nodes of -inf are none.
      parents: places among the nodes, each before its children, or -1, [b c].
      num_draft_tokens: width of the proposal.
      wanted: the most drafts of each row, [b].
      max_depth: no node is deeper.
    """
    number = min(num_draft_tokens, tokens.shape[1])
    # The first of equals comes first: a parent before its child.
    _, place = jax.lax.top_k(scores, number)
    tokens, scores, parents = _at(place, tokens, scores, _renumbered(parents, place))
    is_first = _is_on_first_branch(parents, scores > NEVER, max_depth)
    order = jnp.argsort(~is_first, axis=1, stable=True)
    tokens, scores, parents = _at(order, tokens, scores, _renumbered(parents, order))
    num_nodes = jnp.sum(scores > NEVER, axis=1, dtype=jnp.int32)
    padding = (0, 0), (0, num_draft_tokens - number)
    return Proposal(
        jnp.pad(tokens, padding),
        jnp.minimum(wanted, num_nodes),
        parents=jnp.pad(parents, padding, constant_values=-1),
        max_depth=min(max_depth, num_draft_tokens),
        scores=jnp.pad(scores, padding, constant_values=NEVER),
    )


def _at(place: Int32[Array, "b m"], *leaves: Array) -> list[Array]:
    return [jnp.take_along_axis(leaf, place, axis=1) for leaf in leaves]


def _renumbered(parents: Int32[Array, "b c"], place: Int32[Array, "b m"]) -> Int32[Array, "b c"]:
    """Returns parents as places among the chosen ones; a chosen node's parent is chosen."""
    found = jnp.argmax(place[:, None, :] == parents[..., None], axis=-1).astype(jnp.int32)
    return jnp.where(parents < 0, -1, found)


def _is_on_first_branch(
    parents: Int32[Array, "b m"], is_node: Bool[Array, "b m"], max_depth: int
) -> Bool[Array, "b m"]:
    """Returns which nodes, in the order of their scores, are best children of best children."""
    is_sibling = parents[:, :, None] == parents[:, None]
    is_best = is_node & ~(is_sibling & jnp.tri(parents.shape[1], k=-1, dtype=bool)).any(axis=-1)
    is_first = is_best & (parents < 0)
    for _ in range(max_depth - 1):
        (above,) = _at(jnp.maximum(parents, 0), is_first)
        is_first |= is_best & (parents >= 0) & above
    return is_first


def prune(proposal: Proposal, num_nodes: RowCounts) -> Proposal:
    """Returns a tree that has scores with only its best nodes, `num_nodes` of each row at most."""
    assert proposal.parents is not None
    assert proposal.scores is not None
    width = proposal.width
    is_real = jnp.arange(width) < proposal.num_tokens[:, None]
    scores = jnp.where(is_real, proposal.scores, NEVER)
    # Of equals the first in the block: a parent before its child.
    rank = jnp.argsort(jnp.argsort(-scores, axis=1, stable=True), axis=1)
    scores = jnp.where(rank < num_nodes[:, None], scores, NEVER)
    nodes = proposal.tokens, scores, proposal.parents
    tree = best_tree(*nodes, width, num_nodes, max_depth=proposal.max_depth)
    return tree.replace(kind=proposal.kind, silent=proposal.silent)
