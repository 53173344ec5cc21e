"""What trees of drafts have in common, however they are made: their options, their static size, and
what a drafter feeds its model, level by level.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jspec.common.errors import InputError
from jspec.common.typing import RowCounts
from jspec.drafters.spec import DrafterSpec, Options, option
from jspec.speculation.acceptance.types import Proposal

LIKELIEST, WITH, WITHOUT = "likeliest", "with", "without"


@dataclasses.dataclass(frozen=True)
class TreeOptions(Options):
    """Of the drafters that can grow a tree."""

    tree_depth: int = option(
        0,
        "For model and eagle: draft a tree at most this deep, of num_draft_tokens drafts in all; 0 "
        "drafts a chain.",
        between=(0, 16),
    )
    tree_branches: int = option(
        3,
        "With tree_depth: successors of a draft that are considered, and drafts of a level that "
        "are fed.",
        between=(1, 16),
    )
    tree_draws: str = option(
        LIKELIEST,
        "With tree_depth: the likeliest drafts; or tree_branches whole drafts, whose first tokens "
        "are drawn with or without replacement. Under coupled, whose noise they share, without.",
        among=(LIKELIEST, WITH, WITHOUT),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tree_branches", "tree_draws"):
            value = getattr(self, name)
            if self.tree_depth == 0 and value != getattr(type(self), name):
                raise InputError(f"expected {name} with tree_depth, got {value!r} without it")


class Shape(NamedTuple):
    """The static size of a tree; `draws` is how its drafts are chosen, see `TreeOptions`."""

    num_draft_tokens: int
    depth: int
    branches: int
    draws: str = LIKELIEST

    @property
    def num_fed(self) -> int:
        """Drafts that are fed: those of every level but the last."""
        if self.draws == LIKELIEST:
            return (self.depth - 1) * self.branches
        return self.num_draft_tokens - self.branches

    @property
    def levels(self) -> tuple[int, ...]:
        """How many branches reach each level, where they are drawn: all of them the first."""
        sizes = [self.branches]
        for num_left in range(self.depth - 1, 0, -1):
            # As even as can be, and never more than in the level before.
            sizes.append(-(-(self.num_draft_tokens - sum(sizes)) // num_left))
        return tuple(sizes)


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


def if_wanted(
    propose: Callable[[Any], tuple[Proposal, Any]], state: Any, wanted: RowCounts
) -> tuple[Proposal, Any]:
    """Returns what `propose` does of the state; nothing is computed where no row wants drafts."""
    shapes = jax.eval_shape(propose, state)[0]
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def body(carry: tuple[Array, Proposal, Any]) -> tuple[Array, Proposal, Any]:
        return jnp.array(False), *propose(carry[2])

    # A loop of one trip or none leaves the caches in place; a `lax.cond` would copy them.
    carry = (wanted > 0).any(), empty, state
    return jax.lax.while_loop(lambda carry: carry[0], body, carry)[1:]


def tree_shape(spec: DrafterSpec) -> Shape | None:
    """Returns the shape of the tree that the options ask for; None for a chain.

    Raises:
      InputError: fewer drafts than levels; or branches that do not come to as many drafts.
    """
    options = spec.options
    if options.tree_depth == 0:
        return None
    if spec.num_draft_tokens < options.tree_depth:
        raise InputError(
            f"expected num_draft_tokens, a tree's drafts in all, of at least tree_depth, "
            f"{options.tree_depth}; got {spec.num_draft_tokens}"
        )
    shape = Shape(
        spec.num_draft_tokens, options.tree_depth, options.tree_branches, options.tree_draws
    )
    if shape.draws != LIKELIEST:
        _check_drawn(shape, options.draft_confidence)
    return shape


def _check_drawn(shape: Shape, draft_confidence: float) -> None:
    least, most = shape.branches + shape.depth - 1, shape.branches * shape.depth
    if not least <= shape.num_draft_tokens <= most:
        raise InputError(
            f"expected num_draft_tokens from {least} to {most}, with tree_draws={shape.draws} all "
            f"drafts of {shape.branches} branches of at most {shape.depth}; got "
            f"{shape.num_draft_tokens}"
        )
    if draft_confidence > 0:
        # To drop a drawn draft because it looks unlikely would bias what is emitted.
        raise InputError(
            f"expected draft_confidence 0 with tree_draws={shape.draws}, got {draft_confidence}"
        )
