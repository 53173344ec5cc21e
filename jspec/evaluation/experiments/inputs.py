"""What an experiment reads: its prompts, and the files that its config names."""

import collections
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping

from jspec.common.errors import InputError, prefixed_errors
from jspec.drafters.heads.shipped import find_head
from jspec.evaluation.analysis.byte_model import load_config
from jspec.evaluation.experiments.spec import Experiment
from jspec.generation.prompts import Prompt, read_prompts
from jspec.weights.resolver import find_model


def find_prompts(experiment: Experiment, base: pathlib.Path | None) -> Experiment:
    """Returns the experiment with the paths of the prompts files that it reads.

    Relative paths are looked for in the current folder, then in `base`: the folder above the
    config's, since configs say "configs/...".

    Raises:
      InputError: a file is in neither place.
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
    is_elsewhere = base is not None and not pathlib.Path(name).is_absolute()
    places = f", neither in {pathlib.Path.cwd()} nor in {base}" * is_elsewhere
    raise InputError(f"cannot read {what} {name}: No such file{places}")


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
