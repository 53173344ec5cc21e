"""The chapters of a report on an experiment of kind "generate"."""

from collections.abc import Mapping, Sequence
from typing import Any

from jspec.evaluation.reports.asked import explain_prompts
from jspec.evaluation.reports.cost_lines import cost_blocks
from jspec.evaluation.reports.document import Block, Bullets, Heading, Paragraph, Table, Words
from jspec.evaluation.reports.explain_methods import methods_table
from jspec.evaluation.reports.growth_chapters import Growth, batch_growth, length_growth
from jspec.evaluation.reports.measured import parse_cells
from jspec.evaluation.reports.method_tables import category_tables, overall_table, shown_methods
from jspec.evaluation.reports.pictures import scene_pictures
from jspec.evaluation.reports.prediction_table import theory_chapter
from jspec.evaluation.reports.scene import (
    Scene,
    Summary,
    by_length,
    make_scenes,
    name_base,
    summarise,
)
from jspec.evaluation.reports.spec_bench_table import spec_bench_table
from jspec.evaluation.reports.task_table import explain_tasks
from jspec.evaluation.reports.verdict import Verdict, judge
from jspec.evaluation.reports.view import View
from jspec.evaluation.reports.wording import LOSSY_RULES, WORDS, code, explain_setting
from jspec.evaluation.reports.workdir import Workdir

_DEFAULT_LENGTH = 64


def generate_chapters(workdir: Workdir) -> list[Block]:
    """Returns verdict, words, reasons, tables and pictures; theory comes last.

    Args:
      workdir: of the experiment.
    """
    config = workdir.config
    costs = {method: own[1] for method, own in workdir.costs.items() if 1 in own}
    scenes = make_scenes(config, parse_cells(workdir.done))
    if not scenes:
        return [Paragraph("No cell of the base is finished yet: there is nothing to compare with.")]
    lengths = by_length(scenes, config.get("max_new_tokens", _DEFAULT_LENGTH))
    summaries = [summarise(list(group.values())[-1]) for group in lengths]
    views = _views(summaries)
    batches: list[Growth] = []
    growing: list[Growth] = []
    for summary, view, group in zip(summaries, views, lengths, strict=True):
        shown = shown_methods(summary)
        own = [scene for scene in scenes if scene.setting == summary.scene.setting]
        batches += [batch_growth(own, shown, view)] if len(own) > 1 else []
        growing += [length_growth(group, shown, view)] if len(group) > 1 else []
    verdicts = [judge(summary) for summary in summaries]
    answers = [*_answers(summaries, verdicts), *(one.answer for one in (*batches, *growing))]
    blocks: list[Block] = [
        Heading("Verdict"),
        Paragraph(f"How to make {code(config.get('target'))} answer faster without changing what "
                  "it says:"),
        Bullets(tuple(answers)),
        Paragraph(explain_prompts(summaries, config["methods"], costs)),
        *_how_it_works(config),
        *_reasons(summaries, verdicts),
    ]  # fmt: skip
    for summary, view in zip(summaries, views, strict=True):
        blocks += _numbers(summary, view, config)
    blocks += cost_blocks(config["methods"], costs)
    if batches:
        blocks += [Heading("As the batch grows"), *(b for one in batches for b in one.blocks)]
    if growing:
        blocks += [Heading("How long an answer must be"), *(b for g in growing for b in g.blocks)]
    scenes = [summary.scene for summary in summaries]
    blocks += theory_chapter(list(zip(scenes, views, strict=True)), costs)
    return _say_once(blocks)


def _say_once(blocks: Sequence[Block]) -> list[Block]:
    """Returns the blocks; what stands below an earlier table is not said below another again."""
    said: set[str] = set()
    shorter = []
    for block in blocks:
        if isinstance(block, Table):
            note = "" if block.note in said else block.note
            said.add(block.note)
            block = block._replace(note=note)
        shorter.append(block)
    return shorter


def _views(summaries: Sequence[Summary]) -> list[View]:
    """Returns what the figures of each scene say alike; files of several scenes are numbered."""
    return [
        View(
            f"-{index}" if len(summaries) > 1 else "",
            summary.scene.setting,
            name_base(summary.scene.methods),
        )
        for index, summary in enumerate(summaries, 1)
    ]


def _answers(summaries: Sequence[Summary], verdicts: Sequence[Verdict]) -> list[str]:
    """Returns the answer for each scene."""
    return [
        f"**{summary.scene.setting}** ({_explain_scene(summary.scene)}): {one.answer}"
        for summary, one in zip(summaries, verdicts, strict=True)
    ]


def _how_it_works(config: Mapping[str, Any]) -> list[Block]:
    """Returns what speculation is, the words, and what was compared."""
    target, dtype = str(config.get("target")), str(config.get("dtype"))
    return [
        Heading("How it works"),
        Paragraph(_explain_drafting(config)),
        Words(tuple(WORDS.items())),
        methods_table(config["methods"], target, dtype),
    ]


def _reasons(summaries: Sequence[Summary], verdicts: Sequence[Verdict]) -> list[Block]:
    """Returns the reasons of all verdicts; nothing where there are none."""
    if not any(one.reasons for one in verdicts):
        return []
    blocks: list[Block] = [Heading("Which way for which task, and why")]
    if choices := [choice for one in verdicts for choice in one.choices.values()]:
        blocks.append(Paragraph(explain_tasks(choices, summaries[0].scene.base_name)))
    for summary, one in zip(summaries, verdicts, strict=True):
        if one.reasons:
            title = f"{summary.scene.setting}: {_explain_scene(summary.scene)}"
            blocks += [Heading(title, 3), *one.reasons]
    return blocks


def _explain_drafting(config: Mapping[str, Any]) -> str:
    base, label = name_base(config["methods"]), code(next(iter(config["methods"])))
    base += "" if base == label else f" ({label} in the tables)"
    has_lossy = any(
        method.get("acceptance") in LOSSY_RULES for method in config["methods"].values()
    )
    but = ", but for the methods that the table says change them" if has_lossy else ""
    return (
        "A **drafter** guesses the next few **tokens** (words, or pieces of words). "
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


def _numbers(summary: Summary, view: View, config: Mapping[str, Any]) -> list[Block]:
    """Returns the tables and figures of a scene."""
    overall = overall_table(summary, str(config.get("dtype")))
    blocks: list[Block] = [Heading(f"Numbers: {view.where}"), overall]
    if summary.by_category:
        blocks += category_tables(summary)
    blocks += scene_pictures(summary, view)
    spec_bench = spec_bench_table(summary, str(config.get("prompts_file")))
    return [*blocks, *([spec_bench] if spec_bench else [])]
