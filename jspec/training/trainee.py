"""What the training loop knows of what it trains."""

import pathlib
from collections.abc import Callable
from typing import NamedTuple

import jax

from jspec.training.texts import Rows
from jspec.typing import Params

SCORE = "tokens_per_call"


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
