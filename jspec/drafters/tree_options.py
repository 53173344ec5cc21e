"""The options of drafters that can draft a tree, and the static size that they ask for."""

import dataclasses
from typing import Any, NamedTuple

from jspec.common.errors import InputError
from jspec.drafters.spec import DrafterSpec, Options, option
from jspec.speculation.control import Kind

LIKELIEST, WITH, WITHOUT = "likeliest", "with", "without"


@dataclasses.dataclass(frozen=True)
class TreeSizeOptions(Options):
    """Of the drafters that can draft a tree."""

    tree_depth: int = option(
        0,
        "For model, eagle, medusa, prompt_lookup, suffix and recycle: draft a tree at most this "
        "deep, of num_draft_tokens drafts in all; 0 drafts a chain.",
        between=(0, 16),
    )
    tree_branches: int = option(
        3,
        "With tree_depth: successors of a draft that are considered, and, of model and eagle, "
        "drafts of a level that are fed.",
        between=(1, 16),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree_depth == 0 and self.tree_branches != type(self).tree_branches:
            raise InputError(f"expected tree_branches with tree_depth, got {self.tree_branches}")


@dataclasses.dataclass(frozen=True)
class TreeOptions(TreeSizeOptions):
    """Of those whose drafts have a distribution from which a tree can be drawn."""

    tree_draws: str = option(
        LIKELIEST,
        "With tree_depth: the likeliest drafts; or tree_branches whole drafts, whose first tokens "
        "are drawn with or without replacement. Under coupled, whose noise they share, without.",
        among=(LIKELIEST, WITH, WITHOUT),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree_depth == 0 and self.tree_draws != LIKELIEST:
            raise InputError(f"expected tree_draws with tree_depth, got {self.tree_draws!r}")


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


class DraftingTrees:
    """A drafter that has a field `shape`, that of its trees."""

    shape: Shape

    @property
    def tree_depth(self) -> int:
        """The greatest depth of its trees."""
        return self.shape.depth

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Those of its chains, as trees; drawn trees have no scores."""
        own: tuple[Kind, ...] = super().kinds  # type: ignore[misc]
        is_tree, depth = self.shape.draws == LIKELIEST, self.shape.depth
        return tuple(kind._replace(most=min(kind.most, depth), is_tree=is_tree) for kind in own)


def certain_tree_shape(spec: DrafterSpec) -> Shape | None:
    """Returns the shape for a drafter that draws nothing.

    It drafts a chain beside members of a cascade that draw their trees.
    """
    return tree_shape(spec) if spec.options.tree_draws == LIKELIEST else None


def for_chains(options: Any) -> Any:
    """Returns a drafter's options without a tree."""
    none = {field.name: field.default for field in dataclasses.fields(TreeOptions)}
    return dataclasses.replace(options, **none)


def with_at_most_a_tree(spec: DrafterSpec) -> DrafterSpec:
    """Returns it with no more drafts than a tree has that grows level by level."""
    branches, depth = spec.options.tree_branches, spec.options.tree_depth
    if depth == 0 or spec.options.tree_draws != LIKELIEST:
        return spec
    return spec.with_at_most(branches + (depth - 1) * branches**2)


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
