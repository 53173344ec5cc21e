"""Trees of drafts: of one shape for every round, grown where the drafter is sure, or drawn.

Static: a tree of one shape for every round, by how often the token of each rank is kept.

    rates    depth 1: 0.4 0.2 0.1       path    rank 0   0.40        the best nodes by the product
             depth 2: 0.5 0.1                   0, 0     0.20        of the rates on their paths
                                                rank 1   0.20

For drafters that know the best tokens of a position in order, but not how likely each is in this
round (Medusa, arXiv 2401.10774, section 2.3.3; Token Recycling, 2408.08696).

Dynamic: a tree that grows where the drafter is sure (EAGLE-2, arXiv 2406.16858).

    level 1   the likeliest tokens after the last, as many as there are `branches`
    level 2   all of them are fed in one call; each has `branches` likeliest successors, of which
              the best ones, by the product of the probabilities on their paths, are fed next
      ...     up to `depth` levels
    at last   of all tokens that were looked at, the best `num_draft_tokens` are put forward

A token's path is never likelier than that of its parent, so the best tokens are a tree. They follow
from the context alone: the rule follows what the target draws among a node's children, at any
temperature.

Sampled: whole drafts that are drawn, as a tree: `tree_draws`.

    block   branch 1: a1 a2 a3 | branch 2: b1 b2 b3 | branch 3: c1 c2       (levels of 3, 3 and 2)

The first level are draws from one distribution, with replacement (SpecInfer, arXiv 2305.09781) or
without, the `branches` largest of logits and Gumbel noise (2402.14160). Each branch goes on by one
draw at a time, so the block has the first branch first: where it is kept, nothing is moved.

Drawn with replacement, branches may begin alike. Then they are one path: if b1 is a1, b2 is drawn
as a second child of a1. b1 is_self stays where it is, a draft that was drawn and refused if a1 was.
What a draft was really drawn from is reported: without replacement, that is what its earlier
siblings have left. At temperature 0 a branch begins with each of the likeliest tokens, for certain.
"""

import functools
import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from jspec.common.typing import Params, RowCounts
from jspec.drafters.chain import ChainDrafter, spread
from jspec.drafters.options import LIKELIEST, WITHOUT
from jspec.drafters.spec import Shape
from jspec.kernels import run_if
from jspec.sampling.distribution import best_token, sample, sampling_probs
from jspec.sampling.noise import gumbel_noise
from jspec.sampling.settings import COLDEST, SamplingSettings
from jspec.speculation.acceptance.tree import best_tree
from jspec.speculation.types import Proposal, RoundInputs


class StaticTree(NamedTuple):
    """A tree's nodes, the best first, and so each after its parent.

    Attributes:
      parents: of each node, -1 for the root.
      ranks: of each node's token among the tokens of its position.
      depths: 1 for the children of the root.
      scores: the logarithms of the estimated probabilities that the nodes are kept.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    depths: tuple[int, ...]
    scores: tuple[float, ...]

    @property
    def widths(self) -> tuple[int, ...]:
        """How many tokens of a position are asked for, by depth."""
        pairs = list(zip(self.depths, self.ranks, strict=True))
        return tuple(
            1 + max(rank for at, rank in pairs if at == depth)
            for depth in range(1, max(self.depths) + 1)
        )


def best_static_tree(rates: Sequence[Sequence[float]], num_nodes: int) -> StaticTree:
    """Returns the tree of at most `num_nodes` nodes that promises the most accepted drafts.

    `rates[d][r]` is how often the token of rank r is kept at depth d + 1, once its parent is; there
    are no deeper nodes than rates. Nodes that are never kept are left out.
    """
    nodes: list[tuple[int, int, int, float]] = []
    heap: list[tuple[float, int, int, int]] = []  # (-score, parent, rank, depth)

    def offer(parent: int, depth: int, score: float) -> None:
        for rank, rate in enumerate(rates[depth - 1] if depth <= len(rates) else ()):
            if rate > 0:
                heapq.heappush(heap, (-(score + math.log(rate)), parent, rank, depth))

    offer(-1, 1, 0.0)
    # A child's score is at most its parent's, so no better node comes later.
    while heap and len(nodes) < num_nodes:
        loss, parent, rank, depth = heapq.heappop(heap)
        nodes.append((parent, rank, depth, -loss))
        offer(len(nodes) - 1, depth + 1, -loss)
    return StaticTree(*map(tuple, zip(*nodes, strict=True)))  # type: ignore[arg-type]


class Fed(NamedTuple):
    """One level of drafts to be fed.

    Attributes:
      tokens: [b k].
      mask: what each sees of the k·level drafts that were fed so far, is_self included, [b k f].
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
    """Grows a tree from the logits of the first level, [b u], of the tokens `ids` or 0 to u-1.

    `feed` takes the memory, such as a cache, and a level to the logits after each of its drafts,
    and the memory. Each row has at most `wanted` drafts, of paths that are no less likely than
    `min_confidence`.
    """
    k, b = shape.branches, logits.shape[0]
    root = jnp.full([b, 1], -1, jnp.int32)
    new = _successors(logits[:, None], jnp.zeros([b, 1]), root, k, ids)
    pool, first, levels = new, 0, []
    mask = jnp.zeros([b, 1, 0], bool)  # of the level before
    is_self = jnp.broadcast_to(jnp.eye(k, dtype=bool), (b, k, k))
    before = jnp.zeros([b, k], jnp.int32)  # places in the pool of the level before
    for depth in range(1, shape.depth):
        # Of a level's candidates the best are fed. The first level has no more than that.
        place = jax.lax.top_k(new.scores, k)[1].astype(jnp.int32)
        at = lambda leaf, place=place: jnp.take_along_axis(leaf, place, axis=1)  # noqa: E731
        parent = at(new.parents)
        above = jnp.argmax(before[:, None, :] == parent[..., None], axis=-1).astype(jnp.int32)
        inherited = jnp.take_along_axis(mask, above[..., None], axis=1)
        mask = jnp.concatenate(
            [jnp.broadcast_to(inherited, (b, k, inherited.shape[2])), is_self], -1
        )
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


