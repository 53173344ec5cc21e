"""The chapters of a report on "estimate", "theory", "predict" and "functions"."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jspec.common.figures import Curves, Picture, new_figure, to_picture
from jspec.lab.analysis.ratios import Ratio, share
from jspec.lab.reports.document import BARS, Block, Glossary, Heading, Table, code, interval, plain
from jspec.lab.reports.generate import methods_table
from jspec.lab.reports.workdir import Record, View, Workdir

Lines = Iterable[Mapping[str, Any]]
Groups = Mapping[str, Sequence[Mapping[str, Any]]]  # cells of one setting, by method
_FEWEST_TOKENS = 20  # of a bin of entropy
_MOST_DRAWN = 8
_DRAWN = f"At most {_MOST_DRAWN} drafters, those with the highest alpha."
_WORDS = (
    ("alpha", "probability that the target keeps a draft, E[Σ min(target, draft)], along the "
     "target's own answers: the mean over the tokens before which the drafter has a proposal."),
    ("lenience", "1 is the exact rule; less keeps more drafts and changes the answers."),
    ("total variation", "distance of the resulting distribution from the target's, 0 to 1."),
    ("[a, b]", "95 % bootstrap interval over prompts; a single prompt has none."),
)  # fmt: skip
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

_WIDTH, _PER_LINE = 8, 6  # pixels of an image's row; images of a line
_CALLS, _KEPT, _SPEED = 1, 2, 4  # columns of the record


def estimate_chapters(workdir: Workdir, view: View) -> list[Block]:
    """Returns tables and figures."""
    config, settings = workdir.config, {}
    for label, method in itertools.product(config["settings"], config["methods"]):
        cells = [line for line in workdir.done if line["key"]["setting"] == label
               and line["key"]["method"] == method]  # fmt: skip
        if cells:
            settings.setdefault(label, {})[method] = cells
    blocks: list[Block] = [methods_table(config["methods"], workdir.runs), *_alphas(settings, view)]
    for index, (label, group) in enumerate(settings.items(), 1):
        suffix = f"-{index}" if len(settings) > 1 else ""
        at = config["settings"][label].get("temperature", 0.0)
        blocks += _details(label, group, view._replace(temperature=at, suffix=suffix))
    return [*blocks, Glossary(_WORDS)]


def alpha(lines: Lines) -> Ratio | None:
    """Returns the alpha of cells, with its interval over prompts; None without a proposal."""
    return _ratio(lines, lambda record: (record["sum_overlap"], record["num_places"]))


def _ratio(lines: Lines, counts: Callable[[Record], tuple[float, float]]) -> Ratio | None:
    """Returns a ratio of sums over cells; None where there is nothing.

    A prompt has a cell a seed: they are summed first, since they are not independent.
    """
    by_prompt: dict[int, list[tuple[float, float]]] = {}
    for line in lines:
        by_prompt.setdefault(line["key"]["prompt"], []).append(counts(line["record"]))
    sums = [
        [float(sum(column)) for column in zip(*pairs, strict=True)] for pairs in by_prompt.values()
    ]
    return share([part for part, _ in sums], [whole for _, whole in sums])


def _alphas(settings: Mapping[str, Groups], view: View) -> list[Block]:
    alphas = {label: {m: alpha(entries) for m, entries in group.items()}
              for label, group in settings.items()}  # fmt: skip
    rows = []
    for label, entries in alphas.items():
        for method, value in entries.items():
            records = [line["record"] for line in settings[label][method]]
            tokens, places = (sum(r[key] for r in records) for key in ("num_tokens", "num_places"))
            cells = {"setting": label, "drafter": code(method)}
            cells["its drafts"] = records[0]["distribution"]
            cells["alpha"] = interval(value, 3)
            cells["has a proposal (% of tokens)"] = f"{100 * places / tokens:.0f}"
            rows.append(cells | {"tokens": str(tokens)})
    title = "Alpha of each drafter"
    names = list(dict.fromkeys(method for entries in alphas.values() for method in entries))
    lines = {label: [entries.get(method) for method in names] for label, entries in alphas.items()}
    figure = view.draw("alpha", [Curves(names, lines, "", "alpha")], title, BARS)
    return [Heading("Alpha"), Table(title, rows), figure]


def _details(label: str, group: Groups, view: View) -> list[Block]:
    blocks: list[Block] = [Heading(f"Where drafts are accepted: {label}")]
    rows = []
    for method, cells in group.items():
        parts: dict[str, list[Mapping[str, Any]]] = {}
        for line in cells:
            parts.setdefault(str(line["record"].get("category")), []).append(line)
        alphas = {category: interval(alpha(lines)) for category, lines in parts.items()}
        rows.append({"drafter": code(method)} | alphas)
    if len(rows[0]) > 2:
        blocks.append(Table(f"Alpha by category ({label})", rows))
    alphas = {method: value.median for method, cells in group.items() if (value := alpha(cells))}
    drawn = sorted(alphas, key=alphas.__getitem__, reverse=True)[:_MOST_DRAWN]
    figures = [_by_entropy({m: group[m] for m in drawn}, view)] if drawn else []
    return [*blocks, *figures, *_by_lenience(label, group, drawn, view)]


def _by_entropy(group: Groups, view: View) -> Block:
    edges = next(iter(group.values()))[0]["record"]["entropy"]["edges"]

    def of_bin(cells: Lines, index: int) -> Ratio | None:
        known = [line["record"]["entropy"]["counts"][index] for line in cells]
        value = _ratio(cells, lambda r: tuple(r["entropy"][n][index] for n in ("sums", "counts")))
        return value if sum(known) >= _FEWEST_TOKENS else None

    bins = range(len(edges) - 1)
    lines = {method: [of_bin(cells, index) for index in bins] for method, cells in group.items()}
    label = "entropy of the target's distribution (nats; middle of the bin)"
    middles = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
    panel = Curves(middles, lines, label, "alpha", begins_at_zero=True)
    caption = f"{BARS} {_DRAWN} Bins of fewer than {_FEWEST_TOKENS} tokens are left out."
    return view.draw("alpha-by-entropy", [panel], "Alpha by entropy", caption)


def _by_lenience(label: str, group: Groups, drawn: list[str], view: View) -> list[Block]:
    first = next(iter(group.values()))[0]["record"]
    leniences = [entry["lenience"] for entry in first["lenience"]]
    if len(leniences) < 2:
        return []

    def lines_of(name: str) -> dict[str, list[Ratio | None]]:
        return {
            method: [
                _ratio(cells, lambda r, i=i: (r["lenience"][i][name], r["num_places"]))
                for i in range(len(leniences))
            ]
            for method, cells in group.items()
        }

    accepted, apart = lines_of("sum_acceptance"), lines_of("sum_total_variation")
    rows = [
        {"drafter": code(method)}
        | {f"{at:g}": f"{interval(kept)} / {interval(distance, 3)}"
           for at, kept, distance in zip(leniences, accepted[method], apart[method], strict=True)}
        for method in group
    ]  # fmt: skip
    panels = [
        Curves(leniences, {m: lines[m] for m in drawn}, "lenience (1: exact)", y_label, True)
        for lines, y_label in ((accepted, "share of drafts accepted"), (apart, "total variation"))
    ]
    caption = f"Drafts accepted (share) / total variation from the target, by lenience ({label})"
    title = "Accepted drafts and distance, by lenience"
    return [Table(caption, rows), view.draw("lenience", panels, title, f"{BARS} {_DRAWN}")]


def theory_chapters(workdir: Workdir, view: View) -> list[Block]:
    """Returns a chapter for each table or figure of the paper."""
    blocks: list[Block] = ["Formulas of arXiv 2211.17192; nothing was measured."]
    for name, record in ((line["key"]["table"], line["record"]) for line in workdir.done):
        title = _TITLES[name]
        blocks += [Heading(title), record["notes"]]
        is_figure = name.startswith("figure")
        blocks.append(view.draw(name, curves_of(record), title) if is_figure else table_of(record))
    return blocks


def predict_chapters(workdir: Workdir, view: View) -> list[Block]:
    """Returns a chapter for each pair of models."""
    blocks: list[Block] = [_PREDICT]
    for name, record in ((line["key"]["pair"], line["record"]) for line in workdir.done):
        notes = [note for note in record["notes"] if not note.startswith("alpha ")]
        blocks += [Heading(name), notes, table_of(record)]
        speeds = [curves for curves in curves_of(record) if "plain decoding" in curves.y_label]
        if speeds and len(speeds[0].x) > 1:
            file = "predict-" + "".join(c if c.isalnum() else "-" for c in name.lower())
            panels = [curves._replace(reference="plain decoding") for curves in speeds]
            pair = workdir.config.get("predict", {}).get(name, {})
            models = " for ".join(pair[role] for role in ("draft", "target") if role in pair)
            pair_view = view._replace(model=models)
            blocks.append(pair_view.draw(file, panels, f"Limits of speed: {name}"))
    return blocks


def curves_of(record: Mapping[str, Any]) -> list[Curves]:
    """Returns the curves of a table, those of each kind of value in their own panel.

    Columns of one unit belong together; "speed, 3 drafts" (or "speed at 3 drafts") and
    "operations, 3 drafts" do not.
    """
    columns, units = record["columns"], record["units"]
    kinds: dict[str, dict[str, Sequence[float | None]]] = {}
    for index, (name, unit) in enumerate(zip(columns, units, strict=True)):
        values = [row[index] for row in record["rows"]]
        if index and all(value is None or isinstance(value, int | float) for value in values):
            kind, mark, rest = name.partition(", " if ", " in name else " at ")
            lines = kinds.setdefault(_label(kind if mark else "", unit), {})
            lines[rest if mark else name] = values
    x = [row[0] for row in record["rows"]]
    return [Curves(x, lines, _label(columns[0], units[0]), label) for label, lines in kinds.items()]


def _label(name: str, unit: str) -> str:
    return f"{name} ({unit})" if name and unit else name or unit


def table_of(record: Mapping[str, Any]) -> Table:
    """Returns the table of a record's columns, units and rows."""
    columns = list(map(_label, record["columns"], record["units"]))
    rows = [dict(zip(columns, map(plain, row), strict=True)) for row in record["rows"]]
    return Table("", rows)


