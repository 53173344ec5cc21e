"""What the training loop knows of what it trains."""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from jspec.common.typing import Params
from jspec.training.texts import Rows

SCORE = "tokens_per_call"
# Of drafts trained in sequence: the share of places where one of them agrees with the target.
COVERED_BEFORE, COVERED = "covered_before", "covered"


class Trainee(NamedTuple):
    """What is trained.

    Attributes:
      params: before the first update; all of them are trained.
      loss: (params, target's parameters, rows) -> the loss and a dict of scalars or vectors.
      evaluate: (params, target's parameters, rows) -> sums and the count they are divided by: a
        dict with `SCORE` among others, and the number of places.
      save: (params, folder) -> nothing: writes the drafter in the form that it is loaded from.
      layers: those of the target whose outputs `loss` takes from rows that bring them; empty if it
        always asks the target.
    """

    params: Params
    loss: Callable[[Params, Params, Rows], tuple[jax.Array, dict[str, jax.Array]]]
    evaluate: Callable[[Params, Params, Rows], tuple[dict[str, jax.Array], jax.Array]]
    save: Callable[[Params, pathlib.Path], None]
    layers: tuple[int, ...] = ()


def describe(metrics: Mapping[str, Any]) -> str:
    """Returns in words what a trainee is worth on held-out texts."""
    text = f"{metrics[SCORE]:.3f} tokens a call on held-out texts"
    if COVERED not in metrics:
        return text
    return (
        f"{text} by a tree of all drafts; a draft agrees with the target at "
        f"{metrics[COVERED]:.1%} of the places, without this one at {metrics[COVERED_BEFORE]:.1%}"
    )
