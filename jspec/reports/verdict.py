"""What the numbers say, in sentences: which way to use for which task, and why."""

from collections.abc import Sequence

from jspec.reports.document import Block, Bullets, Paragraph, Table
from jspec.reports.measured import of_category
from jspec.reports.scene import Scene, Summary
from jspec.reports.speeds import compare, decoding, whole
from jspec.reports.ways import WayNumbers
from jspec.reports.wording import (
    NOTHING,
    code,
    explain_drafter,
    interval,
    listed,
    number,
    percent,
)

_FEW_PROMPTS = 5
_NEAR = 0.85  # ways that are slower than this share of the fastest are not its rivals
_MOST_RIVALS = 3


def verdict(summary: Summary) -> list[Block]:
    """Returns the verdict on one scene: a paragraph, a table by task, where it does not pay."""
    scene = summary.scene
    ranked = _ranked(scene, summary.overall)
    if not ranked:
        return [Paragraph(f"Nothing was timed beside {scene.base_name} yet.")]
    best = ranked[0]
    sentences = [
        _headline(best, scene.base_name),
        f"It {explain_drafter(scene.ways[best.way].get('drafter', ''))}.",
        _reason(best, scene.base_name),
    ]
    if rivals := _rivals(scene, ranked):
        named = listed(list(map(code, rivals[:_MOST_RIVALS])))
        sentences.append(f"About as fast, as far as these prompts can tell: {named}.")
    if scene.batch_size == 1 and best.whole_speedup is not None:
        sentences.append(
            "All this is about generating; with the time to read the prompt, whole answers come "
            f"{number(best.whole_speedup.median)} times as fast."
        )
    if few := _few(best):
        sentences.append(few)
    blocks: list[Block] = [Paragraph(" ".join(filter(None, sentences)))]
    if summary.by_category:
        blocks += [_by_task(summary, best), Paragraph(_everywhere(summary, best))]
    if found := _does_not_pay(summary, ranked):
        blocks += [Paragraph(f"Where speculation does not pay ({scene.setting}):"), Bullets(found)]
    if found := _lossy(summary):
        blocks.append(Paragraph(found))
    return blocks


def _ranked(scene: Scene, numbers: Sequence[WayNumbers]) -> list[WayNumbers]:
    """Returns the lossless ways but the base, the fastest first."""
    candidates = [
        own
        for own in numbers
        if own.way != scene.base and own.speedup is not None and not scene.is_lossy[own.way]
    ]
    return sorted(candidates, key=_speedup, reverse=True)


def _speedup(own: WayNumbers) -> float:
    return own.speedup.median if own.speedup is not None else 0.0


def _headline(best: WayNumbers, base: str) -> str:
    assert best.speedup is not None
    measured = f"{number(best.speedup.median)} times as fast as {base}"
    bounds = f"(95 % interval {number(best.speedup.low)} to {number(best.speedup.high)})"
    if _is_faster(best):
        return f"**Fastest overall: {code(best.way)}, {measured}** {bounds}."
    if best.speedup.high < 1:
        return (
            f"**Speculation does not pay here: every way is slower than {base}.** The best, "
            f"{code(best.way)}, was {measured} {bounds}."
        )
    chance = ", which may be chance" if best.speedup.median > 1 else ""
    return (
        f"**No way is clearly faster than {base}.** The best, {code(best.way)}, was {measured} "
        f"{bounds}{chance}."
    )


def _reason(own: WayNumbers, base: str) -> str:
    """Returns why a way is as fast as it is: what a round gives over what it costs."""
    if own.tokens_per_call is None or own.proposed_per_round is None:
        return ""
    text = (
        f"Why: it proposes {number(own.proposed_per_round, 1)} drafts a round on average and "
        f"{_kept(own)} of them are kept, so that a call of the target gives "
        f"{number(own.tokens_per_call)} tokens instead of 1"
    )
    if own.cost is None or base != "plain decoding":
        return f"{text}."
    return (
        f"{text}, while a round takes {number(own.cost)} times as long as a plain step "
        f"({number(own.tokens_per_call)} / {number(own.cost)} = "
        f"{number(own.tokens_per_call / own.cost)})."
    )


def _few(best: WayNumbers) -> str:
    if best.num_prompts >= _FEW_PROMPTS:
        return ""
    counted = "prompt" if best.num_prompts == 1 else "prompts"
    return f"It rests on {best.num_prompts} {counted} only: too few to be sure."


def _rivals(scene: Scene, ranked: Sequence[WayNumbers], category: str | None = None) -> list[str]:
    """Returns the ways that are not clearly slower than the fastest."""
    best, *rest = ranked
    clock = decoding if scene.batch_size == 1 else whole
    rivals = []
    for own in rest:
        if _speedup(own) < _NEAR * _speedup(best):
            break
        sides = [scene.cells[way] for way in (own.way, best.way)]
        if category is not None:
            sides = [of_category(side, category) for side in sides]
        compared = compare(*sides, clock)
        if compared is not None and compared.ratio.high >= 1:
            rivals.append(own.way)
    return rivals


