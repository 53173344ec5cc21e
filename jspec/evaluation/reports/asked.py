"""On what a verdict rests: how many prompts, how long they and the answers were, who read them."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.common.counted import counted
from jspec.evaluation.reports.advice import FEW_PROMPTS
from jspec.evaluation.reports.explain_methods import explain_names
from jspec.evaluation.reports.measured import distinct_answers
from jspec.evaluation.reports.scene import Summary
from jspec.evaluation.reports.wording import code, listed
from jspec.generation.costs import RoundCosts

_FEW_A_TASK = 20


def explain_prompts(
    summaries: Sequence[Summary],
    methods: Mapping[str, Mapping[str, Any]],
    costs: Mapping[str, RoundCosts],
) -> str:
    """Returns what was asked, and what of the verdict hangs on it, in a few sentences.

    Args:
      summaries: of scenes with the same prompts; at least one.
      methods: of the config, by label.
      costs: of single answers, by label.
    """
    sentences = [_lengths(summaries), _of_few(summaries[0]), explain_names(methods)]
    if readers := [
        method for method in methods if method in costs and reads_prompts(costs[method])
    ]:
        sentences.append(
            f"The draft model of {listed(list(map(code, readers)))} has to read the prompt in its "
            "first round. That is in the cost of a round here: the longer an answer, the less it "
            "weighs."
        )
    return " ".join(filter(None, sentences))


def reads_prompts(costs: RoundCosts) -> bool:
    """Whether a drafter of a way takes time to read the prompt."""
    return any(seconds > 0 for own in costs.reading for seconds in own)


def _lengths(summaries: Sequence[Summary]) -> str:
    bases = [one.scene.cells[one.scene.base] for one in summaries]
    groups = [group for cells in bases for group in distinct_answers(cells)]
    prompt = statistics.median(one.num_prompt_tokens for group in groups for one in group)
    answer = statistics.median(len(one.token_ids) for group in groups for one in group)
    num_prompts = len({number for cell in bases[0] for number in cell.prompts})
    of_tokens = f" of {counted(round(prompt), 'token')}" if prompt else ""
    return (
        f"Measured on {counted(num_prompts, 'prompt')}{of_tokens}, with answers of "
        f"{counted(round(answer), 'token')} (medians)."
    )


def _of_few(summary: Summary) -> str:
    """Returns how many prompts a task has; "" where there are enough, or no tasks.

    Of very few the answers speak themselves.
    """
    counts = [max(own.num_prompts for own in numbers) for numbers in summary.by_category.values()]
    if not counts or min(counts) >= _FEW_A_TASK:
        return ""
    least, most = min(counts), max(counts)
    if most == 1:
        return "Each task has one prompt: nothing can be said of single tasks."
    number = f"{least}" if least == most else f"{least} to {most}"
    few = ", which is few: what is said of a single task is a hint" if least >= FEW_PROMPTS else ""
    return f"A task has {number} of the prompts{few}."
