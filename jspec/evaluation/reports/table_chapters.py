"""The chapters of a report on an experiment whose cells are tables: "theory" and "predict"."""

from collections.abc import Mapping
from typing import Any

from jspec.common import curves
from jspec.common.errors import InputError
from jspec.evaluation.reports.document import Block, Bullets, Heading, Paragraph, Table
from jspec.evaluation.reports.pair_verdict import pair_verdict
from jspec.evaluation.reports.wording import code, column_texts
from jspec.evaluation.reports.workdir import Workdir

_TITLES = {
    "table1": "Table 1: what drafts bring if they cost nothing",
    "figure2": "Figure 2: tokens per target call",
    "figure3": "Figure 3: the best number of drafts",
    "figure4": "Figure 4: speed, and arithmetic operations",
}
_CAPTIONS = {
    "figure2": "**Tokens per target call** against alpha, how likely a draft is kept, by the "
    "number of drafts a round.",
    "figure3": "**The best number of drafts a round** against alpha, by c, what a draft costs in "
    "plain steps.",
    "figure4": "**Speed and arithmetic operations**, in times plain decoding's, against alpha, by "
    "the number of drafts a round, if drafts cost nothing.",
}
_THEORY = (
    "Formulas of Leviathan et al. (arXiv 2211.17192); nothing was measured. **Drafts** are tokens "
    "guessed by something cheap; **alpha** is the probability that the model whose answers are "
    "wanted, the **target**, keeps a draft; **c** is what a draft costs, in steps of plain "
    "decoding. **Speed** is that of generating, **operations** are additions and multiplications a "
    "token, both in times plain decoding's."
)
_PREDICT = (
    "What to expect of pairs of models, from the bytes they read and the operations they compute "
    "alone; nothing was generated. The **draft** model guesses tokens, the **target** checks them "
    "in one call. **Alpha** is the probability that a guess is kept; **break-even alpha** is where "
    "drafting begins to pay. How high alpha is for a pair is left to measure. A **plain step** is "
    "one token of the target without drafts. These are limits: real calls take longer, those of "
    "int8 and int4 weights above all, which have to be unpacked, and a check of many drafts costs "
    "more than a plain step on a machine with few cores."
)


def table_chapters(workdir: Workdir) -> list[Block]:
    """Returns a chapter for each table, drawn where it is one of curves; verdicts on pairs first.

    Raises:
      InputError: a cell that is no table.
    """
    is_theory = workdir.config["kind"] == "theory"
    tables = [
        (str(line["key"].get("table" if is_theory else "pair")), _check(line))
        for line in workdir.done
    ]
    if is_theory:
        return [Paragraph(_THEORY), *(block for one in tables for block in _theory(*one))]
    pairs = workdir.config.get("predict", {})
    verdicts = tuple(pair_verdict(name, pairs.get(name, {}), record) for name, record in tables)
    blocks: list[Block] = [Paragraph(_PREDICT), Heading("Verdict"), Bullets(verdicts)]
    return [*blocks, *(block for one in tables for block in _prediction(*one))]


def _check(line: Mapping[str, Any]) -> dict[str, Any]:
    record = dict(line["record"])
    widths = {len(row) for row in record.get("rows", ())}
    widths |= {len(record.get("columns", ())), len(record.get("units", ()))}
    if len(widths) != 1 or not record.get("rows"):
        raise InputError(f"expected a table in the cell {line['cell']!r}, got something else")
    return record


def _theory(name: str, record: dict[str, Any]) -> list[Block]:
    blocks: list[Block] = [Heading(_TITLES.get(name, name))]
    if name in _CAPTIONS:
        picture = curves.draw(name, curves.of_table(record), caption=_CAPTIONS[name])
        return [*blocks, picture, *_notes(record)]
    return [*blocks, _table("", record), *_notes(record)]


def _prediction(pair: str, record: dict[str, Any]) -> list[Block]:
    """Returns a pair's notes, but what the verdict says, table and speeds by number of drafts."""
    notes = [note for note in record.get("notes", ()) if not str(note).startswith("alpha ")]
    blocks: list[Block] = [Heading(pair), *_notes({"notes": notes})]
    blocks.append(_table(f"Pair {code(pair)}", record))
    speeds = [one for one in curves.of_table(record) if "plain decoding" in one.y_label]
    if speeds and len(speeds[0].x) > 1:
        caption = (
            f"**Speed to expect of {code(pair)}**, in times plain decoding's, against the number "
            "of drafts a round, by alpha. Above 1 the pair pays."
        )
        name = "predict-" + "".join(c if c.isalnum() else "-" for c in pair.lower())
        blocks.append(curves.draw(name, speeds, caption=caption))
    return blocks


def _table(caption: str, record: dict[str, Any]) -> Table:
    columns = [
        f"{column} ({unit})" if unit else column
        for column, unit in zip(record["columns"], record["units"], strict=True)
    ]
    texts = [column_texts(values) for values in zip(*record["rows"], strict=True)]
    rows = tuple(zip(*texts, strict=True))
    return Table(caption, tuple(columns), rows, text_columns=())


def _notes(record: dict[str, Any]) -> list[Block]:
    notes = tuple(map(str, record.get("notes", ())))
    return [Bullets(notes)] if notes else []
