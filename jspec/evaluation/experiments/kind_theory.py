"""Tables and curves of the paper's formulas: the kind "theory"."""

from collections.abc import Mapping
from typing import Any

from jspec.evaluation.analysis import theory
from jspec.evaluation.experiments.cells import Cell
from jspec.evaluation.experiments.spec import Experiment
from jspec.evaluation.experiments.store import Store
from jspec.generation.prompts import Prompt

_TABLES = {
    "table1": theory.table1,
    "figure2": theory.figure2,
    "figure3": theory.figure3,
    "figure4": theory.figure4,
}


class TheoryWorker:
    """Computes a table a cell."""

    def describe(self) -> dict[str, Any]:
        """Returns nothing: no model is run."""
        return {}

    def run(self, cell: Cell) -> dict[str, Any]:
        """Returns the table."""
        return dict(_TABLES[cell.key["table"]]())


def make_worker(
    experiment: Experiment, prompts: Mapping[int, Prompt], store: Store
) -> TheoryWorker:
    """Returns the worker; see `kinds.make_worker`."""
    del experiment, prompts, store
    return TheoryWorker()
