"""The cells of an experiment: the pieces that are measured, kept and resumed one by one."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jspec.evaluation.experiments.spec import Experiment


class Cell(NamedTuple):
    """One piece of an experiment.

    Attributes:
      name: unique in the experiment, and readable.
      key: what it is, as plain values.
    """

    name: str
    key: dict[str, Any]


def make_cells(experiment: Experiment, prompts: Sequence[int]) -> list[Cell]:
    """Returns an experiment's cells in the order in which they are done.

    Ways and settings alternate fastest: a machine that slows down slows all of them.

    Args:
      experiment: what is measured.
      prompts: the indices of its prompts.
    """
    makers = {
        "generate": lambda: _generate_cells(experiment, prompts),
        "estimate": lambda: _estimate_cells(experiment, prompts),
        "theory": lambda: (Cell(name, {"table": name}) for name in experiment.theory.tables),
        "predict": lambda: (Cell(label, {"pair": label}) for label in experiment.predict),
    }
    return list(makers[experiment.kind]())


def _generate_cells(experiment: Experiment, prompts: Sequence[int]) -> Iterator[Cell]:
    for repeat, batch_size, seed in itertools.product(
        range(experiment.repeats), experiment.batch_sizes, experiment.seeds
    ):
        for begin in range(0, len(prompts), batch_size):
            together = list(prompts[begin : begin + batch_size])
            which = "+".join(map(str, together))
            for setting, method in itertools.product(experiment.settings, experiment.methods):
                yield Cell(
                    f"{method}/{setting}/batch {batch_size}/prompt {which}/seed {seed}/"
                    f"repeat {repeat}",
                    {
                        "method": method,
                        "setting": setting,
                        "batch_size": batch_size,
                        "prompts": together,
                        "seed": seed,
                        "repeat": repeat,
                    },
                )


def _estimate_cells(experiment: Experiment, prompts: Sequence[int]) -> Iterator[Cell]:
    for seed, prompt, setting, method in itertools.product(
        experiment.seeds, prompts, experiment.settings, experiment.methods
    ):
        yield Cell(
            f"{method}/{setting}/prompt {prompt}/seed {seed}",
            {"method": method, "setting": setting, "prompt": prompt, "seed": seed},
        )
