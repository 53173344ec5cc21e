"""Workers: what measures the cells of an experiment, by its kind."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from jspec.evaluation.analysis import theory
from jspec.evaluation.analysis.byte_model import predict_table
from jspec.evaluation.experiments.cells import Cell
from jspec.evaluation.experiments.spec import Experiment
from jspec.evaluation.experiments.store import Store
from jspec.generation.prompts import Prompt


class Worker(Protocol):
    """Measures the cells of one experiment, one after another."""

    def describe(self) -> dict[str, Any]:
        """Returns what is measured, by method, as plain values."""
        ...

    def run(self, cell: Cell) -> dict[str, Any]:
        """Returns the record of a cell, as plain values. Any exception is the cell's error."""
        ...


class FormulaWorker:
    """The kinds "theory" and "predict": computes a table a cell, without a model."""

    def __init__(self, experiment: Experiment) -> None:
        self._pairs = experiment.predict

    def describe(self) -> dict[str, Any]:
        """Returns nothing: no model is run."""
        return {}

    def run(self, cell: Cell) -> dict[str, Any]:
        """Returns the table; the machine's rates that a pair leaves open are measured here."""
        if "table" in cell.key:
            return dict(getattr(theory, cell.key["table"])())
        return dict(predict_table(dataclasses.asdict(self._pairs[cell.key["pair"]])))


def make_worker(experiment: Experiment, prompts: Mapping[int, Prompt], store: Store) -> Worker:
    """Returns the worker of an experiment.

    Args:
      experiment: what is measured.
      prompts: by their indices.
      store: the workdir, for what its processes share.

    Raises:
      InputError: the target cannot be loaded, or the like.
    """
    # Only the kind that is wanted is imported: formulas need no models.
    if experiment.kind == "generate":
        from jspec.evaluation.experiments.generate_worker import GenerateWorker

        return GenerateWorker(experiment, prompts, store)
    if experiment.kind == "estimate":
        from jspec.evaluation.experiments.estimate_worker import EstimateWorker

        return EstimateWorker(experiment, prompts, store)
    return FormulaWorker(experiment)