def _by_task(summary: Summary, overall: WayNumbers) -> Table:
    """Returns a line a category: what to use for it, and the numbers behind that.

    Where the best way over all prompts is clearly faster than the base and not clearly slower than
    the best one for the category, it is the one to use: picking a winner for each category follows
    chance.
    """
    scene, rows, fewest = summary.scene, [], _FEW_PROMPTS
    for category, numbers in summary.by_category.items():
        if ranked := _ranked(scene, numbers):
            rows.append((category, *_advise(scene, category, ranked, overall.way)))
            fewest = min(fewest, ranked[0].num_prompts)
    num_intervals = len(rows) * len(scene.others)
    few = (
        f" Intervals of fewer than {_FEW_PROMPTS} prompts are too narrow: take them as hints."
        if fewest < _FEW_PROMPTS
        else ""
    )
    return Table(
        f"What to use for which task ({scene.setting})",
        ("task", "use", "speed-up", "drafts kept", "tokens per call", "cost of a round", "prompts",
         "also"),
        tuple(rows),
        text_columns=(0, 1, 7),
        note="A way is named where the interval of its speed-up lies above 1; **also** are others "
        "about as fast. Of so many intervals "
        f"({num_intervals}) about {max(round(num_intervals / 40), 1)} would lie above 1 by chance."
        + few,
    )  # fmt: skip


def _advise(
    scene: Scene, category: str, ranked: Sequence[WayNumbers], overall: str
) -> tuple[str, ...]:
    """Returns a line of `_by_task` without the task."""
    best = ranked[0]
    if not _is_faster(best):
        nothing = f"best: {code(best.way)} {interval(best.speedup)}"
        return (scene.base_name, *[NOTHING] * 4, str(best.num_prompts), nothing)
    rivals = [best.way, *_rivals(scene, ranked, category)]
    numbers = {own.way: own for own in ranked}
    used = overall if overall in rivals and _is_faster(numbers[overall]) else best.way
    own = numbers[used]
    also = [way for way in rivals if way != used][:_MOST_RIVALS]
    return (
        code(used),
        interval(own.speedup),
        _kept(own),
        number(own.tokens_per_call),
        number(own.cost),
        str(own.num_prompts),
        ", ".join(map(code, also)) or NOTHING,
    )


def _everywhere(summary: Summary, overall: WayNumbers) -> str:
    """Returns where the best way over all prompts would slow down."""
    slow = [
        category
        for category, numbers in summary.by_category.items()
        for own in numbers
        if own.way == overall.way and own.speedup is not None and own.speedup.high < 1
    ]
    where = f"for {listed(slow)}" if slow else "for none of the tasks"
    return (
        f"Used for everything, {code(overall.way)} is clearly slower than "
        f"{summary.scene.base_name} {where}."
    )


def _is_faster(own: WayNumbers) -> bool:
    """Whether it is clearly so: not by one timing alone, nor without any draft that is kept."""
    if own.speedup is None or not own.kept_per_round:
        return False
    return own.speedup.low > 1 and own.num_prompts * own.num_repeats > 1


def _does_not_pay(summary: Summary, ranked: Sequence[WayNumbers]) -> tuple[str, ...]:
    """Returns the ways that slow down, and the tasks for which nothing clearly helps."""
    base, items = summary.scene.base_name, []
    slow = [own for own in ranked if own.speedup is not None and own.speedup.high < 1]
    if slow:
        described = "; ".join(
            f"{code(own.way)} {interval(own.speedup)}, {_kept(own)} of its drafts kept, "
            f"{number(own.tokens_per_call)} tokens per call, a round costs {number(own.cost)} "
            "plain steps"
            for own in slow
        )
        items.append(f"Slower than {base} over all prompts: {described}.")
    best = {
        category: found[0]
        for category, numbers in summary.by_category.items()
        if (found := _ranked(summary.scene, numbers)) and not _is_faster(found[0])
    }
    if best:
        described = [
            f"{category} (best {number(_speedup(own))}, {_kept(own)} of its drafts kept)"
            for category, own in best.items()
        ]
        items.append(f"No way is clearly faster than {base} for {listed(described)}.")
    return tuple(items)


def _kept(own: WayNumbers) -> str:
    return percent(own.acceptance.median if own.acceptance else None)


def _lossy(summary: Summary) -> str:
    lossy = [
        own
        for own in summary.overall
        if summary.scene.is_lossy[own.way] and own.speedup is not None
    ]
    if not lossy:
        return ""
    measured = [f"{code(own.way)} {interval(own.speedup)}" for own in lossy]
    return (
        f"These ways change what the target would say and are not recommended above: "
        f"{listed(measured)}."
    )
