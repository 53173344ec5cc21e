"""The whole report of a workdir, and its files."""

import gzip
import json
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence

from jspec.common.errors import InputError
from jspec.common.figures import Picture
from jspec.lab.analysis.trace import check_trace, timeline, to_terminal
from jspec.lab.reports.computed import (
    estimate_chapters,
    functions_chapters,
    predict_chapters,
    theory_chapters,
)
from jspec.lab.reports.document import Block, Code, Glossary, Heading, to_csv, to_markdown
from jspec.lab.reports.generate import generate_chapters
from jspec.lab.reports.workdir import (
    PACKED,
    RESULTS,
    View,
    Workdir,
    origin_blocks,
    portable,
    read_file,
    read_workdir,
    view_of,
)

_CHAPTERS: Mapping[str, Callable[[Workdir, View], list[Block]]] = {
    "generate": generate_chapters,
    "estimate": estimate_chapters,
    "theory": theory_chapters,
    "predict": predict_chapters,
    "functions": functions_chapters,
}
_FIGURES = "figures"
_LINK = re.compile(rf"^!\[.*\]\({_FIGURES}/([\w-]+)\.png\)$", re.MULTILINE)


def make_report(workdir: Workdir) -> list[Block]:
    """Returns the report of an experiment, finished or not.

    Raises:
      InputError: a kind of experiment that is not known, or cells of another.
    """
    kind = workdir.config.get("kind", "generate")
    if kind not in _CHAPTERS:
        raise InputError(f"expected a kind among {', '.join(_CHAPTERS)}; got {kind!r}")
    view = view_of(workdir)
    blocks: list[Block] = [Heading(view.title, 1)]
    done, failed = len(workdir.done), len(workdir.failed)
    num_cells = max(workdir.num_cells, done + failed)
    if done < num_cells:
        blocks.append(f"{done} of {num_cells} cells are finished, {failed} failed.")
    if not done:
        blocks.append("No cell is finished yet.")
    try:
        blocks += _CHAPTERS[kind](workdir, view) if done else []
    except KeyError as error:
        raise InputError(f"expected cells of kind {kind}, got one without {error}") from error
    for index, trace in enumerate(map(check_trace, workdir.traces), 1):
        walk = Code(to_terminal(trace, has_colours=False))
        blocks += [Heading("One generation, round by round"), walk]
        blocks += [timeline(trace, f"timeline-{index}")] if trace["rounds"] else []
    blocks += origin_blocks(workdir)
    return sorted(blocks, key=lambda block: isinstance(block, Glossary))  # which comes last


def write_report(folder: pathlib.Path, blocks: Sequence[Block]) -> list[pathlib.Path]:
    """Writes report.md, tables.csv and figures/ into a folder; returns the files.

    Figures to which an earlier report.md there links, and this one does not, are removed.

    Raises:
      InputError: they cannot be written.
    """
    files = {
        folder / "report.md": to_markdown(blocks).encode(),
        folder / "tables.csv": to_csv(blocks).encode(),
    }
    for block in blocks:
        if isinstance(block, Picture):
            files[folder / _FIGURES / f"{block.name}.png"] = block.png
    try:
        (folder / _FIGURES).mkdir(exist_ok=True)
        stale = _earlier_figures(folder) - files.keys()
        for path, content in files.items():
            path.write_bytes(content)
        for path in stale:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"cannot write the report to {folder}: {error.strerror}") from None
    return list(files)


def _earlier_figures(folder: pathlib.Path) -> set[pathlib.Path]:
    report = folder / "report.md"
    text = report.read_text(encoding="utf-8", errors="replace") if report.is_file() else ""
    return {folder / _FIGURES / f"{name}.png" for name in _LINK.findall(text)}


def publish(folder: pathlib.Path, target: pathlib.Path) -> list[pathlib.Path]:
    """Writes what is worth keeping under version control into another folder; returns the files.

    That is the report, config.json and runs.jsonl without the folders of the
    machine, costs.json and trace*.json as they are, and results.jsonl packed: enough to make the
    report anew, which is the same then.

    Raises:
      InputError: the folder is no experiment's, the other one is that of a run, or cannot be
        written.
    """
    if (target / RESULTS).exists():
        raise InputError(f"expected a folder to publish into, got that of a run: {target}")
    files = _data(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (target / name).write_bytes(content)
    except OSError as error:
        raise InputError(f"cannot publish to {target}: {error.strerror}") from None
    report = write_report(target, make_report(read_workdir(target)))
    return [*(target / name for name in files), *report]


def _data(folder: pathlib.Path) -> dict[str, bytes]:
    workdir = read_workdir(folder)
    files = {"config.json": json.dumps(portable(workdir.config), indent=1).encode() + b"\n"}
    if workdir.runs:
        lines = (json.dumps(portable(run)) for run in workdir.runs)
        files["runs.jsonl"] = "".join(f"{line}\n" for line in lines).encode()
    if results := read_file(folder / RESULTS) or read_file(folder / PACKED):
        files[PACKED] = gzip.compress(results, 9, mtime=0)  # the same each time
    for path in (folder / "costs.json", *sorted(folder.glob("trace*.json"))):
        if content := read_file(path):
            files[path.name] = content
    return files
