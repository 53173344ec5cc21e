"""The chapters of a report on an experiment of kind "estimate"."""

from collections.abc import Mapping, Sequence
from typing import Any

from jspec.evaluation.reports import figures_estimate
from jspec.evaluation.reports.document import Block, Heading, Paragraph, Table, Words
from jspec.evaluation.reports.estimated import Estimate, parse_estimates
from jspec.evaluation.reports.explain_methods import drafters_table
from jspec.evaluation.reports.view import View
from jspec.evaluation.reports.wording import (
    EXPLAIN_INTERVALS,
    NOTHING,
    code,
    explain_setting,
    interval,
    listed,
    percent,
)
from jspec.evaluation.reports.workdir import Workdir

_WORDS = (
    (
        "alpha",
        "the probability that the target keeps a draft, E[Σ min(target, draft)]: 1 if both always "
        "agree, 0 if they never do. Computed from the probabilities that the two give to each next "
        "token of the target's own answers.",
    ),
    (
        "distribution",
        "those probabilities. A drafter's distribution is sampled if it draws by chance, "
        "deterministic if it has one draft to offer, with probability 1.",
    ),
    ("entropy", "how unsure the target is about the next token, in nats; 0 is certain."),
    (
        "lenience",
        "a rule that keeps more drafts than the exact one does, at a price: the answers are no "
        "longer quite the target's. 1 is the exact rule.",
    ),
    (
        "total variation",
        "how far two distributions are apart: the probability that has to move from some tokens to "
        "others, 0 to 1.",
    ),
)


def estimate_chapters(workdir: Workdir) -> list[Block]:
    """Returns verdict, words, tables and pictures.

    Args:
      workdir: of the experiment.
    """
    config = workdir.config
    estimates = parse_estimates(config, workdir.done)
    if not estimates:
        return [Paragraph("No cell is finished yet.")]
    settings = list(dict.fromkeys(one.setting for one in estimates))
    groups = {name: [one for one in estimates if one.setting == name] for name in settings}
    blocks: list[Block] = [Heading("Verdict"), Paragraph(_introduction(config))]
    for setting, own in groups.items():
        explained = explain_setting(config["settings"][setting])
        blocks += [Heading(f"{setting}: {explained}", 3), Paragraph(_verdict(own))]
    drafters = drafters_table(config["methods"], str(config.get("target")))
    blocks += [Heading("Words"), Words(_WORDS), Heading("Drafters"), drafters]
    blocks += [Heading("Alpha"), _alpha_table(estimates), figures_estimate.alphas(estimates)]
    for index, (setting, own) in enumerate(groups.items(), 1):
        view = View(f"-{index}" if len(groups) > 1 else "", setting)
        blocks += _details(own, view)
    return blocks


def _introduction(config: Mapping[str, Any]) -> str:
    return (
        f"How often would {code(config.get('target'))}, the **target**, keep what each **drafter** "
        "guesses? A drafter proposes the next few tokens (words, or pieces of words), the "
        "**drafts**, before the target is asked; **alpha** is the probability that the target "
        "keeps one. The higher, the more tokens come from one call of the target; whether that is "
        "faster hangs on what drafting costs. Nothing was timed here."
    )


def _verdict(estimates: Sequence[Estimate]) -> str:
    known = [(one, one.alpha) for one in estimates if one.alpha is not None]
    if not known:
        return "No drafter had anything to propose."
    known.sort(key=lambda pair: pair[1].median, reverse=True)
    best, alpha = known[0]
    text = f"**Kept most often: the drafts of {code(best.method)}, alpha = {interval(alpha)}.**"
    if best.num_places < best.num_tokens:
        text += f" It has something to propose before {_coverage(best)} of the tokens."
    rest = [f"{code(one.method)} {interval(own)}" for one, own in known[1:]]
    return f"{text} Then {listed(rest)}." if rest else text


def _coverage(one: Estimate) -> str:
    return percent(one.num_places / one.num_tokens if one.num_tokens else None)


def _alpha_table(estimates: Sequence[Estimate]) -> Table:
    rows = [
        (
            one.setting,
            code(one.method),
            one.distribution,
            interval(one.alpha, 3),
            _coverage(one),
            str(one.num_tokens),
        )
        for one in estimates
    ]
    return Table(
        "Alpha of each drafter",
        (
            "setting",
            "drafter",
            "its distribution",
            "alpha",
            "has a proposal (% of tokens)",
            "tokens",
        ),
        tuple(rows),
        text_columns=(0, 1, 2),
        note="Alpha is the mean over the tokens before which the drafter has a proposal. "
        + EXPLAIN_INTERVALS,
    )


def _details(estimates: Sequence[Estimate], view: View) -> list[Block]:
    blocks: list[Block] = [Heading(f"Where drafts are kept: {view.where}")]
    categories = list(dict.fromkeys(name for one in estimates for name in one.by_category))
    if len(categories) > 1:
        rows = [
            (
                code(one.method),
                *(interval(one.by_category.get(category)) for category in categories),
            )
            for one in estimates
        ]
        columns = ("drafter", *categories)
        caption = f"Alpha by category ({view.where})"
        note = f"{EXPLAIN_INTERVALS} One prompt alone has none."
        blocks.append(Table(caption, columns, tuple(rows), note=note))
    blocks.append(figures_estimate.by_entropy(estimates, view))
    lenient = [one for one in estimates if len(one.leniences) > 1]
    if lenient:
        blocks += [_lenience_table(lenient, view), figures_estimate.by_lenience(lenient, view)]
    return blocks


def _lenience_table(estimates: Sequence[Estimate], view: View) -> Table:
    leniences = list(dict.fromkeys(own.lenience for one in estimates for own in one.leniences))
    rows = []
    for one in estimates:
        cells = {
            own.lenience: f"{interval(own.acceptance)} / {interval(own.total_variation, 3)}"
            for own in one.leniences
        }
        rows.append((code(one.method), *(cells.get(lenience, NOTHING) for lenience in leniences)))
    return Table(
        f"Drafts kept / total variation from the target, by lenience ({view.where})",
        ("drafter", *(f"{lenience:g}" for lenience in leniences)),
        tuple(rows),
        note="Shares of 1. The total variation is exact, summed over the vocabulary at each token. "
        + EXPLAIN_INTERVALS,
    )
