"""The cells of an experiment, and what they need: prompts, and the files that a config names."""

import collections
import dataclasses
import hashlib
import itertools
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jspec.common.errors import InputError, prefixed_errors
from jspec.common.shipped import find_shipped
from jspec.drafters.spec import find_head
from jspec.generation.prompts import Prompt, read_prompts
from jspec.generation.request import SamplingParams
from jspec.lab.analysis.call_cost import load_config
from jspec.lab.experiments.spec import THEORY_TABLES, Experiment
from jspec.models.sharding import make_mesh
from jspec.weights.resolver import find_model

_SEEDS_APART = 1000


class Cell(NamedTuple):
    """What is measured, kept and resumed by itself: a unique name, and its key as plain values."""

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
        case "functions":
            return [Cell(label, {"functions": label}) for label in experiment.functions]
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


def settings_of(experiment: Experiment, key: Mapping[str, Any], prompt: int) -> SamplingParams:
    """Returns the settings of a cell's answer: prompt k has seed 1000 · (the cell's seed) + k."""
    settings = experiment.settings[key["setting"]]
    return dataclasses.replace(settings, seed=_SEEDS_APART * key["seed"] + prompt)


def find_prompts(experiment: Experiment, base: pathlib.Path | None) -> Experiment:
    """Returns the experiment with the paths of the prompts files that it reads.

    Relative paths are looked for in the current folder, then in `base`: the folder above the
    config's, since configs say "configs/...", and then among jspec's own files.

    Raises:
      InputError: a file is in none of these places.
    """
    if not experiment.needs_prompts:
        return experiment
    path = _find(experiment.prompts_file, "the prompts file", base)
    table = experiment.table
    if any(method.needs_table for method in experiment.methods.values()):
        source = _find(table.prompts_file, "table.prompts_file", base)
        table = dataclasses.replace(table, prompts_file=source)
    return dataclasses.replace(experiment, prompts_file=path, table=table)


def _find(name: str, what: str, base: pathlib.Path | None) -> str:
    if name == "-" or pathlib.Path(name).is_file():
        return name
    if base is not None and (base / name).is_file():
        return str(base / name)
    if (shipped := find_shipped(name)) != name:
        return shipped
    is_elsewhere = base is not None and not pathlib.Path(name).is_absolute()
    places = f", neither in {pathlib.Path.cwd()} nor in {base}" * is_elsewhere
    raise InputError(f"cannot read {what} {name}: No such file{places}; name another in the config")


def choose_prompts(experiment: Experiment) -> dict[int, Prompt]:
    """Returns the chosen prompts of the experiment's file, by their indices in it.

    Of each category the first `per_category` count; of those, `num_prompts`, evenly spaced.

    Raises:
      InputError: an unreadable file, a broken line, or no prompts.
    """
    if not experiment.needs_prompts:
        return {}
    seen = collections.Counter[str | None]()
    chosen = {}
    for index, prompt in enumerate(read_prompts(experiment.prompts_file)):
        seen[prompt.category] += 1
        if not experiment.per_category or seen[prompt.category] <= experiment.per_category:
            chosen[index] = prompt
    if not chosen:
        raise InputError(f"expected at least one prompt in {experiment.prompts_file}, got none")
    indices, count = list(chosen), experiment.num_prompts
    if 0 < count < len(indices):
        indices = [indices[number * len(indices) // count] for number in range(count)]
    return {index: chosen[index] for index in indices}


def digest(prompts: Mapping[int, Prompt]) -> str:
    """Returns a checksum of prompts, by which a changed file is noticed."""
    plain = [[index, list(prompt.turns)] for index, prompt in prompts.items()]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]


def check_files(experiment: Experiment) -> None:
    """Checks that the models, tables and heads exist that an experiment names.

    Nothing is loaded, but models of a hub are fetched. A file that exists and is damaged is found
    later: only the cells of its method fail.

    Raises:
      InputError: something does not exist; the message says which field names it.
    """
    for label, pair in experiment.predict.items() if experiment.kind == "predict" else ():
        _check(f"predict.{label}.target", load_config, pair.target)
        _check(f"predict.{label}.draft", load_config, pair.draft)
    if not experiment.needs_prompts:
        return
    if experiment.mesh:
        _check("mesh", make_mesh, experiment.mesh)
    _check("target", find_model, experiment.target)
    for label, method in experiment.methods.items():
        _check(f"methods.{label}.draft", find_model, method.draft)
        _check(f"methods.{label}.options.draft_table", _find_file, method.options.draft_table)
        _check(f"methods.{label}.options.draft_head", find_head, method.options.draft_head)


def _check(field: str, find: Callable[[str], object], name: str | None) -> None:
    if name is not None:
        with prefixed_errors(field):
            find(name)


def _find_file(path: str) -> None:
    if not pathlib.Path(path).expanduser().is_file():
        raise InputError(f"no such file: {path}")
