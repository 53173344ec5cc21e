"""Where the prompts of an experiment lie: configs name files as seen from the folder above theirs.

Paths in the configs that ship begin with "configs/": `--config=/CLONE/configs/smoke.py` finds its
prompts from any folder.
"""

import dataclasses
import pathlib

from jspec.common.errors import InputError
from jspec.evaluation.experiments.spec import Experiment


def find_prompts(experiment: Experiment, base: pathlib.Path | None) -> Experiment:
    """Returns the experiment with the paths of those of its prompts files that it reads.

    Args:
      experiment: what is measured.
      base: where relative paths are looked for after the current folder; None looks nowhere else.

    Raises:
      InputError: a file is neither here nor there.
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
    path = pathlib.Path(name)
    if name == "-" or path.is_file():
        return name
    if base is not None and (base / path).is_file():
        return str(base / path)
    is_elsewhere = base is not None and not path.is_absolute()
    places = f", neither in {pathlib.Path.cwd()} nor in {base}" * is_elsewhere
    raise InputError(f"cannot read {what} {name}: No such file{places}")
