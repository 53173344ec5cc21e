"""The whole report of a workdir, and its files."""

import pathlib
import re
from collections.abc import Callable, Mapping, Sequence

from jspec.common.errors import InputError
from jspec.evaluation.reports.document import Block, Embedded, Heading, Paragraph, Picture
from jspec.evaluation.reports.estimate_chapters import estimate_chapters
from jspec.evaluation.reports.generate_chapters import generate_chapters
from jspec.evaluation.reports.html_page import to_html
from jspec.evaluation.reports.markdown import fenced, to_markdown
from jspec.evaluation.reports.origin import origin_blocks
from jspec.evaluation.reports.table_chapters import table_chapters
from jspec.evaluation.reports.timeline import timeline
from jspec.evaluation.reports.trace import check_trace
from jspec.evaluation.reports.trace import to_html as trace_html
from jspec.evaluation.reports.trace import to_terminal as trace_text
from jspec.evaluation.reports.workdir import Record, Workdir

ChaptersFn = Callable[[Workdir], list[Block]]
_CHAPTERS: Mapping[str, ChaptersFn] = {
    "generate": generate_chapters,
    "estimate": estimate_chapters,
    "theory": table_chapters,
    "predict": table_chapters,
}
_FIGURES = "figures"
_LINK = re.compile(rf"^!\[.*\]\({_FIGURES}/([\w-]+)\.(?:png|svg)\)$", re.MULTILINE)


def make_report(workdir: Workdir) -> list[Block]:
    """Returns the report of an experiment, finished or not.

    Raises:
      InputError: a kind of experiment that is not known, or cells of another one.
    """
    kind = workdir.config.get("kind", "generate")
    if kind not in _CHAPTERS:
        raise InputError(f"expected a kind among {', '.join(_CHAPTERS)}; got {kind!r}")
    config = {**workdir.config, "kind": kind}
    blocks: list[Block] = [Heading(str(config.get("title") or "Experiment"), 1)]
    blocks += _what_is_missing(workdir)
    if workdir.done:
        blocks += _CHAPTERS[kind](workdir._replace(config=config))
    else:
        blocks.append(Paragraph("No cell is finished yet."))
    if workdir.traces:
        blocks.append(Heading("One generation, round by round"))
        for index, trace in enumerate(workdir.traces, 1):
            blocks += _trace_blocks(trace, index)
    return [*blocks, *origin_blocks(workdir)]


def _what_is_missing(workdir: Workdir) -> list[Block]:
    """Returns what whoever reads only the top must know: cells that are not there."""
    done, failed = len(workdir.done), len(workdir.failed)
    num_cells = max(workdir.num_cells or 0, done + failed)
    blocks: list[Block] = []
    if done + failed < num_cells:
        text = f"**{done} of {num_cells} cells are finished**: this report is of those alone."
        blocks.append(Paragraph(text))
    if failed:
        text = f"**{failed} of {num_cells} cells failed**, listed at the end."
        blocks.append(Paragraph(text))
    return blocks


def _trace_blocks(trace: Record, index: int) -> list[Block]:
    """Returns the walk through a generation, and its timeline."""
    check_trace(trace)
    blocks: list[Block] = [
        Embedded(trace_html(trace), fenced(trace_text(trace, has_colours=False)))
    ]
    return [*blocks, timeline(trace, f"timeline-{index}")] if trace["rounds"] else blocks


def write_report(
    folder: pathlib.Path, blocks: Sequence[Block], *, is_small: bool = False
) -> list[pathlib.Path]:
    """Writes report.md, report.html and figures/ into a folder.

    Figures of an earlier report there that this one does not have are removed: those to which its
    report.md links.

    Args:
      folder: where.
      blocks: of the report.
      is_small: whether report.md and the figures as PNG are enough.

    Returns:
      The files of the report.

    Raises:
      InputError: they cannot be written.
    """
    files = {folder / "report.md": to_markdown(blocks).encode()}
    if not is_small:
        files[folder / "report.html"] = to_html(blocks).encode()
    for block in blocks:
        if isinstance(block, Picture):
            path = folder / _FIGURES / block.name
            files[path.with_suffix(".png")] = block.png
            if not is_small:
                files[path.with_suffix(".svg")] = block.svg.encode()
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
    """Returns the files of the figures in the report that a folder holds, if it holds one."""
    report = folder / "report.md"
    text = report.read_text(encoding="utf-8", errors="replace") if report.is_file() else ""
    return {
        folder / _FIGURES / f"{name}.{kind}"
        for name in _LINK.findall(text)
        for kind in ("png", "svg")
    }
