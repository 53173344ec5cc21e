"""The chapters of a report on an experiment of kind "generate": tables, figures, growth."""

import functools
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jspec.common.figures import Curves, Picture
from jspec.lab.analysis.ratios import (
    PromptRounds,
    Ratio,
    acceptance_by_position,
    shares_by_accepted,
)
from jspec.lab.analysis.spec_bench import TASKS
from jspec.lab.reports.costs import cost_blocks, prediction_blocks
from jspec.lab.reports.document import (
    BARS,
    NOTHING,
    Block,
    Glossary,
    Heading,
    Table,
    code,
    interval,
    number,
    percent,
    plain,
)
from jspec.lab.reports.scene import (
    SHOWN,
    Scene,
    Timed,
    TimedCell,
    answers_by_prompt,
    by_length,
    compare,
    make_scenes,
    parse_cells,
    whole,
)
from jspec.lab.reports.workdir import View, Workdir

_UNSAID = (None, "none", 1.0)  # of options: what they are without saying so
_CATEGORIES = {category for members in TASKS.values() for category in members}

_TIMED_BARS = "Bars: 95 % bootstrap interval over prompts and repeats."
_DEFAULT_LENGTH = 64
_FEWEST_ROUNDS = 10  # of a position
_FEWEST = 5  # of a category
_WORDS = (
    ("speed-up", "decoded tokens per second, over those of the baseline, which was timed in turn. "
     "The speed-up of whole answers counts reading the prompt too."),
    ("[a, b]", "95 % bootstrap interval over prompts and repeats; one prompt timed once has none."),
    ("drafts accepted", "share of the proposed drafts that the target accepts."),
    ("alpha", "share of the examined drafts that are accepted; after a rejected draft none is "
     "examined."),
    ("tokens per call", "what a call of the target gives: accepted drafts and its own token."),
    ("cost of a round", "its time in plain steps: calls of the target on one token."),
    ("lossless", "the rule keeps the target's distribution."),
    ("same answers", "answers equal to the baseline's, token for token. In bfloat16, calls of "
     "another width round differently, and nearly tied tokens may change places."),
)  # fmt: skip


def methods_table(
    methods: Mapping[str, Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]
) -> Table:
    """Returns what each method of a config is, and whether it keeps the target's distribution.

    A rule of the user's own may not be known here: what the runs recorded of it counts then.
    """
    from jspec.speculation.acceptance import RULES, get_rule  # loads JAX

    recorded = {
        label: fields.get("is_lossless")
        for run in runs
        for label, fields in (run.get("described") or {}).items()
    }

    rows = []
    for label, method in methods.items():
        rule, is_plain = method.get("acceptance", "rejection"), method.get("drafter") == "none"
        fields = {"draft": method.get("draft"), "weights": method.get("draft_quantization"),
               "lenience": method.get("lenience"), **(method.get("options") or {})}  # fmt: skip
        said = [code(f"{name} = {plain(v)}") for name, v in fields.items() if v not in _UNSAID]
        rows.append(
            {
                "method": code(label),
                "drafter": str(method.get("drafter")),
                "drafts a round, at most": "-" if is_plain else str(method["num_draft_tokens"]),
                "options": ", ".join(said) or NOTHING,
                "rule": NOTHING if is_plain else rule,
                "lossless": {True: "yes", False: "no", None: NOTHING}[
                    get_rule(rule).is_lossless if rule in RULES else recorded.get(label)
                ],
            }
        )
    return Table("Methods of generating", rows)


def overall_table(scene: Scene) -> Table:
    """Returns the numbers of each method over all prompts."""
    rows = []
    for method, timed in scene.numbers.items():
        row = {
            "method": code(method),
            "speed-up": interval(timed.speedup),
            "tokens/s": number(timed.tokens_per_second, 1),
            "ms a token": number(timed.milliseconds, 1),
            "drafts accepted (%)": percent(timed.acceptance),
            "alpha": interval(timed.alpha),
            "drafts a round": number(timed.proposed_per_round),
            "tokens per call": number(timed.tokens_per_call),
        }
        if scene.batch_size == 1:
            row |= {"cost of a round": interval(timed.cost),
                    "speed-up of whole answers": interval(timed.whole_speedup)}  # fmt: skip
        if scene.temperature == 0:
            row["same answers"] = "{} of {}".format(*timed.same_answers)
        rows.append(row)
    _, num_prompts, num_repeats = scene.numbers[scene.baseline].compared
    what = "Prompts" if scene.batch_size == 1 else "Batches"
    note = f"{what}: {num_prompts}; timings of each: {num_repeats}."
    return Table(f"All prompts ({scene.name})", rows, note)


