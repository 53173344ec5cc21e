"""A round's drafts as a tree: its best nodes, which slots a slot sees, which path is kept.

    drafts         0  1  2  3  4           parents -1 -1 0 0 2   (-1: the last committed token)
    block slot  0  1  2  3  4  5           slot 0 is that token, slot i + 1 is draft i
                last ─┬─ 1 ─┬─ 3 ── 5      depths  0  1 1 2 2 3
                      │     └─ 4           slot 5 sees 0, 1, 3 and itself: its path
                      └─ 2

The target is called once on the whole block. A node sees the committed slots and its own path, and
its position is that of its depth, so its logits are those of the path alone. A rule then keeps one
path from the root on. Its slots are moved together in the caches (`KVCache.commit`), and the round
goes on as if the path had been a chain of drafts.

The parents are data: every row may have its own tree, another one in every round. Only the
number of drafts and the greatest depth are static.

A node's score is the logarithm of an estimate of the probability that the target says its whole
path. A path is never likelier than its beginning, so the best nodes are a tree. The best child of
the best child and so on comes first in the block: where that branch is kept, no cache has anything
to move.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float32, Int32

from jspec.common.errors import InputError
from jspec.common.typing import AnyLogits, RowCounts, TargetProbs
from jspec.sampling.distribution import best_token
from jspec.speculation.types import Proposal, Verdict

_Leaves = TypeVar("_Leaves")


class Tree(NamedTuple):
    """The trees of a batch, by the slots of the block; the last committed token is slot 0.

    Attributes:
      parents: of the drafts, as slots, [b w]; each comes before its child.
      mask: which slots are on the path to each slot, itself and the root included, [b t t].
      depths: of the slots, [b t]; 0 is the root's.
      is_real: drafts that are no padding, [b w].
      is_earlier_sibling: [b w w], whether draft j has draft i's parent and comes before it.
      max_depth: no draft is deeper.
    """

    parents: Int32[Array, "b w"]
    mask: Bool[Array, "b t t"]
    depths: Int32[Array, "b t"]
    is_real: Bool[Array, "b w"]
    is_earlier_sibling: Bool[Array, "b w w"]
    max_depth: int


class TreeRule(NamedTuple):
    """An acceptance rule for trees.

    Attributes:
      end_probs: (target_probs, proposal, tree) -> [b t], the probability that the kept path ends at
        each slot of the block.
      next_token_probs: (target_probs, proposal, tree, slot [b]) -> [b v], the distribution of the
        token after a path that ends at this slot.
      accept: (target_probs, proposal, tree, noise) -> Verdict: the same with noise applied.
      noise: (seed, position, tree, vocabulary size, is_random) -> the noise of a round.
    """

    end_probs: Callable[[TargetProbs, Proposal, Tree], Float32[Array, "b t"]]
    next_token_probs: Callable[[TargetProbs, Proposal, Tree, RowCounts], Float32[Array, "b v"]]
    accept: Callable[[TargetProbs, Proposal, Tree, Any], Verdict]
    noise: Callable[..., Any]


def depth_of(parents: Sequence[int], max_depth: int, where: str = "") -> int:
    """Returns the depth of one row's tree, by its parents.

    Raises:
      InputError: a parent that does not come before its child, or a draft that is too deep.
    """
    depths = [0]  # the root's, whose place is -1 + 1
    for child, parent in enumerate(parents):
        if not -1 <= parent < child:
            raise InputError(
                f"expected a tree's parents before their children, from -1 to {child - 1} for "
                f"draft {child}{where}; got {parent}"
            )
        depths.append(depths[parent + 1] + 1)
    if (depth := max(depths)) > max_depth:
        raise InputError(f"expected a tree of depth {max_depth} at most{where}, got {depth}")
    return depth


def tree_of(proposal: Proposal) -> Tree:
    """Returns the tree of a proposal that has parents.

    Raises:
      InputError: see `depth_of`; but in compiled functions nothing is known of the values.
    """
    assert proposal.parents is not None
    if not isinstance(proposal.parents, Tracer):
        counts = np.asarray(proposal.num_tokens).tolist()
        for row, row_parents in enumerate(np.asarray(proposal.parents).tolist()):
            depth_of(row_parents[: counts[row]], proposal.max_depth, f" of row {row}")
    width = proposal.width
    is_real = jnp.arange(width) < proposal.num_tokens[:, None]
    # Padding hangs on the root, where no rule keeps it.
    parents = jnp.where(is_real, proposal.parents + 1, 0)
    edges = jax.nn.one_hot(jnp.pad(parents, ((0, 0), (1, 0))), width + 1, dtype=jnp.float32)
    # Every squaring doubles the length of the paths that are known, beginning with single edges.
    mask = jnp.minimum(edges + jnp.eye(width + 1), 1.0)
    for _ in range(max(proposal.max_depth - 1, 0).bit_length()):
        paths = jnp.einsum("bij,bjk->bik", mask, mask, precision="highest")
        mask = jnp.minimum(paths, 1.0)
    is_sibling = (parents[:, :, None] == parents[:, None, :]) & is_real[:, None, :]
    return Tree(
        parents,
        mask > 0,
        depths=jnp.sum(mask, axis=-1).astype(jnp.int32) - 1,  # the root is on every path
        is_real=is_real,
        is_earlier_sibling=is_sibling & jnp.tri(width, k=-1, dtype=bool),
        max_depth=proposal.max_depth,
    )


def kept_path(tree: Tree, is_accepted: Bool[Array, "b w"]) -> tuple[Int32[Array, "b p"], RowCounts]:
    """Returns the slots of the path that goes on while a child is accepted, and its drafts' number.

    Of several accepted siblings the first one counts. Entries after the path's end mean nothing.
    """
    is_accepted &= tree.is_real
    is_first = ~(tree.is_earlier_sibling & is_accepted[:, None, :]).any(axis=-1)
    is_chosen = jnp.pad(is_accepted & is_first, ((0, 0), (1, 0)), constant_values=True)
    # No walk is needed: a slot is kept if all of its path was chosen. Siblings never both are.
    return _in_order(tree, ~(tree.mask & ~is_chosen[:, None, :]).any(axis=-1))


def path_of(tree: Tree, slot: RowCounts) -> tuple[Int32[Array, "b p"], RowCounts]:
    """Returns the same for the path that ends at each row's slot [b]."""
    return _in_order(tree, tree.mask[jnp.arange(slot.shape[0]), slot])


