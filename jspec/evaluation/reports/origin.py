"""The chapter on where the numbers come from: commands, versions, hardware, failures."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.evaluation.reports.document import Block, Bullets, Code, Heading, Paragraph, Table
from jspec.evaluation.reports.portable import portable
from jspec.evaluation.reports.wording import NOTHING, code
from jspec.evaluation.reports.workdir import Workdir

_SUMMARIZE = "python scripts/summarize.py DIR"


def origin_blocks(workdir: Workdir) -> list[Block]:
    """Returns the chapter."""
    commands = list(dict.fromkeys(_command(run) for run in workdir.runs if run.get("argv")))
    blocks: list[Block] = [
        Heading("How it was measured"),
        Paragraph("The commands (DIR is a folder of your choice):"),
        Code("\n".join([*commands, _SUMMARIZE])),
        *_environments(workdir.runs),
        Bullets(tuple(_counts(workdir))),
    ]
    if workdir.failed:
        blocks += [Paragraph("Cells that failed:"), _failures(workdir.failed)]
    return blocks


def _command(run: Mapping[str, Any]) -> str:
    """Returns a run's command line without the folders of the machine that it ran on."""
    return shlex.join(portable([str(argument) for argument in run["argv"]]))


def _environments(runs: Sequence[Mapping[str, Any]]) -> list[Block]:
    """Returns when and on what it ran, a line for each different machine or set of versions."""
    lines: dict[str, list[str]] = {}
    for run in runs:
        lines.setdefault(_environment(run), []).append(str(run.get("started", ""))[:10])
    items = tuple(
        f"{_dates(dates)}: {described}" for described, dates in lines.items() if described
    )
    return [Bullets(items)] if items else []


def _dates(dates: Sequence[str]) -> str:
    first, last = min(dates), max(dates)
    return first if first == last else f"{first} to {last}"


def _environment(run: Mapping[str, Any]) -> str:
    own, git = run.get("environment") or {}, run.get("git") or {}
    parts = [
        f"{own[name]}" if name != "cores" else f"{own[name]} cores"
        for name in ("processor", "cores", "device")
        if own.get(name)
    ]
    versions = {"python": own.get("python"), **(own.get("versions") or {})}
    parts += [f"{name} {version}" for name, version in versions.items() if version]
    if git.get("commit"):
        changed = ", with changes that are not committed" if git.get("is_dirty") else ""
        parts.append(f"git commit {code(str(git['commit'])[:12])}{changed}")
    return ", ".join(parts)


def _counts(workdir: Workdir) -> list[str]:
    described = _target(workdir.config)
    failed = len(workdir.failed)
    of_all = f" of {workdir.num_cells}" if workdir.num_cells else ""
    lines = [
        f"{len(workdir.done)}{of_all} cells done, {failed or 'none'} failed (a cell is a piece of "
        f"the run: say, a prompt answered in one way, once).{described}"
    ]
    if not of_all:
        lines.append("How many cells there are to be is not recorded: some may be missing.")
    seconds = [(line["record"] or {}).get("seconds") for line in workdir.done]
    known = [float(one) for one in seconds if isinstance(one, int | float)]
    if known:
        lines.append(f"{sum(known) / 60:.1f} minutes of generating, compilation not counted.")
    return [*lines, *workdir.notes]


def _target(config: Mapping[str, Any]) -> str:
    """Returns which model was run, if any was: theory and predictions run none."""
    target = config.get("target")
    if not target or config.get("kind", "generate") not in ("generate", "estimate"):
        return ""
    return f" Target: {code(target)}, {config.get('dtype')}."


def _failures(failed: Sequence[Mapping[str, Any]]) -> Table:
    rows = tuple((code(line["cell"]), code(line.get("error") or NOTHING)) for line in failed)
    return Table("Failed cells", ("cell", "error"), rows, text_columns=(0, 1))