def category_tables(scene: Scene) -> list[Table]:
    """Returns speed-up, tokens per call and acceptance by category; nothing without categories."""
    written: dict[str, Callable[[Timed], str]] = {
        "Speed-up by category": lambda timed: interval(timed.speedup),
        "Tokens per target call by category (drafts accepted, %)": (
            lambda timed: f"{number(timed.tokens_per_call)} ({percent(timed.acceptance)})"
        ),
    }
    note = "" if scene.shown == scene.others else SHOWN
    tables = []
    for caption, write in written.items() if scene.by_category else ():
        rows = [
            {"category": category} | {code(m): write(timed[m]) for m in scene.shown}
            for category, timed in scene.by_category.items()
        ]
        tables.append(Table(f"{caption} ({scene.name})", rows, note))
    return tables


def spec_bench_table(scene: Scene, prompts_file: str) -> list[Table]:
    """Returns Spec-Bench's columns; nothing unless the prompts' categories are exactly its 13.

    See `jspec.lab.analysis.spec_bench`; the repeats of a prompt are Spec-Bench's runs.
    """
    if set(scene.by_category) != _CATEGORIES:
        return []
    groups = {task: set(members) for task, members in TASKS.items()} | {"overall": _CATEGORIES}
    base = scene.cells[scene.baseline]
    rows = [
        {"method": code(method)}
        | {name: _spec_bench_cell(cells, base, members) for name, members in groups.items()}
        for method, cells in scene.cells.items()
    ]
    note = (
        f"{len({cell.prompts for cell in base})} prompts from "
        f"{code(pathlib.PurePath(prompts_file).name)}; Spec-Bench (arXiv 2401.07851) has 480. The "
        "speed-up is a ratio of mean tokens/s of whole answers; repeats are averaged."
    )
    caption = f"Spec-Bench's columns ({scene.name}): speed-up / mean accepted tokens"
    return [Table(caption, rows, note)]


def _spec_bench_cell(
    cells: Sequence[TimedCell], base: Sequence[TimedCell], categories: set[str]
) -> str:
    """Returns speed-up and mean accepted tokens of a task.

    A repeat with fewer prompts than others, as an unfinished run has it, is left out.
    """
    theirs = {(cell.repeat, cell.prompts, cell.seed): cell for cell in base}
    runs: dict[int, list[tuple[TimedCell, TimedCell]]] = {}
    for cell in cells:
        baseline = theirs.get((cell.repeat, cell.prompts, cell.seed))
        if baseline is not None and {answer.category for answer in cell.answers} <= categories:
            runs.setdefault(cell.repeat, []).append((cell, baseline))
    most = max(map(len, runs.values()), default=0)
    full = [pairs for pairs in runs.values() if len(pairs) == most]
    answers = [answer for pairs in full for cell, _ in pairs for answer in cell.answers]
    num_rounds = sum(len(answer.rounds) for answer in answers)
    if not num_rounds:
        return NOTHING
    rates = [[[tokens / s for s, tokens in map(whole, pair)] for pair in run] for run in full]
    speedups = [np.divide(*np.mean(run, 0)) for run in rates]
    accepted = sum(answer.num_round_tokens for answer in answers) / num_rounds
    return f"{np.mean(speedups):.2f} / {accepted:.2f}"


def generate_chapters(workdir: Workdir, view: View) -> list[Block]:
    """Returns the chapters: methods, one for each setting, costs, growth, predictions."""
    config = workdir.config
    costs = {method: by_size[1] for method, by_size in workdir.costs.items() if 1 in by_size}
    scenes = make_scenes(config, parse_cells(workdir.done))
    if not scenes:
        return ["No cell of the baseline is finished yet."]
    lengths = by_length(scenes, config.get("max_new_tokens", _DEFAULT_LENGTH))
    chosen = [list(group.values())[-1] for group in lengths]
    blocks: list[Block] = [_asked(chosen[0]), methods_table(config["methods"], workdir.runs)]
    growth: list[Block] = []
    for index, (scene, group) in enumerate(zip(chosen, lengths, strict=True), 1):
        suffix = f"-{index}" if len(chosen) > 1 else ""
        scene_view = view._replace(temperature=scene.temperature, suffix=suffix)
        tables = [overall_table(scene), *category_tables(scene)]
        tables += spec_bench_table(scene, str(config.get("prompts_file")))
        blocks += [Heading(scene.setting), *tables, *scene_figures(scene, scene_view)]
        sizes = {other.batch_size: other for other in scenes if other.setting == scene.setting}
        if len(sizes) > 1:
            growth += [*_growth(sizes, scene, scene_view, "batch size"),
                       *map(overall_table, list(sizes.values())[1:])]  # fmt: skip
        growth += _growth(group, scene, scene_view, "answer length") if len(group) > 1 else []
    blocks += cost_blocks(config["methods"], costs, view)
    return [*blocks, *growth, *prediction_blocks(chosen, costs), Glossary(_WORDS)]


