"""Which way to use for which task, in a sentence or two: what stands at the top of a report."""

from collections.abc import Mapping, Sequence

from jspec.evaluation.reports.advice import FEW_PROMPTS, Choice, is_faster, is_slower, speedup_of
from jspec.evaluation.reports.methods import MethodNumbers
from jspec.evaluation.reports.scene import Scene
from jspec.evaluation.reports.wording import code, interval, listed, number

_LITTLE = 1.1  # a speed-up below this is little to gain


def short_answer(
    scene: Scene, best: MethodNumbers, rivals: Sequence[str], choices: Mapping[str, Choice]
) -> str:
    """Returns the answer for one scene.

    Args:
      scene: what was measured.
      best: the fastest way over all prompts.
      rivals: others that are not clearly slower.
      choices: what to use for each category.
    """
    if best.is_timed_once:
        return "too little was timed to say."
    sentences = [_overall(scene, best, rivals)]
    if best.num_prompts < FEW_PROMPTS:
        sentences.append("There are too few prompts to say more than a hint.")
    elif any(choice.best.num_prompts < FEW_PROMPTS for choice in choices.values()):
        sentences.append("For single tasks there are too few prompts to say more than a hint.")
    elif choices:
        sentences += _by_task(scene, best, choices)
    return " ".join(sentences)


def _overall(scene: Scene, best: MethodNumbers, rivals: Sequence[str]) -> str:
    if is_faster(best):
        gain = f"{interval(best.speedup)} times as fast as {scene.base_name} over all prompts"
        if whole := whole_answers(scene, best):
            gain += f" ({whole})"
        if _is_usual(best):
            others = (
                f", or {listed(list(map(code, rivals)), 'or')}, about as fast" if rivals else ""
            )
            return f"use {code(best.method)}, {gain}{others}."
        return f"there is little to gain: the fastest way, {code(best.method)}, is {gain}."
    if is_slower(best):
        return f"draft nothing: every way is slower than {scene.base_name} over all prompts."
    return f"over all prompts no way is clearly faster than {scene.base_name}."


def whole_answers(scene: Scene, best: MethodNumbers) -> str:
    """Returns a way's speed-up with the time to read the prompt; "" where it has no other."""
    if scene.batch_size > 1 or best.whole_speedup is None:
        return ""
    return f"whole answers, reading the prompt included: {number(best.whole_speedup.median)}"


def _is_usual(best: MethodNumbers) -> bool:
    """Whether the best way over all prompts is the one to use, if a task says nothing else."""
    return is_faster(best) and speedup_of(best) >= _LITTLE


def _by_task(scene: Scene, best: MethodNumbers, choices: Mapping[str, Choice]) -> list[str]:
    """Returns for which tasks what is to be used, but for what was said of all prompts."""
    tasks: dict[str, list[str]] = {}
    for category, choice in choices.items():
        name = f"{category} (noisy)" if choice.is_noisy else category
        tasks.setdefault(choice.use.method if choice.use else scene.base, []).append(name)
    rest = tasks.pop(scene.base, [])
    begin = "For some tasks drafting pays"
    if _is_usual(best):
        tasks.pop(best.method, None)
        begin = "For some tasks take another"
    named = [f"{code(method)} for {listed(own)}" for method, own in tasks.items()]
    sentences = [f"{begin}: {'; '.join(named)}."] if named else []
    if rest and _is_usual(best):
        sentences.append(f"Nothing is clearly faster than {scene.base_name} for {listed(rest)}.")
    elif rest and named:
        is_hurt = any(is_slower(choice.best) for choice in choices.values())
        outcome = "nothing clearly helps" if is_hurt else "it neither clearly helps nor hurts"
        sentences.append(f"For {len(rest)} of {len(choices)} tasks {outcome}.")
    return sentences
