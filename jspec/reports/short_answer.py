"""Which way to use for which task, in a sentence or two: what stands at the top of a report."""

from collections.abc import Mapping

from jspec.reports.advice import FEW_PROMPTS, Choice, is_faster, is_slower
from jspec.reports.scene import Scene
from jspec.reports.ways import WayNumbers
from jspec.reports.wording import code, explain_drafter, listed, number


def short_answer(scene: Scene, best: WayNumbers, choices: Mapping[str, Choice]) -> str:
    """Returns the answer for one scene.

    Args:
      scene: what was measured.
      best: the fastest way over all prompts.
      choices: what to use for each category.
    """
    if best.is_timed_once:
        return "too little was timed to say."
    sentences = [_overall(scene, best)]
    if best.num_prompts < FEW_PROMPTS:
        sentences.append("There are too few prompts to say more than a hint.")
    elif any(choice.best.num_prompts < FEW_PROMPTS for choice in choices.values()):
        sentences.append("For single tasks there are too few prompts to say more than a hint.")
    elif choices:
        sentences += _by_task(scene, best, choices)
    return " ".join(sentences)


def _overall(scene: Scene, best: WayNumbers) -> str:
    if is_faster(best):
        explained = explain_drafter(scene.ways[best.way].get("drafter", ""))
        assert best.speedup is not None
        return (
            f"use {code(best.way)}, {number(best.speedup.median)} times as fast as "
            f"{scene.base_name} over all prompts. It {explained}."
        )
    if is_slower(best):
        return f"draft nothing: every way is slower than {scene.base_name} over all prompts."
    return f"over all prompts no way is clearly faster than {scene.base_name}."


def _by_task(scene: Scene, best: WayNumbers, choices: Mapping[str, Choice]) -> list[str]:
    """Returns for which tasks something else is to be used than what is best over all prompts."""
    tasks: dict[str, list[str]] = {}
    for category, choice in choices.items():
        tasks.setdefault(choice.use.way if choice.use else scene.base, []).append(category)
    usual = best.way if is_faster(best) else scene.base
    others = [
        f"{code(way)} for {listed(own)}"
        for way, own in tasks.items()
        if way not in (usual, scene.base)
    ]
    begin = "For some tasks take another"
    if usual == scene.base:
        begin = "For some tasks one is"
    sentences = [f"{begin}: {'; '.join(others)}."] if others else []
    if usual != scene.base and scene.base in tasks:
        found = listed(tasks[scene.base])
        sentences.append(f"Nothing is clearly faster than {scene.base_name} for {found}.")
    return sentences
