"""What the training loop knows of what it trains."""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax

from jspec.common.typing import Params
from jspec.training.packing import Rows

# The metric by which checkpoints are compared: tokens a target call emits at temperature 0.
SCORE = "tokens_per_call"
# Of drafts trained in sequence: the share of positions where one of them agrees with the target.
COVERED_BEFORE, COVERED = "covered_before", "covered"

# (params, target's parameters, rows) -> the loss and metrics, `SCORE` among them: scalars or
# vectors, means over the scored positions of the rows.
LossFn: TypeAlias = Callable[[Params, Params, Rows], tuple[jax.Array, dict[str, jax.Array]]]


class Trainee(NamedTuple):
    """What is trained.

    Attributes:
      params: before the first update; all of them are trained.
      loss: see `LossFn`.
      save: (params, folder) -> None: writes the drafter in the format in which it is loaded.
      layers: the target's layers whose outputs `loss` takes from rows that bring them; empty if
        `loss` always runs the target.
    """

    params: Params
    loss: LossFn
    save: Callable[[Params, pathlib.Path], None]
    layers: tuple[int, ...] = ()


def describe(metrics: Mapping[str, Any]) -> str:
    """Returns in one line how well a trainee does on held-out texts."""
    text = f"{metrics[SCORE]:.3f} tokens a call on held-out texts"
    if COVERED not in metrics:
        return text
    return (
        f"{text} by a tree of all drafts; a draft agrees with the target at "
        f"{metrics[COVERED]:.1%} of the positions, without this one at "
        f"{metrics[COVERED_BEFORE]:.1%}"
    )
