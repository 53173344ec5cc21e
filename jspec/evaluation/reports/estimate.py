"""The chapters of a report on an experiment of kind "estimate": how likely drafts are kept."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jspec.common.figures import Curves
from jspec.evaluation.analysis.rates import share
from jspec.evaluation.analysis.ratios import Ratio
from jspec.evaluation.reports.document import BARS, Block, Glossary, Heading, Table, code, interval
from jspec.evaluation.reports.origin import View
from jspec.evaluation.reports.tables import methods_table
from jspec.evaluation.reports.workdir import Record, Workdir

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


def estimate_chapters(workdir: Workdir, view: View) -> list[Block]:
    """Returns tables and figures."""
    config, settings = workdir.config, {}
    for label, method in itertools.product(config["settings"], config["methods"]):
        own = [one for one in workdir.done if one["key"]["setting"] == label
               and one["key"]["method"] == method]  # fmt: skip
        if own:
            settings.setdefault(label, {})[method] = own
    blocks: list[Block] = [methods_table(config["methods"]), *_alphas(settings, view)]
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

    A prompt has a cell a seed: they are summed first, since they depend on each other.
    """
    by_prompt: dict[int, list[tuple[float, float]]] = {}
    for line in lines:
        by_prompt.setdefault(line["key"]["prompt"], []).append(counts(line["record"]))
    sums = [[float(sum(own)) for own in zip(*pairs, strict=True)] for pairs in by_prompt.values()]
    return share([part for part, _ in sums], [whole for _, whole in sums])


def _alphas(settings: Mapping[str, Groups], view: View) -> list[Block]:
    alphas = {label: {m: alpha(own) for m, own in group.items()}
              for label, group in settings.items()}  # fmt: skip
    rows = []
    for label, method in ((label, method) for label, own in alphas.items() for method in own):
        records = [line["record"] for line in settings[label][method]]
        tokens, places = (sum(r[key] for r in records) for key in ("num_tokens", "num_places"))
        rows.append(
            {
                "setting": label,
                "drafter": code(method),
                "its drafts": records[0]["distribution"],
                "alpha": interval(alphas[label][method], 3),
                "has a proposal (% of tokens)": f"{100 * places / tokens:.0f}",
                "tokens": str(tokens),
            }
        )
    title = "Alpha of each drafter"
    names = list(dict.fromkeys(method for own in alphas.values() for method in own))
    lines = {label: [own.get(method) for method in names] for label, own in alphas.items()}
    figure = view.draw("alpha", [Curves(names, lines, "", "alpha")], title, BARS)
    return [Heading("Alpha"), Table(title, rows), figure]


def _details(label: str, group: Groups, view: View) -> list[Block]:
    """Returns what alpha depends on at one setting: category, entropy, lenience."""
    blocks: list[Block] = [Heading(f"Where drafts are kept: {label}")]
    rows = []
    for method, own in group.items():
        parts: dict[str, list[Mapping[str, Any]]] = {}
        for line in own:
            parts.setdefault(str(line["record"].get("category")), []).append(line)
        alphas = {category: interval(alpha(lines)) for category, lines in parts.items()}
        rows.append({"drafter": code(method)} | alphas)
    if len(rows[0]) > 2:
        blocks.append(Table(f"Alpha by category ({label})", rows))
    alphas = {method: value.median for method, own in group.items() if (value := alpha(own))}
    drawn = sorted(alphas, key=alphas.__getitem__, reverse=True)[:_MOST_DRAWN]
    figures = [_by_entropy({m: group[m] for m in drawn}, view)] if drawn else []
    return [*blocks, *figures, *_by_lenience(label, group, drawn, view)]


def _by_entropy(group: Groups, view: View) -> Block:
    edges = next(iter(group.values()))[0]["record"]["entropy"]["edges"]

    def of_bin(own: Lines, index: int) -> Ratio | None:
        known = [line["record"]["entropy"]["counts"][index] for line in own]
        value = _ratio(own, lambda r: tuple(r["entropy"][n][index] for n in ("sums", "counts")))
        return value if sum(known) >= _FEWEST_TOKENS else None

    bins = range(len(edges) - 1)
    lines = {method: [of_bin(own, index) for index in bins] for method, own in group.items()}
    label = "entropy of the target's distribution (nats; middle of the bin)"
    middles = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
    panel = Curves(middles, lines, label, "alpha", begins_at_zero=True)
    caption = f"{BARS} {_DRAWN} Bins of fewer than {_FEWEST_TOKENS} tokens are left out."
    return view.draw("alpha-by-entropy", [panel], "Alpha by entropy", caption)


def _by_lenience(label: str, group: Groups, drawn: list[str], view: View) -> list[Block]:
    """Returns table and figure of what a lenient rule keeps; nothing where none was looked at."""
    leniences = [one["lenience"] for one in next(iter(group.values()))[0]["record"]["lenience"]]
    if len(leniences) < 2:
        return []

    def lines_of(name: str) -> dict[str, list[Ratio | None]]:
        return {
            method: [
                _ratio(own, lambda r, i=i: (r["lenience"][i][name], r["num_places"]))
                for i in range(len(leniences))
            ]
            for method, own in group.items()
        }

    kept, apart = lines_of("sum_acceptance"), lines_of("sum_total_variation")
    rows = [
        {"drafter": code(method)}
        | {f"{at:g}": f"{interval(one)} / {interval(other, 3)}"
           for at, one, other in zip(leniences, kept[method], apart[method], strict=True)}
        for method in group
    ]  # fmt: skip
    panels = [
        Curves(leniences, {m: lines[m] for m in drawn}, "lenience (1: exact)", y_label, True)
        for lines, y_label in ((kept, "share of drafts kept"), (apart, "total variation"))
    ]
    caption = f"Drafts kept (share) / total variation from the target, by lenience ({label})"
    title = "Drafts kept and distance, by lenience"
    return [Table(caption, rows), view.draw("lenience", panels, title, f"{BARS} {_DRAWN}")]
