"""The whole report of a workdir, and its files."""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jspec.errors import InputError
from jspec.reports.document import Block, Embedded, Heading, Paragraph, Picture
from jspec.reports.estimate_chapters import estimate_chapters
from jspec.reports.generate_chapters import generate_chapters
from jspec.reports.html_page import to_html
from jspec.reports.markdown import fenced, to_markdown
from jspec.reports.origin import origin_blocks
from jspec.reports.table_chapters import table_chapters
from jspec.reports.timeline import to_svg
from jspec.reports.trace import check_trace, drafting_share
from jspec.reports.trace import to_html as trace_html
from jspec.reports.trace import to_terminal as trace_text
from jspec.reports.wording import percent
from jspec.reports.workdir import Record, Workdir

ChaptersFn = Callable[[Mapping[str, Any], Sequence[Mapping[str, Any]]], list[Block]]
_CHAPTERS: Mapping[str, ChaptersFn] = {
    "generate": generate_chapters,
    "estimate": estimate_chapters,
    "theory": table_chapters,
    "predict": table_chapters,
}
_FIGURES = "figures"


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
    if workdir.failed:
        failed, all_cells = len(workdir.failed), len(workdir.failed) + len(workdir.done)
        blocks.append(Paragraph(f"**{failed} of {all_cells} cells failed**, listed at the end."))
    if workdir.done:
        blocks += _CHAPTERS[kind](config, workdir.done)
    else:
        blocks.append(Paragraph("No cell is finished yet."))
    if workdir.traces:
        blocks.append(Heading("One generation, round by round"))
        for index, trace in enumerate(workdir.traces, 1):
            blocks += _trace_blocks(trace, index)
    return [*blocks, *origin_blocks(workdir)]


def _trace_blocks(trace: Record, index: int) -> list[Block]:
    """Returns the walk through a generation, and its timeline."""
    check_trace(trace)
    blocks: list[Block] = [
        Embedded(trace_html(trace), fenced(trace_text(trace, has_colours=False)))
    ]
    if svg := to_svg(trace):
        caption = (
            "**When drafter and target worked**, in the first rounds. A box above is a proposal, "
            "divided into its drafts; a box below it is one call of the target, with the number of "
            "tokens that it gave. Hatched: the steps of plain decoding for as many tokens. "
            f"Drafting took {percent(drafting_share(trace), 1)} of the time of all rounds. Timed "
            "call by call, which takes a little longer than running whole rounds."
        )
        described = "A timeline of draft and target calls."
        blocks.append(Picture(f"timeline-{index}", caption, described, svg))
    return blocks


def write_report(folder: pathlib.Path, blocks: Sequence[Block]) -> list[pathlib.Path]:
    """Writes report.md, report.html and figures/ into a folder.

    Returns:
      The files of the report.

    Raises:
      InputError: they cannot be written.
    """
    files = {folder / "report.md": to_markdown(blocks).encode()}
    files[folder / "report.html"] = to_html(blocks).encode()
    for block in blocks:
        if isinstance(block, Picture):
            path = folder / _FIGURES / block.name
            files[path.with_suffix(".svg")] = block.svg.encode()
            if block.png:
                files[path.with_suffix(".png")] = block.png
    try:
        (folder / _FIGURES).mkdir(exist_ok=True)
        for path, content in files.items():
            path.write_bytes(content)
    except OSError as error:
        raise InputError(f"cannot write the report to {folder}: {error.strerror}") from None
    return list(files)
