"""Runs an experiment: cell after cell, each kept at once."""

import dataclasses
import datetime
import functools
import pathlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jspec.common import processes
from jspec.common.errors import WorkdirError, describe_error, say
from jspec.common.journal import Record
from jspec.common.progress import Progress, counted
from jspec.drafters import entries_of
from jspec.generation.own_code import digest_of_own_code
from jspec.generation.prompts import Prompt
from jspec.generation.provenance import git_state
from jspec.kernels import environment
from jspec.lab.analysis import theory
from jspec.lab.analysis.call_cost import predict_table
from jspec.lab.experiments.cells import (
    Cell,
    check_files,
    choose_prompts,
    digest,
    find_prompts,
    make_cells,
)
from jspec.lab.experiments.spec import Experiment, read_experiment
from jspec.lab.experiments.store import DONE, FAILED, AnyStore, FollowedStore, Store, is_begun
from jspec.speculation.acceptance import get_rule

_SECONDS_BETWEEN_LOOKS = 1.0
_NO_MORE = "no more"  # told to the other processes of a run


def run_experiment(
    config: Mapping[str, Any],
    workdir: str,
    argv: Sequence[str] = (),
    base: pathlib.Path | None = None,
) -> int:
    """Measures the cells that a workdir lacks, and waits for those of other processes.

    The config is plain JSON. Prompts files are looked for in the current folder, then in `base`.

    Returns:
      How many cells have failed; the next run tries them again.

    Raises:
      InputError: a bad config, no prompts, models or files that do not exist, or a target that
        cannot be loaded.
      WorkdirError: the workdir belongs to another config, is damaged, or cannot be written.
    """
    experiment = find_prompts(read_experiment(config), base)
    prompts = choose_prompts(experiment)
    cells = make_cells(experiment, list(prompts))
    if not is_begun(workdir):  # a misspelled name leaves no workdir of a config that is mended
        check_files(experiment)
    opened: list[Store] = []
    processes.of_first(lambda: opened.append(Store(workdir, config)))
    if not opened:
        return _follow(experiment, prompts, workdir)
    with opened[0] as store:
        path, own_code = experiment.prompts_file, _own_code(experiment)
        _check_unchanged(store, "prompts_digest", digest(prompts), f"the prompts in {path} have")
        _check_unchanged(store, "own_code", own_code, "a drafter or rule of your own has")
        if processes.broadcast(bool(_remaining(store, cells))):
            described, measure = _choose_work(experiment, prompts, store)
            run = _describe_run(argv, prompts, described, len(cells))
            store.add_run(run | ({"own_code": own_code} if own_code else {}))
            _work(store, cells, measure, run["run"])
        failed = processes.broadcast(sum(store.outcomes[cell.name] == FAILED for cell in cells))
    verb = "is" if len(cells) == 1 else "are"
    print(f"{workdir}: {len(cells) - failed} of {counted(len(cells), 'cell')} {verb} done"
          + f", {failed} failed" * bool(failed))  # fmt: skip
    return failed


def _follow(experiment: Experiment, prompts: Mapping[int, Prompt], workdir: str) -> int:
    if processes.broadcast(None):
        _, measure = _choose_work(experiment, prompts, FollowedStore(workdir))
        while (told := processes.broadcast(None)) != _NO_MORE:
            for cell in told:
                _measure(cell, measure, "")
    return processes.broadcast(None)


def _choose_work(
    experiment: Experiment, prompts: Mapping[int, Prompt], store: AnyStore
) -> tuple[Record, Callable[[Cell], Record]]:
    if not experiment.needs_prompts:
        return {}, functools.partial(_compute, experiment)
    from jspec.lab.experiments import workers  # formulas wait for no model

    kind = workers.GenerateWorker if experiment.kind == "generate" else workers.EstimateWorker
    worker = kind(experiment, prompts, store)
    return worker.describe(), worker.run


def _compute(experiment: Experiment, cell: Cell) -> Record:
    if "functions" in cell.key:
        from jspec.lab.functions import measure

        return measure(experiment.functions[cell.key["functions"]])
    if "table" in cell.key:
        return dict(getattr(theory, cell.key["table"])())
    return dict(predict_table(dataclasses.asdict(experiment.predict[cell.key["pair"]])))


def _check_unchanged(store: Store, field: str, value: str | None, what: str) -> None:
    """Checks that a field of a run's record is what it was when the workdir was begun."""
    before = [run[field] for run in store.runs if field in run]
    if before and before[0] != value:
        raise WorkdirError(f"{what} changed since {store.folder} was begun; take another --workdir")


def _own_code(experiment: Experiment) -> str | None:
    """Returns a digest of the user's own drafters and rules; None without any."""
    methods = experiment.methods.values()
    drafters = [entry.build for method in methods for entry in entries_of(method.drafter)]
    return digest_of_own_code(
        *drafters, *(get_rule(method.acceptance).accept for method in methods)
    )


def _remaining(store: Store, cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.name not in store.outcomes]


def _work(store: Store, cells: Sequence[Cell], measure: Callable[[Cell], Record], run: str) -> None:
    progress = Progress(len(cells), len(cells) - len(_remaining(store, cells)))
    is_waiting = False
    while remaining := _remaining(store, cells):
        has_worked = False
        for cell in remaining:
            with store.claim(cell.name) as is_ours:
                if is_ours:
                    processes.broadcast([cell])
                    store.add(_measure(cell, measure, run))
            has_worked |= is_ours
            outcomes = [store.outcomes.get(cell.name) for cell in cells]
            if is_ours or is_waiting:
                progress.show(len(cells) - outcomes.count(None), outcomes.count(FAILED))
        if not has_worked:
            if not is_waiting:
                say("waiting for the cells of other processes")
            is_waiting = True
            processes.broadcast([])  # a sign of life
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    processes.broadcast(_NO_MORE)


def _measure(cell: Cell, measure: Callable[[Cell], Record], run: str) -> Record:
    line = {"cell": cell.name, "key": cell.key, "run": run}
    try:
        record = measure(cell)
    except WorkdirError:
        raise
    except Exception as error:  # the error is kept, and the other cells may well succeed
        if processes.is_loss(error):
            raise
        text = describe_error(error)
        say(f"cell {cell.name} failed: {text}")
        return line | {"status": FAILED, "error": text, "record": None}
    return line | {"status": DONE, "error": None, "record": record}


def _describe_run(
    argv: Sequence[str], prompts: Mapping[int, Prompt], described: Record, num_cells: int
) -> Record:
    begin = datetime.datetime.now()
    record = {
        "run": f"{begin:%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}",  # no other process has its name
        "started": begin.astimezone().isoformat(timespec="seconds"),
        "argv": list(argv),
        "environment": environment(),
        "git": git_state(),
        "described": described,
        "num_cells": num_cells,
    }
    return record | ({"prompts_digest": digest(prompts)} if prompts else {})
