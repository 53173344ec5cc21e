"""Whole drafts that are drawn, as a tree: `tree_draws`.

    block   branch 1: a1 a2 a3 | branch 2: b1 b2 b3 | branch 3: c1 c2       (levels of 3, 3 and 2)

The first level are draws from one distribution, with replacement (SpecInfer, arXiv 2305.09781) or
without, the `branches` largest of logits and Gumbel noise (2402.14160). Each branch goes on by one
draw at a time, so the block has the first branch first: where it is kept, nothing is moved.

Drawn with replacement, branches may begin alike. Then they are one path: if b1 is a1, b2 is drawn
as a second child of a1. b1 itself stays where it is, a draft that was drawn and refused if a1 was.
What a draft was really drawn from is reported: without replacement, that is what its earlier
siblings have left. At temperature 0 a branch begins with each of the likeliest tokens, for certain.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from jspec.common.typing import RowCounts
from jspec.drafters.chain import ChainDrafter
from jspec.drafters.draw import spread
from jspec.drafters.dynamic_tree import Fed, FeedFn, Grown, grow_tree
from jspec.drafters.tree_options import LIKELIEST, WITHOUT, Shape
from jspec.sampling.distribution import best_token, sample, sampling_probs
from jspec.sampling.noise import gumbel_noise
from jspec.sampling.settings import COLDEST, SamplingSettings
from jspec.speculation.acceptance.types import Proposal
from jspec.speculation.types import RoundInputs


def make_tree(
    drafter: ChainDrafter,
    shape: Shape,
    feed: FeedFn,
    memory: Any,
    logits: Float32[Array, "b u"],
    inputs: RoundInputs,
    *,
    wanted: RowCounts,
    ids: Int32[Array, "u"] | None = None,
) -> Grown:
    """Returns the tree of the likeliest drafts, see `grow_tree`, or that of drawn ones."""
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
        settings, own = settings[:size], before[:, :size]
        if depth > 0:
            level = levels[-1]
            fed = Fed(
                jnp.maximum(level.tokens[:, :size], 0),  # NO_TOKEN ends the row's proposal
                _own_branches(shape, depth, len(wanted)), depth, level.parents[:, :size],
            )  # fmt: skip
            logits, memory = feed(memory, fed)
        # Branches that begin alike draw from the very same numbers.
        logits = jnp.take_along_axis(spread(logits, ids, vocab_size), own[..., None], axis=1)
        noise = _noise(inputs, places[:size, depth], depth, shape.draws, vocab_size)
        level = _draw(logits, settings, noise, own, is_taken=depth == 0, draws=shape.draws)
        settings = [one.after(level.tokens[:, i]) for i, one in enumerate(settings)]
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
    logits = jnp.stack([one.process(logits[:, i]) for i, one in enumerate(settings)], axis=1)
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
    """Puts the branches one after the other, and what was fed level after level."""
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