def _asked(scene: Scene) -> str:
    cells = scene.cells[scene.baseline]
    answers = [answer for group in answers_by_prompt(cells) for answer in group]
    prompt = statistics.median(given.num_prompt_tokens for given in answers)
    answer = statistics.median(len(given.token_ids) for given in answers)
    return (
        f"Prompts: {len({number for cell in cells for number in cell.prompts})}. Tokens, medians: "
        f"{prompt:.0f} in a prompt, {answer:.0f} in an answer. Baseline: {scene.baseline_name}."
    )


def _growth(scenes: Mapping[int, Scene], shown: Scene, view: View, what: str) -> list[Block]:
    speedups = {
        method: [
            compare(scene.cells.get(method, ()), scene.cells[scene.baseline], whole)
            for scene in scenes.values()
        ]
        for method in shown.shown
    }
    rows = [
        {"method": code(method)} | dict(zip(map(str, scenes), map(interval, ratios), strict=True))
        for method, ratios in speedups.items()
    ]
    panel = Curves(
        list(scenes), speedups, what, "speed-up", reference=shown.baseline_name, log_x=True
    )
    title, name = f"Speed-up of whole answers, by {what}", f"by-{what.replace(' ', '-')}"
    return [Heading(f"By {what}"), Table(title, rows), view.draw(name, [panel], title, _TIMED_BARS)]


def scene_figures(scene: Scene, view: View) -> list[Picture]:
    """Returns the figures that a scene has enough data for."""
    has_numbers = any(len(entries) > 1 for entries in scene.families.values())
    pictures = [_by_number(scene, view)] if has_numbers else []
    base = scene.baseline
    names = [
        name for name, entries in scene.by_category.items() if entries[base].compared[1] >= _FEWEST
    ]
    lines = {m: [scene.by_category[name][m].speedup for name in names] for m in scene.shown}
    if names:
        panel = Curves(names, lines, "", "speed-up", reference=scene.baseline_name)
        caption = f"{_TIMED_BARS} {SHOWN}"
        pictures.append(view.draw("by-category", [panel], "Speed-up by category", caption))
    return [*pictures, *_drafts_accepted(scene, view)]


def _by_number(scene: Scene, view: View) -> Picture:
    x = sorted({number for members in scene.families.values() for number in members.values()})
    panels = []
    for label, name in (("speed-up", "speedup"), ("cost of a round (plain steps)", "cost")):
        lines: dict[str, list[Ratio | None]] = {}
        for family, members in scene.families.items():
            known = {n: getattr(scene.numbers[method], name) for method, n in members.items()}
            lines[family] = [known.get(number) for number in x]
        what = "drafts a round, at most"
        panels.append(Curves(x, lines, what, label, reference=scene.baseline_name))
    title = "Speed-up and cost of a round in these answers"
    return view.draw("by-number", panels, title, _TIMED_BARS)


def _drafts_accepted(scene: Scene, view: View) -> list[Picture]:
    """Draws acceptance by position and accepted drafts per round; nothing of a single position.

    Of each drafter the method with the most drafts is shown, and those whose number adapts.
    """
    widest = {name: list(group)[-1] for name, group in scene.families.items()}
    widest |= {m: m for m in scene.others if scene.methods[m].get("num_draft_tokens") == "auto"}
    rounds = {name: scene.numbers[method].rounds for name, method in widest.items()}
    rounds = {name: group for name, group in rounds.items() if any(r[0] for a in group for r in a)}
    most = max(map(_num_positions, rounds.values()), default=0)
    if most < 2:
        return []
    panels = []
    for is_conditional, title in ((False, "accepted, of all proposed"),
                                  (True, "accepted, if all before it are")):  # fmt: skip
        rates = functools.partial(acceptance_by_position, is_conditional=is_conditional)
        lines = {name: rates(group)[: _num_positions(group)] for name, group in rounds.items()}
        where = "position of the draft"
        panels.append(Curves(range(1, most + 1), lines, where, "share", title=title))
    accepted = {name: shares_by_accepted(group, most) for name, group in rounds.items()}
    title = "rounds that accept this many"
    where = "drafts accepted in a round"
    panels.append(Curves(range(most + 1), accepted, where, "share", title=title))
    caption = f"{BARS} Positions that fewer than {_FEWEST_ROUNDS} rounds examined are left out."
    title = "Accepted drafts, by position and by round"
    return [view.draw("drafts-accepted", panels, title, caption, share_y=True)]


def _num_positions(rounds: PromptRounds) -> int:
    flat = [a_round for answer in rounds for a_round in answer]
    most = max(proposed for proposed, _, _ in flat)
    counts = [
        sum(n > place and accepted >= place for n, accepted, _ in flat) for place in range(most)
    ]
    return sum(count >= _FEWEST_ROUNDS for count in counts)
