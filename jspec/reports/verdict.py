"""What the numbers say, in sentences: which way to use for which task, and why."""

from collections.abc import Sequence
from typing import NamedTuple

from jspec.reports.advice import (
    FEW_PROMPTS,
    MOST_RIVALS,
    by_task_table,
    choose,
    find_rivals,
    is_faster,
    is_noisy,
    is_slower,
    kept_share,
    rank,
    say_everywhere,
)
from jspec.reports.auto_advice import advise_auto
from jspec.reports.document import Block, Bullets, Paragraph
from jspec.reports.scene import Summary
from jspec.reports.short_answer import short_answer
from jspec.reports.ways import WayNumbers
from jspec.reports.wording import code, interval, listed, number


class Verdict(NamedTuple):
    """The verdict on a scene.

    Attributes:
      answer: which way to use for which task, in a sentence or two.
      reasons: why, a table by task, and where drafting does not pay.
    """

    answer: str
    reasons: list[Block]


def judge(summary: Summary) -> Verdict:
    """Returns the verdict on one scene."""
    scene = summary.scene
    ranked = rank(scene, summary.overall)
    if not ranked:
        nothing = f"Nothing was timed beside {scene.base_name} yet."
        return Verdict(nothing, [])
    best = ranked[0]
    choices = choose(summary, best)
    blocks: list[Block] = [Paragraph(" ".join(filter(None, _sentences(summary, ranked))))]
    blocks += advise_auto(scene)
    if not all(choice.best.is_timed_once for choice in choices.values()):
        blocks.append(by_task_table(summary, choices))
        blocks += [Paragraph(text)] if (text := say_everywhere(summary, best)) else []
    blocks += _slow_ways(summary, ranked)
    if found := _lossy(summary):
        blocks.append(Paragraph(found))
    return Verdict(short_answer(scene, best, choices), blocks)


def _sentences(summary: Summary, ranked: Sequence[WayNumbers]) -> list[str]:
    """Returns what is said of the fastest way, "" where there is nothing to say."""
    scene, best = summary.scene, ranked[0]
    sentences = [
        _headline(best, scene.base_name),
        _noise(best) if is_noisy(best) else "",
        "" if is_noisy(best) else _reason(best, scene.base_name),
    ]
    if rivals := find_rivals(scene, ranked):
        named = listed(list(map(code, rivals[:MOST_RIVALS])))
        sentences.append(f"About as fast, as far as these prompts can tell: {named}.")
    if scene.batch_size == 1 and best.whole_speedup is not None:
        sentences.append(
            "All this is about generating; with the time to read the prompt, whole answers come "
            f"{number(best.whole_speedup.median)} times as fast."
        )
    return [*sentences, _few(best)]


def _headline(best: WayNumbers, base: str) -> str:
    assert best.speedup is not None
    measured = f"{number(best.speedup.median)} times as fast as {base}"
    bounds = f"(95 % interval {number(best.speedup.low)} to {number(best.speedup.high)})"
    if best.is_timed_once:
        bounds = "(timed once)"
    if is_faster(best):
        return f"**Fastest overall: {code(best.way)}, {measured}** {bounds}."
    if is_slower(best):
        return (
            f"**Drafting does not pay here: every way is slower than {base}.** The best, "
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
        f"{kept_share(own)} of them are kept, so that a call of the target gives "
        f"{number(own.tokens_per_call)} tokens instead of 1"
    )
    if own.cost is None or base != "plain decoding":
        return f"{text}."
    return (
        f"{text}, while a round takes {number(own.cost)} times as long as a plain step "
        f"({number(own.tokens_per_call)} / {number(own.cost)} = "
        f"{number(own.tokens_per_call / own.cost)})."
    )


def _noise(own: WayNumbers) -> str:
    """Returns that a speed-up cannot be what was measured."""
    return (
        f"But a round of it took {number(own.cost)} times as long as a plain step, and a round "
        "that checks drafts cannot cost less than one: these times are too noisy to go by. Time "
        "them again, more often (`--config.repeats=5`) and on a quiet machine."
    )


def _few(best: WayNumbers) -> str:
    if best.num_prompts >= FEW_PROMPTS:
        return ""
    counted = "prompt" if best.num_prompts == 1 else "prompts"
    return f"It rests on {best.num_prompts} {counted} only: too few to be sure."


def _slow_ways(summary: Summary, ranked: Sequence[WayNumbers]) -> list[Block]:
    """Returns the ways that slow down, and why."""
    slow = tuple(_why_slow(own) for own in ranked if is_slower(own))
    if not slow:
        return []
    base, setting = summary.scene.base_name, summary.scene.setting
    return [Paragraph(f"Slower than {base} over all prompts ({setting}):"), Bullets(slow)]


def _why_slow(own: WayNumbers) -> str:
    text = (
        f"{code(own.way)}: {interval(own.speedup)} times as fast. A call of the target gives "
        f"{number(own.tokens_per_call)} tokens ({kept_share(own)} of the drafts are kept)"
    )
    if own.cost is None:
        return f"{text}."
    return f"{text}, and a round costs {number(own.cost)} plain steps."


def _lossy(summary: Summary) -> str:
    lossy = [
        own
        for own in summary.overall
        if summary.scene.is_lossy[own.way] and own.speedup is not None
    ]
    if not lossy:
        return ""
    measured = [
        f"{code(own.way)} {interval(own.speedup, is_once=own.is_timed_once)}" for own in lossy
    ]
    return (
        f"These ways change what the target would say and are not recommended above: "
        f"{listed(measured)}."
    )