def _in_order(tree: Tree, is_kept: Bool[Array, "b t"]) -> tuple[Int32[Array, "b p"], RowCounts]:
    at_depth = tree.depths[:, None, :] == jnp.arange(tree.max_depth + 1)[:, None]
    path = jnp.argmax(is_kept[:, None, :] & at_depth, axis=-1).astype(jnp.int32)
    return path, jnp.sum(is_kept, axis=-1, dtype=jnp.int32) - 1


def end_of(path: Int32[Array, "b p"], num_accepted: RowCounts) -> RowCounts:
    """Returns the last slot of each path, [b]."""
    return jnp.take_along_axis(path, num_accepted[:, None], axis=1)[:, 0]


def at_parents(leaf: Array, tree: Tree) -> Array:
    """Returns what `leaf` [b t ...] holds at the parent of each draft, [b w ...]."""
    return along(tree.parents, leaf)


def along(path: Int32[Array, "b p"], leaves: _Leaves) -> _Leaves:
    """Returns what every leaf [b t ...] holds at the slots of each row's path, [b p ...]."""

    def pick(leaf: Array) -> Array:
        index = path.reshape(*path.shape, *[1] * (leaf.ndim - 2))
        return jnp.take_along_axis(leaf, index, axis=1)

    return jax.tree.map(pick, leaves)


def follow(drawn: Int32[Array, "b t"], proposal: Proposal, tree: Tree) -> Verdict:
    """Keeps drafts while they are what the target draws at their parent; `drawn` is at each slot.

    Exact, whatever the drafts: the emitted tokens are the target's. Only the draws on the kept
    path are looked at, one for each depth, so the draws at one depth may share their noise.
    """
    path, num_accepted = kept_path(tree, at_parents(drawn, tree) == proposal.tokens)
    return Verdict(num_accepted, _at(drawn, end_of(path, num_accepted)), path)


def match_tree(logits: AnyLogits, proposal: Proposal, tree: Tree) -> Verdict:
    """Keeps drafts while each is the most likely token after its path; see `chain.match`."""
    return follow(best_token(logits), proposal, tree)


def _at(leaf: Int32[Array, "b t"], slot: RowCounts) -> RowCounts:
    return jnp.take_along_axis(leaf, slot[:, None], axis=1)[:, 0]


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
    tokens, scores, parents = _nodes_at(place, tokens, scores, _renumbered(parents, place))
    is_first = _is_on_first_branch(parents, scores > NEVER, max_depth)
    order = jnp.argsort(~is_first, axis=1, stable=True)
    tokens, scores, parents = _nodes_at(order, tokens, scores, _renumbered(parents, order))
    num_nodes = jnp.sum(scores > NEVER, axis=1, dtype=jnp.int32)
    padding = (0, 0), (0, num_draft_tokens - number)
    return Proposal(
        jnp.pad(tokens, padding),
        jnp.minimum(wanted, num_nodes),
        parents=jnp.pad(parents, padding, constant_values=-1),
        max_depth=min(max_depth, num_draft_tokens),
        scores=jnp.pad(scores, padding, constant_values=NEVER),
    )


def _nodes_at(place: Int32[Array, "b m"], *leaves: Array) -> list[Array]:
    return [jnp.take_along_axis(leaf, place, axis=1) for leaf in leaves]


def _renumbered(parents: Int32[Array, "b c"], place: Int32[Array, "b m"]) -> Int32[Array, "b c"]:
    """Returns parents as places among the chosen ones; a chosen node's parent is chosen."""
    places = jnp.argmax(place[:, None, :] == parents[..., None], axis=-1).astype(jnp.int32)
    return jnp.where(parents < 0, -1, places)


def _is_on_first_branch(
    parents: Int32[Array, "b m"], is_node: Bool[Array, "b m"], max_depth: int
) -> Bool[Array, "b m"]:
    """Returns which nodes, in the order of their scores, are best children of best children."""
    is_sibling = parents[:, :, None] == parents[:, None]
    is_best = is_node & ~(is_sibling & jnp.tri(parents.shape[1], k=-1, dtype=bool)).any(axis=-1)
    is_first = is_best & (parents < 0)
    for _ in range(max_depth - 1):
        (above,) = _nodes_at(jnp.maximum(parents, 0), is_first)
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
