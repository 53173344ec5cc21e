"""The chapters of a report on an experiment of kind "generate"."""

from collections.abc import Mapping, Sequence
from typing import Any

from jspec.costs import RoundCosts
from jspec.reports.cost_lines import cost_blocks
from jspec.reports.document import Block, Bullets, Heading, Paragraph, Words
from jspec.reports.growth_chapters import Growth, batch_growth, length_growth
from jspec.reports.measured import parse_cells
from jspec.reports.pictures import scene_pictures
from jspec.reports.prediction_table import prediction_tables
from jspec.reports.scene import Scene, Summary, by_length, make_scenes, name_base, summarise
from jspec.reports.spec_bench_table import spec_bench_table
from jspec.reports.verdict import judge
from jspec.reports.view import View
from jspec.reports.way_tables import (
    category_tables,
    overall_table,
    shown_ways,
    ways_table,
)
from jspec.reports.wording import LOSSY_RULES, WORDS, code, explain_setting
from jspec.reports.workdir import Workdir

_DEFAULT_LENGTH = 64


def generate_chapters(workdir: Workdir) -> list[Block]:
    """Returns verdict, words, tables and pictures.

    Args:
      workdir: of the experiment.
    """
    config = workdir.config
    costs = {way: own[1] for way, own in workdir.costs.items() if 1 in own}
    scenes = make_scenes(config, parse_cells(workdir.done))
    if not scenes:
        return [Paragraph("No cell of the base is finished yet: there is nothing to compare with.")]
    lengths = by_length(scenes, config.get("max_new_tokens", _DEFAULT_LENGTH))
    summaries = [summarise(list(group.values())[-1]) for group in lengths]
    views = _views(summaries)
    batches: list[Growth] = []
    growing: list[Growth] = []
    for summary, view, group in zip(summaries, views, lengths, strict=True):
        shown = shown_ways(summary)
        own = [scene for scene in scenes if scene.setting == summary.scene.setting]
        batches += [batch_growth(own, shown, view)] if len(own) > 1 else []
        growing += [length_growth(group, shown, view)] if len(group) > 1 else []
    blocks = _verdict_chapter(summaries, [one.answer for one in (*batches, *growing)], config)
    blocks += [Heading("Words"), Words(tuple(WORDS.items()))]
    for summary, view in zip(summaries, views, strict=True):
        blocks += _numbers(summary, view, config, costs)
    blocks += cost_blocks(config["ways"], costs)
    if batches:
        blocks += [Heading("As the batch grows"), *(b for one in batches for b in one.blocks)]
    if growing:
        blocks += [Heading("How long an answer must be"), *(b for g in growing for b in g.blocks)]
    return blocks


def _views(summaries: Sequence[Summary]) -> list[View]:
    """Returns what the figures of each scene say alike; files of several scenes are numbered."""
    return [
        View(
            f"-{index}" if len(summaries) > 1 else "",
            summary.scene.setting,
            name_base(summary.scene.ways),
        )
        for index, summary in enumerate(summaries, 1)
    ]


def _verdict_chapter(
    summaries: Sequence[Summary], growth: Sequence[str], config: Mapping[str, Any]
) -> list[Block]:
    """Returns the answers for each scene and for what grows, their words, and the reasons."""
    verdicts = [judge(summary) for summary in summaries]
    answers = tuple(
        f"**{summary.scene.setting}** ({_explain_scene(summary.scene)}): {one.answer}"
        for summary, one in zip(summaries, verdicts, strict=True)
    )
    target = code(config.get("target"))
    blocks: list[Block] = [
        Heading("Verdict"),
        Paragraph(f"How to make {target} answer faster without changing what it says:"),
        Bullets((*answers, *growth)),
        Paragraph(_explain_drafting(config)),
        ways_table(config["ways"]),
    ]
    for summary, one in zip(summaries, verdicts, strict=True):
        if one.reasons:
            title = f"{summary.scene.setting}: {_explain_scene(summary.scene)}"
            blocks += [Heading(title, 3), *one.reasons]
    return blocks


def _explain_drafting(config: Mapping[str, Any]) -> str:
    base, label = name_base(config["ways"]), code(next(iter(config["ways"])))
    base += "" if base == label else f" ({label} in the tables)"
    has_lossy = any(way.get("acceptance") in LOSSY_RULES for way in config["ways"].values())
    but = ", but for the ways that the table says change them" if has_lossy else ""
    return (
        "How it works: a **drafter** guesses the next few **tokens** (words, or pieces of words). "
        "The model whose answers are wanted, the **target**, checks these **drafts** in one call, "
        "which takes little longer than a call for one token. It keeps them up to the first that "
        "does not fit what it would say itself, and adds one token of its own: that is a "
        f"**round**. So the answers stay its own{but}. In **plain decoding** there are no drafts: "
        "a call gives one token. A round pays if it gives more tokens than it costs, counted in "
        f"**plain steps**, the time of such a call. All is compared with {base}, which was timed "
        "in turn with the others on the same prompts."
    )


def _explain_scene(scene: Scene) -> str:
    batch = "" if scene.batch_size == 1 else f", {scene.batch_size} answers at a time"
    return f"{explain_setting(scene.settings)}{batch}"


def _numbers(
    summary: Summary, view: View, config: Mapping[str, Any], costs: Mapping[str, RoundCosts]
) -> list[Block]:
    """Returns the tables and figures of a scene."""
    overall = overall_table(summary, str(config.get("dtype")))
    blocks: list[Block] = [Heading(f"Numbers: {view.where}"), overall]
    if summary.by_category:
        blocks += category_tables(summary)
    blocks += scene_pictures(summary, view)
    tables = [
        spec_bench_table(summary, str(config.get("prompts_file"))),
        *prediction_tables(summary.scene, view, costs),
    ]
    return [*blocks, *(table for table in tables if table is not None)]
