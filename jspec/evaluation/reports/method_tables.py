"""Tables of the numbers of the methods of generating: over everything, by category."""

from jspec.common.counted import counted
from jspec.evaluation.reports.advice import kept_share
from jspec.evaluation.reports.document import Table
from jspec.evaluation.reports.families import families
from jspec.evaluation.reports.methods import MethodNumbers
from jspec.evaluation.reports.scene import Scene, Summary
from jspec.evaluation.reports.wording import (
    CONTROL,
    COST,
    NOTHING,
    code,
    interval,
    number,
    percent_interval,
)

_MOST_SHOWN = 6


def overall_table(summary: Summary, dtype: str) -> Table:
    """Returns the numbers of each way over all prompts.

    Args:
      summary: of a scene.
      dtype: of the target's weights and caches.
    """
    scene = summary.scene
    has_same = scene.settings.get("temperature", 0.0) == 0
    is_single = scene.batch_size == 1
    columns = ["method", "speed-up", "tokens/s", "drafts kept", "alpha", "drafts a round",
               "tokens per call"]  # fmt: skip
    columns += [COST, "speed-up of whole answers"] if is_single else []
    columns += ["same answers"] if has_same else []
    rows = []
    for own in summary.overall:
        is_base = own.method == scene.base
        row = [
            code(own.method),
            "1" if is_base else interval(own.speedup, is_once=own.is_timed_once),
            number(own.tokens_per_second, 1),
            percent_interval(own.acceptance),
            interval(own.alpha),
            number(own.proposed_per_round),
            number(own.tokens_per_call),
        ]
        if is_single:
            whole = interval(own.whole_speedup, is_once=own.is_timed_once)
            row += [number(own.cost), "1" if is_base else whole]
        if has_same:
            same, total = own.same_answers
            row.append(f"{same} of {total}")
        rows.append(tuple(row))
    most = max(summary.overall, key=lambda own: own.num_prompts)
    note = f"{_note(scene, most)} {explain_same_answers(scene, dtype)}"
    return Table(f"All prompts ({name_of(scene)})", tuple(columns), tuple(rows), note=note)


def _note(scene: Scene, most: MethodNumbers) -> str:
    is_once = most.num_repeats == 1
    answers = most.same_answers[1]
    turns = "" if answers <= most.num_prompts * most.num_repeats else (
        f" ({answers} answers: some prompts have several turns)"
    )  # fmt: skip
    text = (
        f"{counted(most.num_prompts, 'prompt')}{turns}, each timed "
        f"{'once' if is_once else f'{most.num_repeats} times'}, the ways in turn; intervals over "
        f"prompts{'' if is_once else ' and repeats'}."
    )
    if scene.batch_size > 1:
        return f"{text} A speed is all tokens of a batch over all of its time."
    return text


def explain_same_answers(scene: Scene, dtype: str) -> str:
    """Returns what it means that answers are, or are not, the base's token for token.

    Args:
      scene: what was measured.
      dtype: of the target's weights and caches.
    """
    if scene.settings.get("temperature", 0.0) > 0:
        return (
            "Answers are not compared with each other: at a temperature above 0 every way draws "
            "its own, as a second draw of plain decoding would be another text too. A way that "
            "keeps the target's answers draws them from the same probabilities."
        )
    text = f"**Same answers** are token for token those of {scene.base_name}. "
    if any(scene.is_lossy[method] for method in scene.cells):
        text += "Methods that change the answers may part from them anywhere. "
    if dtype == "float32":
        return (
            f"{text}In float32 the others should all be the same; where one is not, "
            "`python scripts/check_parity.py` shows whether two tokens were as good as tied."
        )
    return (
        f"{text}The others always take the token that the target finds most likely, but in "
        f"{dtype} a call over several tokens rounds a little differently from a call over one: "
        "where the two best tokens are nearly tied, either may win, and from there on the texts "
        "differ. Neither is less the target's own answer (`python scripts/check_parity.py` looks "
        "at each such place)."
    )


def name_of(scene: Scene) -> str:
    """Returns what a caption calls a scene."""
    return scene.setting if scene.batch_size == 1 else f"{scene.setting}, batch {scene.batch_size}"


def shown_methods(summary: Summary) -> list[str]:
    """Returns the methods that a crowded figure shows: of the fastest drafters the fastest
    number.
    """
    own = {n.method: n.speedup.median for n in summary.overall if n.speedup is not None}
    scene = summary.scene
    telling = [method for method in scene.others if scene.methods[method].get("drafter") != CONTROL]
    ranked = sorted(telling or scene.others, key=lambda method: own.get(method, 0.0), reverse=True)
    family_of = {
        label: name for name, members in families(scene.methods).items() for label in members
    }
    fastest: dict[str, str] = {}
    for method in ranked:
        fastest.setdefault(family_of.get(method, method), method)
    chosen = list(fastest.values())[:_MOST_SHOWN]
    return [method for method in scene.others if method in chosen]


def category_tables(summary: Summary) -> list[Table]:
    """Returns speed-up, and tokens per call, by category for the methods that are shown."""
    shown = shown_methods(summary)
    by_method = {
        category: {own.method: own for own in numbers}
        for category, numbers in summary.by_category.items()
    }
    faster = [
        (
            category,
            *(interval(own[method].speedup) if method in own else NOTHING for method in shown),
        )
        for category, own in by_method.items()
    ]
    per_call = [
        (
            category,
            *(
                f"{number(own[method].tokens_per_call)} ({kept_share(own[method])})"
                if method in own
                else NOTHING
                for method in shown
            ),
        )
        for category, own in by_method.items()
    ]
    columns = ("category", *map(code, shown))
    where = name_of(summary.scene)
    note = "" if len(shown) == len(summary.scene.others) else (
        f"At most {_MOST_SHOWN} drafters, the fastest overall, each with its fastest number."
    )  # fmt: skip
    return [
        Table(f"Speed-up by category ({where})", columns, tuple(faster), note=note),
        Table(
            f"Tokens per target call by category, and drafts kept ({where})",
            columns,
            tuple(per_call),
        ),
    ]
