"""Continuations of a text side by side, and the tree of the best of them."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jspec.common.typing import RowCounts
from jspec.speculation.acceptance.tree import NEVER, best_tree, tree_of
from jspec.speculation.types import Proposal


class Branches(NamedTuple):
    """Continuations of each text, of which several may begin alike.

    Attributes:
      tokens: [b n w].
      scores: of each beginning, [b n w]; see above. -inf from a branch's end on.
    """

    tokens: Int32[Array, "b n w"]
    scores: Float32[Array, "b n w"]


def join_branches(parts: Sequence[Branches]) -> Branches:
    """Returns all branches of several sources, padded to the longest."""
    width = max(part.tokens.shape[2] for part in parts)

    def join(name: str, filling: float) -> Array:
        leaves = [getattr(part, name) for part in parts]
        missing = [((0, 0), (0, 0), (0, width - leaf.shape[2])) for leaf in leaves]
        padded = map(functools.partial(jnp.pad, constant_values=filling), leaves, missing)
        return jnp.concatenate(list(padded), axis=1)

    return Branches(join("tokens", 0.0), join("scores", NEVER))


def branches_of(
    proposal: Proposal, first: Float32[Array, "b"], later: Float32[Array, "b"]
) -> Branches:
    """Returns the drafts of a proposal as branches, one for each node of a tree.

    Without scores they are estimated to be kept with the probabilities `first` and `later` of each
    row, once the drafts before them are.
    """
    scores = proposal.scores
    if proposal.parents is None:
        place = jnp.arange(proposal.width)
        is_real = place < proposal.num_tokens[:, None]
        chain = jnp.where(is_real, _by_depth(first, later, place), NEVER)
        return Branches(proposal.tokens[:, None], chain[:, None])
    tree = tree_of(proposal)
    if scores is None:
        scores = jax.vmap(_by_depth)(first, later, tree.depths[:, 1:] - 1)
    # The slot on each node's path at each depth; the node itself comes last.
    depth = jnp.arange(1, proposal.max_depth + 1)
    at_depth = tree.mask[:, 1:, None, 1:] & (tree.depths[:, None, None, 1:] == depth[:, None])
    slot = jnp.argmax(at_depth, axis=-1)  # [b w depth]
    is_node = at_depth.any(axis=-1) & tree.is_real[..., None]

    def along(leaf: Array) -> Array:
        return jax.vmap(lambda row, index: row[index])(leaf, slot)

    return Branches(along(proposal.tokens), jnp.where(is_node, along(scores), NEVER))


def _by_depth(first: Array, later: Array, place: Array) -> Array:
    return jnp.log(first)[..., None] + place.astype(jnp.float32) * jnp.log(later)[..., None]


def have_same_paths(tokens: Int32[Array, "b n w"]) -> Bool[Array, "b n n w"]:
    """Returns whether two branches have their first tokens in common, up to each place."""
    return jnp.cumprod(tokens[:, :, None] == tokens[:, None], axis=-1, dtype=jnp.int8) > 0


def merge_branches(
    branches: Branches, num_draft_tokens: int, wanted: RowCounts, num_children: int | None = None
) -> Proposal:
    """Returns the tree of the best nodes, at most `num_draft_tokens` and `wanted` of each row.

    Of each node's children at most the best `num_children` are taken.
    """
    tokens, (b, n, w) = branches.tokens, branches.tokens.shape
    # By the smallest on the path: a source may be surer of a path than of its beginning.
    scores = jax.lax.cummin(branches.scores, axis=2)
    is_node = scores > NEVER
    same = have_same_paths(tokens) & is_node[:, :, None] & is_node[:, None]
    # Each path belongs to the first branch that has it; so its beginning comes first.
    owner = jnp.argmax(same, axis=2).astype(jnp.int32)
    scores = jnp.max(jnp.where(same, scores[:, None], NEVER), axis=2)
    is_own = is_node & (owner == jnp.arange(n)[:, None])
    if num_children is not None and num_children < n:
        is_few = _is_among_best(same, jnp.where(is_own, scores, NEVER), num_children)
        # What hangs on a node that is left out is left out as well.
        is_few = jnp.take_along_axis(is_few, owner, axis=1)
        is_own &= jnp.cumprod(is_few, axis=2, dtype=jnp.int8) > 0
    scores = jnp.where(is_own, scores, NEVER)
    above = owner[..., :-1] * w + jnp.arange(w - 1)
    parents = jnp.pad(above, ((0, 0), (0, 0), (1, 0)), constant_values=-1)
    flat = [leaf.reshape(b, n * w) for leaf in (tokens, scores, parents)]
    return best_tree(*flat, num_draft_tokens=num_draft_tokens, wanted=wanted, max_depth=w)


def _is_among_best(
    same: Bool[Array, "b n n w"], scores: Float32[Array, "b n w"], number: int
) -> Bool[Array, "b n w"]:
    """Returns whether at most `number` nodes have the same parent and come first by score."""
    is_sibling = jnp.pad(same[..., :-1], [(0, 0)] * 3 + [(1, 0)], constant_values=True)
    score, rival = scores[:, :, None], scores[:, None]
    is_first = jnp.tri(scores.shape[1], k=-1, dtype=bool)[..., None]
    is_better = (rival > score) | ((rival == score) & is_first & (rival > NEVER))
    return jnp.sum(is_sibling & is_better, axis=2) < number
