"""The cells of an experiment: the pieces that are measured, kept and resumed one by one."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jspec.evaluation.experiments.spec import THEORY_TABLES, Experiment
from jspec.generation.request import Settings

_SEEDS_APART = 1000


class Cell(NamedTuple):
    """One piece of an experiment: its unique, readable name, and what it is, as plain values."""

    name: str
    key: dict[str, Any]


def make_cells(experiment: Experiment, prompts: Sequence[int]) -> list[Cell]:
    """Returns an experiment's cells, given its prompts' indices, in the order of measuring.

    Methods and settings alternate fastest: a machine that slows down slows all of them.
    """
    match experiment.kind:
        case "theory":
            return [Cell(name, {"table": name}) for name in THEORY_TABLES]
        case "predict":
            return [Cell(label, {"pair": label}) for label in experiment.predict]
        case "estimate":
            return list(_estimate_cells(experiment, prompts))
        case _:
            return list(_generate_cells(experiment, prompts))


def _generate_cells(experiment: Experiment, prompts: Sequence[int]) -> Iterator[Cell]:
    for repeat, size, seed in itertools.product(
        range(experiment.repeats), experiment.batch_sizes, experiment.seeds
    ):
        for begin in range(0, len(prompts), size):
            together = list(prompts[begin : begin + size])
            where = f"batch {size}/prompt {'+'.join(map(str, together))}"
            key = {"batch_size": size, "prompts": together, "seed": seed, "repeat": repeat}
            for setting, method in itertools.product(experiment.settings, experiment.methods):
                yield Cell(
                    f"{method}/{setting}/{where}/seed {seed}/repeat {repeat}",
                    {"method": method, "setting": setting} | key,
                )


def _estimate_cells(experiment: Experiment, prompts: Sequence[int]) -> Iterator[Cell]:
    for seed, prompt, setting, method in itertools.product(
        experiment.seeds, prompts, experiment.settings, experiment.methods
    ):
        yield Cell(
            f"{method}/{setting}/prompt {prompt}/seed {seed}",
            {"method": method, "setting": setting, "prompt": prompt, "seed": seed},
        )


def settings_of(experiment: Experiment, key: Mapping[str, Any], prompt: int) -> Settings:
    """Returns the settings of a cell's answer: prompt k has seed 1000 · (the cell's seed) + k."""
    settings = experiment.settings[key["setting"]]
    return dataclasses.replace(settings, seed=_SEEDS_APART * key["seed"] + prompt)
