"""Tables of the ways of generating: over everything, by category, in Spec-Bench's columns."""

from collections.abc import Mapping
from typing import Any

from jspec.reports.document import Table
from jspec.reports.families import families
from jspec.reports.scene import Scene, Summary
from jspec.reports.ways import WayNumbers
from jspec.reports.wording import (
    NOTHING,
    UNCHANGED,
    assignments,
    code,
    explain_drafter,
    explain_rule,
    interval,
    number,
    percent_interval,
)

_MOST_SHOWN = 6


def drafters_table(ways: Mapping[str, Mapping[str, Any]]) -> Table:
    """Returns what the drafter of each way is."""
    rows = [
        (code(label), explain_drafter(way.get("drafter", "none")), _extras(way))
        for label, way in ways.items()
    ]
    columns = ("drafter", "what it does", "options")
    return Table("The drafters", columns, tuple(rows), text_columns=(0, 1, 2))


def ways_table(ways: Mapping[str, Mapping[str, Any]]) -> Table:
    """Returns what each way is, a line for those that differ in the number of drafts alone."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for label, way in ways.items():
        kind = explain_drafter(way.get("drafter", "none")), _extras(way), explain_rule(way)
        lines.setdefault(kind, []).append(label)
    has_lossy = any(rule != UNCHANGED for _, _, rule in lines)
    rows = [
        (
            ", ".join(map(code, labels)),
            drafter,
            ", ".join(str(ways[label].get("num_draft_tokens")) for label in labels)
            if any(ways[label].get("drafter") != "none" for label in labels)
            else NOTHING,
            extras,
            *([rule] if has_lossy else []),
        )
        for (drafter, extras, rule), labels in lines.items()
    ]
    columns = ["way", "what it does", "drafts a round, at most", "options"]
    columns += ["the target's answers"] if has_lossy else []
    kept = "" if has_lossy else " All keep the target's answers."
    return Table(
        "The ways of generating",
        tuple(columns),
        tuple(rows),
        text_columns=tuple(range(len(columns))),
        note="The first one is what the others are compared with. `auto` chooses the number of "
        f"drafts round by round.{kept}",
    )


def _extras(way: Mapping[str, Any]) -> str:
    """Returns what else a way's config says: the draft, its weights, the rule, options."""
    own = {"draft": way.get("draft")}
    if way.get("draft_quantization", "none") != "none":
        own["weights"] = way["draft_quantization"]
    if way.get("acceptance", "rejection") != "rejection":
        own["rule"] = way["acceptance"]
    own |= way.get("options") or {}
    return ", ".join(map(code, assignments(own))) or NOTHING


def overall_table(summary: Summary) -> Table:
    """Returns the numbers of each way over all prompts."""
    scene = summary.scene
    has_same = scene.settings.get("temperature", 0.0) == 0
    is_single = scene.batch_size == 1
    columns = ["way", "speed-up", "tokens/s", "drafts kept (%)", "proposed a round", "kept a round",
               "tokens per call"]  # fmt: skip
    columns += ["cost of a round", "speed-up of whole answers"] if is_single else []
    columns += ["same answers"] if has_same else []
    rows = []
    for own in summary.overall:
        is_base = own.way == scene.base
        row = [
            code(own.way),
            "1" if is_base else interval(own.speedup),
            number(own.tokens_per_second, 1),
            percent_interval(own.acceptance),
            number(own.proposed_per_round),
            number(own.kept_per_round),
            number(own.tokens_per_call),
        ]
        if is_single:
            row += [number(own.cost), "1" if is_base else interval(own.whole_speedup)]
        if has_same:
            same, total = own.same_answers
            row.append(f"{same} of {total}")
        rows.append(tuple(row))
    most = max(summary.overall, key=lambda own: own.num_prompts)
    return Table(
        f"All prompts ({name_of(scene)})", tuple(columns), tuple(rows), note=_note(scene, most)
    )


def _note(scene: Scene, most: WayNumbers) -> str:
    text = (
        f"{most.num_prompts} prompts, each timed {most.num_repeats} times, the ways in turn; 95 % "
        "intervals resample prompts and repeats. "
    )
    if scene.batch_size > 1:
        return f"{text}A speed is all tokens of a batch over all of its time."
    return (
        f"{text}Speed-up and tokens/s are those of decoding, from the first token to the last; a "
        "whole answer has the time to read the prompt besides, which no drafter shortens."
    )


def name_of(scene: Scene) -> str:
    """Returns what a caption calls a scene."""
    return scene.setting if scene.batch_size == 1 else f"{scene.setting}, batch {scene.batch_size}"


def shown_ways(summary: Summary) -> list[str]:
    """Returns the ways that a crowded figure shows: the fastest of each drafter's numbers."""
    own = {n.way: n.speedup.median for n in summary.overall if n.speedup is not None}
    ranked = sorted(summary.scene.others, key=lambda way: own.get(way, 0.0), reverse=True)
    family_of = {
        label: name for name, members in families(summary.scene.ways).items() for label in members
    }
    fastest: dict[str, str] = {}
    for way in ranked:
        fastest.setdefault(family_of.get(way, way), way)
    chosen = list(fastest.values())[:_MOST_SHOWN]
    return [way for way in summary.scene.others if way in chosen]


def category_tables(summary: Summary) -> list[Table]:
    """Returns speed-up, and tokens per call, by category for the ways that are shown."""
    shown = shown_ways(summary)
    by_way = {
        category: {own.way: own for own in numbers}
        for category, numbers in summary.by_category.items()
    }
    faster = [
        (category, *(interval(own[way].speedup) if way in own else NOTHING for way in shown))
        for category, own in by_way.items()
    ]
    per_call = [
        (
            category,
            *(
                f"{number(own[way].tokens_per_call)} ({percent_of(own[way])})"
                if way in own
                else NOTHING
                for way in shown
            ),
        )
        for category, own in by_way.items()
    ]
    columns = ("category", *map(code, shown))
    where = name_of(summary.scene)
    note = "" if len(shown) == len(summary.scene.others) else (
        "Of each drafter, the number of drafts that was fastest overall."
    )  # fmt: skip
    return [
        Table(f"Speed-up by category ({where})", columns, tuple(faster), note=note),
        Table(
            f"Tokens per target call by category, and drafts kept ({where})",
            columns,
            tuple(per_call),
        ),
    ]


def percent_of(own: WayNumbers) -> str:
    """Returns the share of drafts that a way keeps."""
    return NOTHING if own.acceptance is None else f"{own.acceptance.median:.0%}".replace("%", " %")
