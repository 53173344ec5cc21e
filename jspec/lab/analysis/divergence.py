"""Where two greedy answers diverge, and whether rounding explains it.

Passes over other numbers of tokens round differently. Say that from one pass to another the gap
between the two best logits changes by at most E. If one pass prefers token a and the other token b,
then in either pass, and in a third, the two are at most E apart, which is what is checked.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

# Gaps in logits below which a divergence is rounding, by the dtype of the weights. Bfloat16: twice
# the largest change that was found on SmolLM2-135M-Instruct, passes over 1 token beside passes over
# 6: 0.144 over 1026 places of nine texts.
EXCUSED_GAPS = {"float32": 1e-4, "bfloat16": 0.3}

Answers = Sequence[Sequence[int]]
LogitsFn = Callable[[Sequence[int]], np.ndarray]


def parting_gaps(
    prompts: Answers, answers: Answers, others: Answers, logits_after: LogitsFn
) -> list[float]:
    """Returns a gap for each prompt whose two answers differ; see `generation.logits_after`.

    The gap is between the target's best logit where they part and that of the less likely of the
    two tokens: at least the gap between its two best ones. It is infinite where one answer is the
    other's beginning.
    """
    gaps = []
    for prompt, answer, rival in zip(prompts, answers, others, strict=False):
        place = next(
            (i for i, (a, b) in enumerate(zip(answer, rival, strict=False)) if a != b), None
        )
        if place is not None:
            logits = logits_after([*prompt, *answer[:place]])
            gaps.append(float(logits.max() - min(logits[answer[place]], logits[rival[place]])))
        elif len(answer) != len(rival):
            gaps.append(math.inf)
    return gaps
