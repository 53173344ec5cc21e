"""Names that a user may have spelled wrong, looked at before anything is measured."""

import pathlib
from collections.abc import Callable

from jspec.common.errors import InputError
from jspec.drafters.heads.shipped import find_head
from jspec.evaluation.analysis.byte_model import load_config
from jspec.evaluation.experiments.spec import Experiment
from jspec.weights.resolver import find_model


def check_files(experiment: Experiment) -> None:
    """Checks that there are the models, tables and heads that an experiment names.

    Nothing is loaded; models of a hub are fetched. One that is there and cannot be used is another
    matter: it costs its way alone, whose cells fail.

    Raises:
      InputError: something is not there; it says which field names it.
    """
    if experiment.kind == "predict":
        for label, pair in experiment.predict.items():
            _check(f"predict.{label}.target", load_config, pair.target)
            _check(f"predict.{label}.draft", load_config, pair.draft)
    if not experiment.needs_prompts:
        return
    _check("target", find_model, experiment.target)
    for label, method in experiment.methods.items():
        if method.draft is not None:
            _check(f"methods.{label}.draft", find_model, method.draft)
        if method.options.draft_table is not None:
            _check(f"methods.{label}.options.draft_table", _find_file, method.options.draft_table)
        if method.options.draft_head is not None:
            _check(f"methods.{label}.options.draft_head", find_head, method.options.draft_head)


def _find_file(path: str) -> pathlib.Path:
    found = pathlib.Path(path).expanduser()
    if not found.is_file():
        raise InputError(f"no such file: {path}")
    return found


def _check(name: str, find: Callable[[str], object], spec: str) -> None:
    try:
        find(spec)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
