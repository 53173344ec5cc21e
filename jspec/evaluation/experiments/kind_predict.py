"""Whether pairs of models would pay, from bytes and operations alone: the kind "predict"."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jspec.evaluation.analysis.byte_model import predict_table
from jspec.evaluation.experiments.cells import Cell
from jspec.evaluation.experiments.spec import Experiment
from jspec.evaluation.experiments.store import Store
from jspec.generation.prompts import Prompt


class PredictWorker:
    """Computes the table of a pair a cell."""

    def __init__(self, experiment: Experiment) -> None:
        self._pairs = experiment.predict

    def describe(self) -> dict[str, Any]:
        """Returns nothing: no model is run."""
        return {}

    def run(self, cell: Cell) -> dict[str, Any]:
        """Returns the table; what the config leaves open about the machine is measured here."""
        return dict(predict_table(dataclasses.asdict(self._pairs[cell.key["pair"]])))


def make_worker(
    experiment: Experiment, prompts: Mapping[int, Prompt], store: Store
) -> PredictWorker:
    """Returns the worker; see `kinds.make_worker`."""
    del prompts, store
    return PredictWorker(experiment)
