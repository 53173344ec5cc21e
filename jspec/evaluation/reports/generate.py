"""The chapters of a report on an experiment of kind "generate"."""

import statistics
from collections.abc import Mapping

from jspec.common.figures import Curves
from jspec.evaluation.reports.costs import cost_blocks, prediction_blocks
from jspec.evaluation.reports.document import (
    Block,
    Glossary,
    Heading,
    Paragraph,
    Table,
    code,
    interval,
)
from jspec.evaluation.reports.figures import TIMED_BARS, scene_figures
from jspec.evaluation.reports.measured import answers_by_prompt, parse_cells
from jspec.evaluation.reports.origin import View
from jspec.evaluation.reports.scene import Scene, by_length, make_scenes
from jspec.evaluation.reports.tables import (
    category_tables,
    methods_table,
    overall_table,
    spec_bench_table,
)
from jspec.evaluation.reports.timed import compare, whole
from jspec.evaluation.reports.workdir import Workdir

_DEFAULT_LENGTH = 64
_WORDS = (
    ("speed-up", "decoded tokens a second, over those of the baseline, which was timed in turn. "
     "That of whole answers counts reading the prompt too."),
    ("[a, b]", "95 % bootstrap interval over prompts and repeats; none of one prompt timed once."),
    ("drafts kept", "share of the proposed drafts that the target keeps."),
    ("alpha", "share of the examined drafts that it keeps; none is examined after a rejected one."),
    ("tokens per call", "tokens that a call of the target gives, its own included."),
    ("cost of a round", "its time in plain steps, which are calls of the target for one token."),
    ("lossless", "the rule keeps the target's distribution."),
    ("same answers", "those equal to the baseline's, token for token. In bfloat16, calls of "
     "another width round differently, and nearly tied tokens may change places."),
)  # fmt: skip


def generate_chapters(workdir: Workdir, view: View) -> list[Block]:
    """Returns the chapters: methods, one for each setting, costs, growth, predictions."""
    config = workdir.config
    costs = {method: own[1] for method, own in workdir.costs.items() if 1 in own}
    scenes = make_scenes(config, parse_cells(workdir.done))
    if not scenes:
        return [Paragraph("No cell of the baseline is finished yet.")]
    lengths = by_length(scenes, config.get("max_new_tokens", _DEFAULT_LENGTH))
    chosen = [list(group.values())[-1] for group in lengths]
    blocks: list[Block] = [Paragraph(_asked(chosen[0])), methods_table(config["methods"])]
    growth: list[Block] = []
    for index, (scene, group) in enumerate(zip(chosen, lengths, strict=True), 1):
        suffix = f"-{index}" if len(chosen) > 1 else ""
        own = view._replace(temperature=scene.temperature, suffix=suffix)
        tables = [overall_table(scene), *category_tables(scene)]
        tables += spec_bench_table(scene, str(config.get("prompts_file")))
        blocks += [Heading(scene.setting), *tables, *scene_figures(scene, own)]
        sizes = {one.batch_size: one for one in scenes if one.setting == scene.setting}
        if len(sizes) > 1:
            growth += [*_growth(sizes, scene, own, "batch size"),
                       *map(overall_table, list(sizes.values())[1:])]  # fmt: skip
        growth += _growth(group, scene, own, "answer length") if len(group) > 1 else []
    blocks += cost_blocks(config["methods"], costs, view)
    return [*blocks, *growth, *prediction_blocks(chosen, costs), Glossary(_WORDS)]


def _asked(scene: Scene) -> str:
    """Returns how many prompts there were, and how long they and the answers."""
    cells = scene.cells[scene.baseline]
    answers = [answer for group in answers_by_prompt(cells) for answer in group]
    prompt = statistics.median(one.num_prompt_tokens for one in answers)
    answer = statistics.median(len(one.token_ids) for one in answers)
    return (
        f"Prompts: {len({number for cell in cells for number in cell.prompts})}. Tokens, medians: "
        f"{prompt:.0f} in a prompt, {answer:.0f} in an answer. Baseline: {scene.baseline_name}."
    )


def _growth(scenes: Mapping[int, Scene], shown: Scene, view: View, what: str) -> list[Block]:
    """Returns the speed-up of whole answers, by batch size or by answer length.

    Args:
      scenes: by that number, rising.
      shown: the one whose methods are shown.
      view: of the figure.
      what: the number is.
    """
    found = {
        method: [
            compare(scene.cells.get(method, ()), scene.cells[scene.baseline], whole)
            for scene in scenes.values()
        ]
        for method in shown.shown
    }
    rows = [
        {"method": code(method)} | dict(zip(map(str, scenes), map(interval, own), strict=True))
        for method, own in found.items()
    ]
    panel = Curves(list(scenes), found, what, "speed-up", reference=shown.baseline_name, log_x=True)
    title, name = f"Speed-up of whole answers, by {what}", f"by-{what.replace(' ', '-')}"
    return [Heading(f"By {what}"), Table(title, rows), view.draw(name, [panel], title, TIMED_BARS)]
