"""The options of drafters that can draft a tree, and the static size that they ask for."""

import dataclasses
from typing import NamedTuple

from jspec.common.errors import InputError
from jspec.drafters.spec import DrafterSpec, Options, option


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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree_depth == 0 and self.tree_branches != type(self).tree_branches:
            raise InputError(f"expected tree_branches with tree_depth, got {self.tree_branches}")


class Shape(NamedTuple):
    """The static size of a tree."""

    num_draft_tokens: int
    depth: int
    branches: int

    @property
    def num_fed(self) -> int:
        """Drafts that are fed: those of every level but the last."""
        return (self.depth - 1) * self.branches


def tree_shape(spec: DrafterSpec) -> Shape | None:
    """Returns the shape of the tree that the options ask for; None for a chain.

    Raises:
      InputError: fewer drafts than levels.
    """
    options = spec.options
    if options.tree_depth == 0:
        return None
    if spec.num_draft_tokens < options.tree_depth:
        raise InputError(
            f"expected num_draft_tokens, a tree's drafts in all, of at least tree_depth, "
            f"{options.tree_depth}; got {spec.num_draft_tokens}"
        )
    return Shape(spec.num_draft_tokens, options.tree_depth, options.tree_branches)
