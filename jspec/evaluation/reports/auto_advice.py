"""Whether a number of drafts that adapts ("auto") does as well as the best fixed one."""

from jspec.evaluation.reports.document import Block, Paragraph
from jspec.evaluation.reports.measured import all_rounds, distinct_answers
from jspec.evaluation.reports.scene import Scene
from jspec.evaluation.reports.speeds import compare, decoding, speed, whole
from jspec.evaluation.reports.wording import code, interval

_FEWEST_ROUNDS = 100


def advise_auto(scene: Scene) -> list[Block]:
    """Returns a sentence for each way whose number of drafts adapts; nothing where none does."""
    sentences = [
        f"{code(method)} chooses its number of drafts itself: {_compared(scene, method)}."
        for method, spec in scene.methods.items()
        if spec.get("num_draft_tokens") == "auto" and spec.get("drafter") != "none"
    ]
    return [Paragraph(" ".join(sentences))] if sentences else []


def _compared(scene: Scene, method: str) -> str:
    if method not in scene.cells:
        return "too few rounds to tell whether it does that well (none is finished)"
    clock = decoding if scene.batch_size == 1 else whole
    speeds = {
        other: own
        for other in _fixed_siblings(scene, method)
        if (own := speed(scene.cells[other], clock)) is not None
    }
    if not speeds:
        return "no fixed number of its drafter was timed beside it to compare it with"
    best = max(speeds, key=lambda other: speeds[other])
    compared = compare(scene.cells[method], scene.cells[best], clock)
    num_rounds = len(all_rounds(distinct_answers(scene.cells[method])))
    if compared is None or compared.is_timed_once or num_rounds < _FEWEST_ROUNDS:
        return (
            f"too few rounds to tell whether it does as well as {code(best)} ({num_rounds} rounds; "
            f"at least {_FEWEST_ROUNDS}, timed more than once, are needed)"
        )
    ratio = compared.ratio
    outcome = "no clear difference"
    if ratio.high < 1:
        outcome = "clearly slower: give the number yourself"
    elif ratio.low > 1:
        outcome = "clearly faster"
    return (
        f"{interval(ratio)} times as fast as {code(best)}, the best of the fixed numbers that were "
        f"timed; {outcome}"
    )


def _fixed_siblings(scene: Scene, method: str) -> list[str]:
    """Returns the methods that differ from an adapting one in the number of drafts alone."""
    own = {**scene.methods[method], "num_draft_tokens": None}
    return [
        other
        for other in scene.others
        if isinstance(scene.methods[other].get("num_draft_tokens"), int)
        and {**scene.methods[other], "num_draft_tokens": None} == own
    ]
