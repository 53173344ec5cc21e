"""The kinds of drafters that can be trained, by name."""

from collections.abc import Mapping
from typing import Any

from jspec.common.dataclass_fields import read_fields
from jspec.common.errors import check_among
from jspec.training.blockwise import BlockwiseTraining
from jspec.training.draft_model import DraftModelTraining
from jspec.training.eagle import EagleTraining
from jspec.training.lookahead import LookaheadTraining
from jspec.training.medusa import MedusaTraining
from jspec.training.recipe import Recipe
from jspec.training.training import Training

KINDS: Mapping[str, type[Training]] = {
    "blockwise": BlockwiseTraining,
    "draft_model": DraftModelTraining,
    "eagle": EagleTraining,
    "lookahead": LookaheadTraining,
    "medusa": MedusaTraining,
}


def read_training(plain: Mapping[str, Any]) -> Training:
    """Returns the training run that a config describes.

    Args:
      plain: its fields as JSON has them; `drafter` says which others there are.

    Raises:
      InputError: an unknown field, or a value of another type or out of range.
    """
    check_among("drafter", plain.get("drafter"), KINDS)
    make = KINDS[plain["drafter"]]
    fields = read_fields(make, plain)
    fields["recipe"] = Recipe(**read_fields(Recipe, fields.get("recipe", {}), "recipe."))
    return make(**fields)
