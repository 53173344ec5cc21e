"""The chapters of a report on an experiment whose cells are tables: "theory" and "predict"."""

from collections.abc import Mapping, Sequence
from typing import Any

from jspec.common.figures import Curves
from jspec.evaluation.reports.document import Block, Heading, Table, plain
from jspec.evaluation.reports.origin import View
from jspec.evaluation.reports.workdir import Workdir

_TITLES = {
    "table1": "Table 1: operations and speed of free drafts",
    "figure2": "Figure 2: tokens per target call",
    "figure3": "Figure 3: the best number of drafts",
    "figure4": "Figure 4: speed and arithmetic operations",
}
_PREDICT = (
    "Computed from the bytes that the models read and the operations that they compute; nothing "
    "was generated. These are limits: launches, sampling and unpacking come on top. Break-even "
    "alpha: above it, drafting is faster than plain decoding."
)


def theory_chapters(workdir: Workdir, view: View) -> list[Block]:
    """Returns a chapter for each table or figure of the paper."""
    blocks: list[Block] = ["Formulas of arXiv 2211.17192; nothing was measured."]
    for name, record in ((line["key"]["table"], line["record"]) for line in workdir.done):
        title = _TITLES[name]
        blocks += [Heading(title), record["notes"]]
        is_figure = name.startswith("figure")
        blocks.append(view.draw(name, curves_of(record), title) if is_figure else _table(record))
    return blocks


def predict_chapters(workdir: Workdir, view: View) -> list[Block]:
    """Returns a chapter for each pair of models."""
    blocks: list[Block] = [_PREDICT]
    for name, record in ((line["key"]["pair"], line["record"]) for line in workdir.done):
        notes = [note for note in record["notes"] if not note.startswith("alpha ")]
        blocks += [Heading(name), notes, _table(record)]
        speeds = [one for one in curves_of(record) if "plain decoding" in one.y_label]
        if speeds and len(speeds[0].x) > 1:
            file = "predict-" + "".join(c if c.isalnum() else "-" for c in name.lower())
            panels = [one._replace(reference="plain decoding") for one in speeds]
            pair = workdir.config.get("predict", {}).get(name, {})
            models = " for ".join(pair[role] for role in ("draft", "target") if role in pair)
            own = view._replace(model=models)
            blocks.append(own.draw(file, panels, f"Limits of speed: {name}"))
    return blocks


def curves_of(record: Mapping[str, Any]) -> list[Curves]:
    """Returns the curves of a table, those of each kind of value in a panel of their own.

    Columns of one unit belong together; "speed, 3 drafts" (or "speed at 3 drafts") and
    "operations, 3 drafts" do not.
    """
    columns, units = record["columns"], record["units"]
    kinds: dict[str, dict[str, Sequence[float | None]]] = {}
    for index, (name, unit) in enumerate(zip(columns, units, strict=True)):
        values = [row[index] for row in record["rows"]]
        if index and all(value is None or isinstance(value, int | float) for value in values):
            kind, mark, rest = name.partition(", " if ", " in name else " at ")
            own = kinds.setdefault(_label(kind if mark else "", unit), {})
            own[rest if mark else name] = values
    x = [row[0] for row in record["rows"]]
    return [Curves(x, own, _label(columns[0], units[0]), label) for label, own in kinds.items()]


def _label(name: str, unit: str) -> str:
    return f"{name} ({unit})" if name and unit else name or unit


def _table(record: Mapping[str, Any]) -> Table:
    columns = list(map(_label, record["columns"], record["units"]))
    rows = [dict(zip(columns, map(plain, row), strict=True)) for row in record["rows"]]
    return Table("", rows)
