"""A tree that grows where the drafter is sure (EAGLE-2, arXiv 2406.16858).

    level 1   the likeliest tokens after the last one: as many as there are `branches`
    level 2   all of them are fed in one call; each has `branches` likeliest successors, of which
              the best ones, by the product of the probabilities on their paths, are fed next
      ...     up to `depth` levels
    at last   of all tokens that were looked at, the best `num_draft_tokens` are put forward

A token's path is never likelier than that of its parent, so the best tokens are a tree; see
`merged_tree`. They follow from the context alone: the rule follows what the target draws among a
node's children, at any temperature.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jspec.common.typing import RowCounts
from jspec.drafters.tree_options import Shape
from jspec.kernels import run_if
from jspec.sampling.distribution import best_token
from jspec.speculation.acceptance.types import Proposal
from jspec.speculation.best_nodes import best_tree


class Fed(NamedTuple):
    """One level of drafts to be fed.

    Attributes:
      tokens: [b k].
      mask: what each sees of the k·level drafts that were fed so far, itself included, [b k f].
      depth: of them all, 1 for the first level.
      parents: places of their parents in the level before, [b k]; 0 for the first level.
    """

    tokens: Int32[Array, "b k"]
    mask: Bool[Array, "b k f"]
    depth: int
    parents: Int32[Array, "b k"]

    def positions(self, length: RowCounts) -> Int32[Array, "b k"]:
        """Returns the drafts' positions after `length` tokens."""
        return jnp.broadcast_to(length[:, None] + self.depth - 1, self.tokens.shape)


class _Pool(NamedTuple):
    """All tokens looked at, level by level; a parent is a place in the pool, -1 for the root."""

    tokens: Int32[Array, "b c"]
    scores: Float32[Array, "b c"]  # log-probability of the path
    parents: Int32[Array, "b c"]


class Grown(NamedTuple):
    """A tree, and what was fed for it.

    Attributes:
      proposal: the best tokens.
      fed: the tokens that were fed, [b f].
      fed_parents: their parents among them, [b f], -1 for the root.
      memory: as the last call left it.
    """

    proposal: Proposal
    fed: Int32[Array, "b f"]
    fed_parents: Int32[Array, "b f"]
    memory: Any


FeedFn = Callable[[Any, Fed], tuple[Float32[Array, "b k u"], Any]]


def grow_tree(
    feed: FeedFn,
    memory: Any,
    logits: Float32[Array, "b u"],
    shape: Shape,
    *,
    wanted: RowCounts,
    min_confidence: float = 0.0,
    ids: Int32[Array, "u"] | None = None,
) -> Grown:
    """Grows a tree from the logits of the first level.

    Args:
      feed: (memory, a level) -> the logits after each of its drafts, and the memory.
      memory: such as a cache.
      logits: after the last committed token.
      shape: of the tree.
      wanted: the most drafts of each row.
      min_confidence: drafts whose paths are less likely are not put forward.
      ids: of the tokens that the logits are of; None for 0 to u-1.
    """
    k, b = shape.branches, logits.shape[0]
    root = jnp.full([b, 1], -1, jnp.int32)
    new = _successors(logits[:, None], jnp.zeros([b, 1]), root, k, ids)
    pool, first, levels = new, 0, []
    mask = jnp.zeros([b, 1, 0], bool)  # of the level before
    own = jnp.broadcast_to(jnp.eye(k, dtype=bool), (b, k, k))
    before = jnp.zeros([b, k], jnp.int32)  # places in the pool of the level before
    for depth in range(1, shape.depth):
        # Of a level's candidates the best are fed. The first level has no more than that.
        place = _best_places(new.scores, k)
        at = lambda leaf, place=place: jnp.take_along_axis(leaf, place, axis=1)  # noqa: E731
        parent = at(new.parents)
        above = jnp.argmax(before[:, None, :] == parent[..., None], axis=-1).astype(jnp.int32)
        inherited = jnp.take_along_axis(mask, above[..., None], axis=1)
        mask = jnp.concatenate([jnp.broadcast_to(inherited, (b, k, inherited.shape[2])), own], -1)
        level = Fed(at(new.tokens), mask, depth, above)
        logits_, memory = feed(memory, level)
        fed_parents = jnp.where(parent < 0, -1, above + (depth - 2) * k)
        levels.append((level.tokens, fed_parents))
        before = place + first
        first = pool.tokens.shape[1]
        new = _successors(logits_, at(new.scores), before, k, ids)
        pool = _Pool(*(jnp.concatenate(pair, axis=1) for pair in zip(pool, new, strict=True)))
    if min_confidence > 0:
        is_sure = pool.scores >= jnp.log(min_confidence)
        pool = pool._replace(scores=jnp.where(is_sure, pool.scores, -jnp.inf))
    proposal = best_tree(*pool, shape.num_draft_tokens, wanted, max_depth=shape.depth)
    fed, fed_parents = (
        jnp.concatenate(parts, axis=1) if parts else jnp.zeros([b, 0], jnp.int32)
        for parts in (zip(*levels, strict=True) if levels else ((), ()))
    )
    return Grown(proposal, fed, fed_parents, memory)


def _successors(
    logits: Float32[Array, "b k u"],
    scores: Float32[Array, "b k"],
    parents: Int32[Array, "b k"],
    number: int,
    ids: Int32[Array, "u"] | None,
) -> _Pool:
    """Returns the likeliest successors of every node, best first, with their paths' scores."""
    total = jax.nn.logsumexp(logits, axis=-1)
    tokens, gains = [], []
    # A few maxima instead of a sort of the vocabulary, which takes ten times as long on a CPU.
    for _ in range(number):
        token = jnp.maximum(best_token(logits), 0)  # NO_TOKEN, of no distribution, scores -inf
        tokens.append(token if ids is None else ids[token])
        gain = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0] - total
        gains.append(jnp.nan_to_num(gain, nan=-jnp.inf))
        logits = jnp.where(jnp.arange(logits.shape[-1]) == token[..., None], -jnp.inf, logits)
    b = len(scores)
    new = scores[..., None] + jnp.stack(gains, axis=-1)
    return _Pool(
        jnp.stack(tokens, axis=-1).reshape(b, -1),
        new.reshape(b, -1),
        jnp.repeat(parents, number, axis=1),
    )


def _best_places(scores: Float32[Array, "b c"], number: int) -> Int32[Array, "b n"]:
    """Returns the places of the largest scores, in falling order; the first of equals first."""
    return jax.lax.top_k(scores, number)[1].astype(jnp.int32)


def if_wanted(
    propose: Callable[[Any], tuple[Proposal, Any]], state: Any, wanted: RowCounts
) -> tuple[Proposal, Any]:
    """Returns what `propose` does of the state; nothing is computed where no row wants drafts."""
    shapes = jax.eval_shape(propose, state)[0]
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    return run_if((wanted > 0).any(), lambda carry: propose(carry[1]), (empty, state))