def propose_grown(
    drafter: Any, params: Params, state: Any, inputs: RoundInputs
) -> tuple[Proposal, Any]:
    """Returns the tree that `drafter.grow` makes of what each row wants, and the state after it.

    Nothing is computed where no row wants drafts.
    """
    wanted = inputs.wanted()
    # Traced once for its shapes and for the loop.
    grow = jax.jit(functools.partial(drafter.grow, params, inputs, wanted), inline=True)
    shapes = jax.eval_shape(grow, state)[0]
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return run_if((wanted > 0).any(), lambda carry: grow(carry[1]), (empty, state))


def make_tree(
    drafter: ChainDrafter,
    feed: FeedFn,
    memory: Any,
    logits: Float32[Array, "b u"],
    inputs: RoundInputs,
    *,
    wanted: RowCounts,
    ids: Int32[Array, "u"] | None = None,
) -> Grown:
    """Returns the tree of the likeliest drafts, see `grow_tree`, or that of drawn ones."""
    shape = drafter.shape
    assert shape is not None
    if shape.draws == LIKELIEST:
        confidence = drafter.min_confidence
        return grow_tree(
            feed, memory, logits, shape, wanted=wanted, min_confidence=confidence, ids=ids
        )
    size = drafter.target_vocab_size
    return draw_tree(feed, memory, logits, shape, inputs, wanted=wanted, vocab_size=size, ids=ids)


class _Level(NamedTuple):
    """The drafts of one level.

    Attributes:
      tokens: [b n].
      probs: the distributions from which they were drawn, [b n v].
      parents: the branches on which their parents lie, [b n]; 0 in the first level.
      first: the first branch that has the same path, [b n].
    """

    tokens: Int32[Array, "b n"]
    probs: Float32[Array, "b n v"]
    parents: Int32[Array, "b n"]
    first: Int32[Array, "b n"]


def draw_tree(
    feed: FeedFn,
    memory: Any,
    logits: Float32[Array, "b u"],
    shape: Shape,
    inputs: RoundInputs,
    *,
    wanted: RowCounts,
    vocab_size: int,
    ids: Int32[Array, "u"] | None = None,
) -> Grown:
    """Draws a tree, level by level; the arguments are those of `grow_tree`."""
    places = _places(shape)
    settings = [inputs.settings] * shape.branches  # each branch has processors of its own
    levels, logits = [], logits[:, None]
    before = jnp.zeros([len(wanted), shape.branches], jnp.int32)  # parents of the level
    for depth, size in enumerate(shape.levels):
        settings, branches = settings[:size], before[:, :size]
        if depth > 0:
            level = levels[-1]
            fed = Fed(
                jnp.maximum(level.tokens[:, :size], 0),  # NO_TOKEN ends the row's proposal
                _own_branches(shape, depth, len(wanted)), depth, level.parents[:, :size],
            )  # fmt: skip
            logits, memory = feed(memory, fed)
        # Branches that begin alike draw from the very same numbers.
        logits = jnp.take_along_axis(spread(logits, ids, vocab_size), branches[..., None], axis=1)
        noise = _noise(inputs, places[:size, depth], depth, shape.draws, vocab_size)
        level = _draw(logits, settings, noise, branches, is_taken=depth == 0, draws=shape.draws)
        settings = [branch.after(level.tokens[:, i]) for i, branch in enumerate(settings)]
        before = level.first
        levels.append(level)
    return _assemble(levels, shape, places, memory, wanted)


