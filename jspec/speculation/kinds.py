"""Kinds of proposals: those of one kind are accepted about equally often, see `control`."""

from collections.abc import Sequence
from typing import NamedTuple


class Kind(NamedTuple):
    """A kind of proposal, whose drafts are accepted about equally often.

    Attributes:
      drafter: the name of the drafter; kinds of one drafter cost the same.
      first: assumed probability, before any round, that the first draft is accepted.
      later: likewise for a later draft once those before it are accepted.
      most: the most drafts that such a proposal can have.
      is_certain: whether the drafter makes such a proposal in every round in which it is asked.
      costs_when_silent: whether the drafter runs a model before it proposes nothing.
      is_tree: whether the proposal is a tree with scores; `most` is then its greatest depth.
    """

    drafter: str
    first: float
    later: float
    most: int = 2**31 - 1
    is_certain: bool = False
    costs_when_silent: bool = False
    is_tree: bool = False


def drafters_of(kinds: Sequence[Kind]) -> list[str]:
    """Returns the names of the drafters that make these kinds of proposals, each once, in order."""
    return list(dict.fromkeys(kind.drafter for kind in kinds))
