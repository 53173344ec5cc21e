"""Where the numbers come from: commands, versions, hardware, failures."""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jspec.common.figures import Curves, Picture, draw
from jspec.evaluation.reports.document import Block, Code, Heading, Table, code
from jspec.evaluation.reports.workdir import Workdir

_PATH = re.compile(r"(?:/[\w.@+:, -]+|~|\.\.)(?:/[\w.@+:, -]+)+/?")


class View(NamedTuple):
    """What pictures name, and how their files are told apart.

    Attributes:
      model: the target and its dtype; "" where none was run.
      machine: processor, cores and device.
      date: of the last run.
      temperature: at which the picture was measured; None for several or none.
      suffix: of the files' names, "" or "-" and something unique.
    """

    title: str
    model: str
    machine: str
    date: str
    temperature: float | None = None
    suffix: str = ""

    def draw(
        self, name: str, panels: Sequence[Curves], title: str, caption: str = "", **options: bool
    ) -> Picture:
        """Returns the figure; see `jspec.common.figures.draw`."""
        at = "" if self.temperature is None else f"temperature {self.temperature:g}"
        parts = [one.replace(" ", "\xa0") for one in (self.model, at, self.machine, self.date)]
        subtitle = " · ".join(filter(None, (self.title, *parts)))
        name += self.suffix
        return draw(name, panels, title=title, subtitle=subtitle, caption=caption, **options)


def view_of(workdir: Workdir) -> View:
    """Returns what the pictures of a workdir name."""
    config, last = workdir.config, workdir.runs[-1] if workdir.runs else {}
    has_model = config.get("kind", "generate") in ("generate", "estimate")
    model = f"{config.get('target')} {config.get('dtype')}" if has_model else ""
    machine = "" if config.get("kind") == "theory" else _machine(last.get("environment") or {})
    title = " ".join(str(config.get("title") or "Experiment").split())
    return View(title, model, machine, str(last.get("started", ""))[:10])


def _machine(own: Mapping[str, Any]) -> str:
    cores = f"{own['cores']} cores" if own.get("cores") else ""
    parts = dict.fromkeys(filter(None, (own.get("processor"), cores, own.get("device"))))
    return ", ".join(map(str, parts))


def origin_blocks(workdir: Workdir) -> list[Block]:
    """Returns the chapter."""
    commands = [shlex.join(portable(run["argv"])) for run in workdir.runs]
    commands = [*dict.fromkeys(commands), "python scripts/summarize.py DIR"]
    of_all = f" of {workdir.num_cells}" if workdir.num_cells else ""
    counts = [f"{len(workdir.done)}{of_all} cells done, {len(workdir.failed)} failed."]
    seconds = [line["record"].get("seconds") for line in workdir.done]
    known = [float(one) for one in seconds if isinstance(one, int | float)]
    counts += [f"{sum(known) / 60:.1f} minutes of generating, compilation excluded."] * bool(known)
    items = [*_environments(workdir.runs), *counts, *workdir.notes]
    blocks: list[Block] = [Heading("How it was measured"), Code("\n".join(commands)), items]
    rows = [{"cell": code(one["cell"]), "error": code(one.get("error"))} for one in workdir.failed]
    return [*blocks, Table("Failed cells", rows)] if rows else blocks


def _environments(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns when and on what it ran, a line for each different machine or set of versions."""
    dates: dict[str, list[str]] = {}
    for run in runs:
        own, git = run["environment"], run["git"] or {}
        versions = {"python": own["python"], **own["versions"]}
        parts = [_machine(own), *(f"{name} {one}" for name, one in versions.items() if one)]
        if git:
            changed = ", with changes that are not committed" if git["is_dirty"] else ""
            parts.append(f"git commit {code(git['commit'][:12])}{changed}")
        dates.setdefault(", ".join(filter(None, parts)), []).append(run["started"][:10])
    return [f"{' to '.join(sorted({min(own), max(own)}))}: {text}" for text, own in dates.items()]


def portable(value: Any) -> Any:
    """Returns JSON values with a path's last name in the place of each path that is not relative.

    Of `--flag=PATH` the flag is kept, of a config the folder `configs`, of a workdir only "DIR".
    """
    if isinstance(value, Mapping):
        return {key: portable(one) for key, one in value.items()}
    if isinstance(value, list):
        return list(map(portable, value))
    if not isinstance(value, str):
        return value
    if value.startswith("--workdir="):
        return "--workdir=DIR"
    flag, equals, path = value.partition("=") if value.startswith("--") else ("", "", value)
    if not _PATH.fullmatch(path):
        return value
    kept = re.search(r"configs/[^/]+$", path)
    return f"{flag}{equals}{kept[0] if kept else path.rstrip('/').rsplit('/', 1)[-1]}"
