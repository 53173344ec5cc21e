"""What a cell does, by the kind of experiment: a module each, with a function `make_worker`."""

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from jspec.evaluation.experiments.cells import Cell
from jspec.evaluation.experiments.spec import Experiment
from jspec.evaluation.experiments.store import Store
from jspec.generation.prompts import Prompt


class Worker(Protocol):
    """Does the cells of one experiment, one after another."""

    def describe(self) -> dict[str, Any]:
        """Returns what is measured, way by way, as plain values."""
        ...

    def run(self, cell: Cell) -> dict[str, Any]:
        """Returns the record of a cell, as plain values. Whatever it raises is the cell's error."""
        ...


def make_worker(experiment: Experiment, prompts: Mapping[int, Prompt], store: Store) -> Worker:
    """Returns what does the cells of an experiment.

    Args:
      experiment: what is measured.
      prompts: by their indices.
      store: the workdir, for what its processes share.

    Raises:
      InputError: the target cannot be loaded, or the like.
    """
    # Only the kind that is wanted is imported: formulas need no models.
    module = importlib.import_module(f"jspec.evaluation.experiments.kind_{experiment.kind}")
    return module.make_worker(experiment, prompts, store)