def functions_chapters(workdir: Workdir, view: View) -> list[Block]:
    """Returns a chapter for each chain, after a figure of all."""
    records = {line["key"]["functions"]: line["record"] for line in workdir.done}
    blocks: list[Block] = [_figure(records, view)]
    for index, (label, record) in enumerate(records.items(), 1):
        blocks += [Heading(label), record["notes"], table_of(record)]
        if "images" in record:
            blocks.append(_images(record, f"images-{index}", f"{view.title}: {label}"))
    return blocks


def _figure(records: Mapping[str, Mapping[str, Any]], view: View) -> Picture:
    numbers = sorted({row[0] for record in records.values() for row in record["rows"]})
    panels = []
    for column, name in ((_CALLS, "values per call of g"), (_KEPT, "share of guesses kept"),
                         (_SPEED, "times g alone")):  # fmt: skip
        lines = {}
        for label, record in records.items():
            known = {row[0]: row[column] for row in record["rows"]}
            lines[label] = [known.get(number) for number in numbers]
        reference = "g alone" if column != _KEPT else ""
        panels.append(Curves(numbers, lines, "guesses a round", name, True, reference=reference))
    return view.draw("functions", panels, "What guesses save", "")


def _images(record: Mapping[str, Any], name: str, title: str) -> Picture:
    kept = sum(map(sum, record["is_guess"])) / sum(map(len, record["is_guess"]))
    subtitle = f"{len(record['images'])} images; {100 * kept:.0f} % of the pixels are f's guesses"
    figure, panels = new_figure(2, title=title, subtitle=subtitle, height=2.6)
    for axes, key, heading, colours in zip(
        panels, ("images", "is_guess"), ("images", "light: guessed by f; dark: g's own"),
        ("gray_r", "cividis"), strict=True,
    ):  # fmt: skip
        axes.imshow(_tiled(record[key]), cmap=colours)
        axes.set_title(heading, fontsize=9)
        axes.set_axis_off()
    description = "images, and which of their pixels f guessed"
    return to_picture(figure, name, caption="", description=description)


def _tiled(images: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns one picture of the images, [n 64], six side by side, with gaps between them."""
    squares = np.reshape(images, (-1, _WIDTH, _WIDTH))
    squares = np.pad(squares, ((0, -len(squares) % _PER_LINE), (0, 1), (0, 1)))
    lines = squares.reshape(-1, _PER_LINE, _WIDTH + 1, _WIDTH + 1)
    return lines.transpose(0, 2, 1, 3).reshape(-1, _PER_LINE * (_WIDTH + 1))
