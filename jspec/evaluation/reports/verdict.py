"""What the numbers say, in sentences: which way to use for which task, and why."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jspec.evaluation.reports.advice import (
    FEW_PROMPTS,
    MOST_RIVALS,
    Choice,
    choose,
    find_rivals,
    is_faster,
    is_noisy,
    is_slower,
    kept_share,
    rank,
    say_everywhere,
)
from jspec.evaluation.reports.auto_advice import advise_auto
from jspec.evaluation.reports.document import Block, Bullets, Paragraph
from jspec.evaluation.reports.methods import MethodNumbers
from jspec.evaluation.reports.scene import Scene, Summary
from jspec.evaluation.reports.short_answer import short_answer, whole_answers
from jspec.evaluation.reports.task_table import by_task_table
from jspec.evaluation.reports.wording import bound, code, interval, listed, number


class Verdict(NamedTuple):
    """The verdict on a scene.

    Attributes:
      answer: which way to use for which task, in a sentence or two.
      reasons: why, a table by task, and where drafting does not pay.
      choices: those of the table, by task; none where there is no table.
    """

    answer: str
    reasons: list[Block]
    choices: Mapping[str, Choice]


def judge(summary: Summary) -> Verdict:
    """Returns the verdict on one scene."""
    scene = summary.scene
    ranked = rank(scene, summary.overall)
    if not ranked:
        nothing = f"Nothing was timed beside {scene.base_name} yet."
        return Verdict(nothing, [], {})
    best = ranked[0]
    choices = choose(summary, best)
    rivals = find_rivals(scene, ranked)
    blocks: list[Block] = [Paragraph(" ".join(filter(None, _sentences(scene, best, rivals))))]
    blocks += advise_auto(scene)
    has_table = not all(choice.best.is_timed_once for choice in choices.values())
    if has_table:
        blocks.append(by_task_table(summary, choices))
        blocks += [Paragraph(text)] if (text := say_everywhere(summary, best)) else []
    blocks += _other_methods(scene, [own for own in ranked[1:] if own.method not in rivals])
    blocks += _slow_methods(summary, ranked)
    if found := _lossy(summary):
        blocks.append(Paragraph(found))
    answer = short_answer(scene, best, rivals[:MOST_RIVALS], choices)
    return Verdict(answer, blocks, choices if has_table else {})


def _sentences(scene: Scene, best: MethodNumbers, rivals: Sequence[str]) -> list[str]:
    """Returns what is said of the fastest way, "" where there is nothing to say."""
    sentences = [
        _headline(scene, best),
        _noise(best) if is_noisy(best) else "",
        "" if is_noisy(best) else _reason(best, scene.base_name),
    ]
    if rivals:
        named = listed(list(map(code, rivals[:MOST_RIVALS])))
        sentences.append(f"About as fast, as far as these prompts can tell: {named}.")
    return [*sentences, _few(best)]


def _headline(scene: Scene, best: MethodNumbers) -> str:
    assert best.speedup is not None
    base = scene.base_name
    measured = f"{number(best.speedup.median)} times as fast as {base}"
    bounds = f"95 % interval {bound(best.speedup.low)} to {bound(best.speedup.high)}"
    if best.is_timed_once:
        bounds = "timed once"
    bounds = f"({'; '.join(filter(None, (bounds, whole_answers(scene, best))))})"
    if is_faster(best):
        return f"**Fastest overall: {code(best.method)}, {measured}** {bounds}."
    if is_slower(best):
        return (
            f"**Drafting does not pay here: every way is slower than {base}.** The best, "
            f"{code(best.method)}, was {measured} {bounds}."
        )
    chance = ", which may be chance" if best.speedup.median > 1 else ""
    return (
        f"**No way is clearly faster than {base}.** The best, {code(best.method)}, was {measured} "
        f"{bounds}{chance}."
    )


def _reason(own: MethodNumbers, base: str) -> str:
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


def _noise(own: MethodNumbers) -> str:
    """Returns that a speed-up cannot be what was measured."""
    return (
        f"But a round of it took {number(own.cost)} times as long as a plain step, and a round "
        "that checks drafts cannot cost less than one: these times are too noisy to go by. Time "
        "them again, more often (`--config.repeats=5`) and on a quiet machine."
    )


def _few(best: MethodNumbers) -> str:
    if best.num_prompts >= FEW_PROMPTS:
        return ""
    counted = "prompt" if best.num_prompts == 1 else "prompts"
    return f"It rests on {best.num_prompts} {counted} only: too few to be sure."


def _other_methods(scene: Scene, methods: Sequence[MethodNumbers]) -> list[Block]:
    """Returns the methods that are faster all the same, and those of which it is not clear."""
    faster = [own for own in methods if is_faster(own)]
    unclear = [
        own for own in methods if not (own.is_timed_once or is_faster(own) or is_slower(own))
    ]
    named = {
        f"Faster than {scene.base_name} too, but less so": faster,
        f"Neither clearly faster nor clearly slower than {scene.base_name}": unclear,
    }
    sentences = [
        f"{text}: {listed([f'{code(own.method)} {interval(own.speedup)}' for own in found])}."
        for text, found in named.items()
        if found
    ]
    return [Paragraph(" ".join(sentences))] if sentences else []


def _slow_methods(summary: Summary, ranked: Sequence[MethodNumbers]) -> list[Block]:
    """Returns the methods that slow down, and why."""
    slow = tuple(_why_slow(own) for own in ranked if is_slower(own))
    if not slow:
        return []
    base, setting = summary.scene.base_name, summary.scene.setting
    return [Paragraph(f"Slower than {base} over all prompts ({setting}):"), Bullets(slow)]


def _why_slow(own: MethodNumbers) -> str:
    text = (
        f"{code(own.method)}: {interval(own.speedup)} times as fast. A call of the target gives "
        f"{number(own.tokens_per_call)} tokens ({kept_share(own)} of the drafts are kept)"
    )
    if own.cost is None:
        return f"{text}."
    return f"{text}, and a round costs {number(own.cost)} plain steps."


def _lossy(summary: Summary) -> str:
    lossy = [
        own
        for own in summary.overall
        if summary.scene.is_lossy[own.method] and own.speedup is not None
    ]
    if not lossy:
        return ""
    measured = [
        f"{code(own.method)} {interval(own.speedup, is_once=own.is_timed_once)}" for own in lossy
    ]
    return (
        f"These ways change what the target would say and are not recommended above: "
        f"{listed(measured)}."
    )
