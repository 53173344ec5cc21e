"""The leaderboard of an open suite: as a table for the terminal, and as a page in Markdown."""

import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.common.errors import InputError
from jspec.common.new_files import new_file
from jspec.common.text_table import NOTHING, format_table, number_cell
from jspec.lab.analysis.ratios import Ratio
from jspec.lab.analysis.spec_bench import TASKS
from jspec.lab.reports.document import (
    Block,
    Code,
    Heading,
    Table,
    code,
    interval,
    number,
    to_markdown,
)

_FLAGS = (
    "suite target draft dtype target_quantization draft_quantization drafters num_draft_tokens "
    "num_prompts per_category max_new_tokens max_seq_len repeats temperature"
)
_COLUMNS = ("method", "rule", "speed-up", "tokens/s", "tokens per call", "drafts accepted",
            "same text", "drafter MB", "audit")  # fmt: skip
_NOTES = [
    "Speed-up: over plain decoding, which took turns with the row; whole answers, prompts read; "
    "median and 95 % interval over prompts and repeats.",
    "Same text: answers equal to plain decoding's, token for token, at temperature 0 and under "
    "`coupled`, where there is one text.",
    "Drafter MB: memory beside the target's: parameters, and state at the longest context.",
    "Audit: the checks of `python -m jspec.audit` that passed on this machine with these files, "
    "and the rows of the test of the distribution; inconclusive: no draft was accepted, or there "
    "were too few rows (`--audit_rows`).",
]  # fmt: skip


def leaderboard_text(record: Mapping[str, Any]) -> str:
    """Returns the rows as a table for the terminal, the fastest of each temperature first."""
    lines = []
    for (temperature, _), cells in _cells(record):
        method, rule, *others = cells.values()
        lines.append([f"{method.strip('`')}, {rule}, T={temperature:g}", *others])
    failed = [f"{label}: {row['error']}" for label, row in _failed(record).items()]
    return "\n".join([format_table(["", *_COLUMNS[2:]], lines), *failed])


def write_leaderboard(record: Mapping[str, Any], record_path: str) -> pathlib.Path:
    """Writes the page beside the record, with the suffix .md; returns its path.

    Raises:
      InputError: it cannot be written.
    """
    path = pathlib.Path(record_path).with_suffix(".md")
    try:
        with new_file(path) as partial:
            partial.write_text(to_markdown(leaderboard_page(record)), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
    return path


def leaderboard_page(record: Mapping[str, Any]) -> list[Block]:
    """Returns the page: a table and the categories of each temperature, and what made it."""
    flags = record["flags"]
    names = filter(None, (flags["target"], flags.get("draft")))
    models = " with ".join(map(_short, names))
    blocks: list[Block] = [
        Heading(f"Leaderboard: {models}", 1),
        f"{len(record['categories'])} prompts, {flags['max_new_tokens']} new tokens, "
        f"{flags['repeats']} repeats, {flags['dtype']}, {record['processor']}, {record['date']}.",
        Code(_command(flags)),
    ]
    cells = _cells(record)
    for temperature in dict.fromkeys(t for (t, _), _ in cells):
        mine = [(label, row) for (t, label), row in cells if t == temperature]
        blocks += [
            Heading(f"Temperature {temperature:g}"),
            Table("", [row for _, row in mine]),
            _category_table([record["rows"][label] for label, _ in mine]),
        ]
    blocks.append(_NOTES)
    blocks += [f"{code(label)} failed: {row['error']}" for label, row in _failed(record).items()]
    if record["left_out"]:
        lines = [f"{code(name)}: {why}" for name, why in record["left_out"].items()]
        blocks += [Heading("Left out"), lines]
    return [*blocks, Heading("Files"), _file_lines(record)]


def _command(flags: Mapping[str, Any]) -> str:
    words = ["python", "-m", "jspec.benchmark"]
    for name in (*_FLAGS.split(), "prompts_file"):
        value = flags.get(name)
        if value not in (None, "auto", []):
            text = ",".join(value) if isinstance(value, list) else str(value)
            words.append(f"--{name}={_short(text)}")
    return shlex.join(words)


def _short(name: str) -> str:
    path = pathlib.PurePath(name)
    return path.name if path.is_absolute() else name


def _failed(record: Mapping[str, Any]) -> dict[str, Any]:
    return {label: row for label, row in record["rows"].items() if "error" in row}


def _cells(record: Mapping[str, Any]) -> list[tuple[tuple[float, str], dict[str, str]]]:
    measured = [(label, row) for label, row in record["rows"].items() if "error" not in row]
    measured.sort(key=lambda item: (item[1]["temperature"], -item[1]["speedup"]["median"]))
    return [((row["temperature"], label), _row_cells(row)) for label, row in measured]


def _row_cells(row: Mapping[str, Any]) -> dict[str, str]:
    number_of_drafts = row["num_draft_tokens"]
    name = f"{row['drafter']}:{number_of_drafts}"
    same, memory = row["same_answers"], sum(row["drafter_bytes"].values())
    cells = (
        code(f"{name} (the default)" if row["is_default"] else name),
        row["acceptance"],
        interval(_ratio(row["speedup"])),
        number(row["tokens_per_second"], 1),
        number(row["tokens_per_target_call"]),
        number_cell(row["acceptance_rate"], ".0%"),
        NOTHING if same is None else f"{same} of {row['num_prompts']}",
        number(memory / 1e6, 1),
        audit_cell(row.get("audit")),
    )
    return dict(zip(_COLUMNS, cells, strict=True))


def audit_cell(audit: Mapping[str, Any] | None) -> str:
    """Returns the finding of an audit, for a cell of the table; see `stamps.keep_stamp`."""
    if audit is None:
        return NOTHING
    if "error" in audit:
        return "failed"
    if audit.get("is_inconclusive"):
        return f"inconclusive, {audit['num_rows']} rows"
    if not audit["is_lossless"]:
        return f"not passed: {', '.join(audit['failed'])}"
    return f"{audit['num_checks']} of {audit['num_checks']}, {audit['num_rows']} rows"


def _ratio(speedup: Mapping[str, float] | None) -> Ratio | None:
    return None if speedup is None else Ratio(**speedup)


def _category_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    order = [category for members in TASKS.values() for category in members]
    names = sorted(
        rows[0]["by_category"], key=lambda name: order.index(name) if name in order else len(order)
    )
    lines = []
    for name in names:
        line = {"category": name}
        for row in rows:
            figures = row["by_category"][name]
            speedup = _ratio(figures["speedup"])
            cell = (
                f"{number(speedup and speedup.median)} / {number(figures['mean_accepted_tokens'])}"
            )
            line[code(f"{row['drafter']}:{row['num_draft_tokens']} {row['acceptance']}")] = cell
        lines.append(line)
    return Table("Speed-up / tokens per call, by category", lines)


def _file_lines(record: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{role}: {code(name)}, SHA-256 {code(digest)}"
        for role, files in record["files"].items()
        for name, digest in files.items()
    ]
    versions = ", ".join(f"{name} {v}" for name, v in record["versions"].items() if v)
    weights = f"the target's weights in memory: {record['target_bytes'] / 1e6:.0f} MB"
    return [*lines, weights, versions]