def _draw(
    logits: Float32[Array, "b n v"],
    settings: list[SamplingSettings],
    noise: Float32[Array, "b n v"],
    parents: Int32[Array, "b n"],
    *,
    is_taken: bool,
    draws: str,
) -> _Level:
    """Draws one level; `is_taken`: its drafts are siblings, all of one distribution."""
    logits = jnp.stack([branch.process(logits[:, i]) for i, branch in enumerate(settings)], axis=1)
    plain = settings[0].without_processors()
    probs = sampling_probs(logits, plain)
    is_greedy = (plain.temperature < COLDEST)[:, None]
    ids = jnp.arange(logits.shape[-1])
    taken = jnp.zeros([len(logits), len(ids)], bool)
    tokens, dists = [], []
    for i in range(len(settings)):
        drawn = jnp.where(taken, 0.0, probs[:, i])
        best = best_token(jnp.where(taken, -jnp.inf, logits[:, i]))
        token = jnp.where(is_greedy[:, 0], best, sample(drawn, noise[:, i]))
        total = jnp.sum(drawn, axis=-1, keepdims=True)
        drawn = drawn / jnp.where(total > 0, total, 1.0)
        # At temperature 0 a draft is certain.
        is_token = ids == token[:, None]
        dists.append(jnp.where(is_greedy, is_token.astype(jnp.float32), drawn))
        tokens.append(token)
        if is_taken:
            taken |= is_token & (is_greedy | (draws == WITHOUT))
    tokens = jnp.stack(tokens, axis=1)
    is_same = (tokens[:, :, None] == tokens[:, None]) & (parents[:, :, None] == parents[:, None])
    first = jnp.argmax(is_same, axis=-1).astype(jnp.int32)
    return _Level(tokens, jnp.stack(dists, axis=1), parents, first)


def _noise(
    inputs: RoundInputs, places: np.ndarray, depth: int, draws: str, vocab_size: int
) -> Float32[Array, "b n v"]:
    """Returns the noise of one level's drafts, which lie at these places of the block."""
    if inputs.has_shared_noise:
        # That of the position, with which the target will draw whatever the path.
        places = np.full_like(places, depth)
    elif depth == 0 and draws == WITHOUT:
        places = np.full_like(places, places[0])  # one noise, of which the largest sums are taken
    keys = inputs.rng_keys[:, places]
    noise = gumbel_noise(keys.reshape(-1), vocab_size, inputs.settings.is_random)
    return noise.reshape(*keys.shape, vocab_size)


def _places(shape: Shape) -> np.ndarray:
    """Returns the place in the block of each branch's draft at each level, [branches depth]."""
    is_there = np.arange(shape.branches)[:, None] < np.array(shape.levels)
    return np.cumsum(is_there).reshape(is_there.shape) - 1


def _own_branches(shape: Shape, depth: int, batch_size: int) -> Bool[Array, "b k f"]:
    """Returns what the drafts fed at a depth see of all that were fed so far: their branches."""
    sizes = shape.levels[1 : depth + 1]
    mask = np.concatenate([np.eye(sizes[-1], size, dtype=bool) for size in sizes], axis=1)
    return jnp.broadcast_to(mask, (batch_size, *mask.shape))


def _assemble(
    levels: list[_Level], shape: Shape, places: np.ndarray, memory: Any, wanted: RowCounts
) -> Grown:
    """Puts the branches in sequence, and what was fed level by level."""
    num_fed = [*shape.levels[1:], 0]
    offsets = np.cumsum([0, *num_fed])
    parents, fed_parents = [jnp.full_like(levels[0].parents, -1)], [levels[0].parents - 1]
    for depth, level in enumerate(levels[1:]):
        parents.append(jnp.asarray(places[:, depth], jnp.int32)[level.parents])
        fed_parents.append(int(offsets[depth]) + level.parents)

    def joined(parts: list[Array], sizes: list[int]) -> Array:
        cut = [part[:, :size] for part, size in zip(parts, sizes, strict=True)]
        return jnp.concatenate(cut, axis=1)

    by_level = [places[:size, depth] for depth, size in enumerate(shape.levels)]
    order = np.argsort(np.concatenate(by_level))
    tokens, probs = [level.tokens for level in levels], [level.probs for level in levels]
    num_tokens = jnp.minimum(wanted, shape.num_draft_tokens)
    # A cascade adds up what its members have on record.
    is_padding = jnp.arange(shape.num_draft_tokens) >= num_tokens[:, None]
    on_record = joined(probs, list(shape.levels))[:, order]
    proposal = Proposal(
        joined(tokens, list(shape.levels))[:, order],
        num_tokens,
        jnp.where(is_padding[..., None], 0.0, on_record),
        parents=joined(parents, list(shape.levels))[:, order],
        max_depth=shape.depth,
    )
    return Grown(proposal, joined(tokens, num_fed), joined(fed_parents, num_fed), memory)
