"""Times the answers of several methods of generating, by turns, and compares them."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from jspec.common.text_table import NOTHING, format_table, number_cell
from jspec.common.timing import timed
from jspec.evaluation.analysis.ratios import speed_ratio


class Generated(NamedTuple):
    """An answer, and what it took after the prompt had been read.

    Attributes:
      token_ids: new ones; none where a program tells only their number.
      num_round_tokens: those given by target calls after the first, which reads the prompt.
      num_calls: how many such calls there were.
      num_proposed: drafts.
      num_accepted: drafts kept.
      seconds: what counts as its time; None for all the time until it was there.
      num_tokens: given in these seconds; None for all.
    """

    token_ids: list[int]
    num_round_tokens: int
    num_calls: int
    num_proposed: int = 0
    num_accepted: int = 0
    seconds: float | None = None
    num_tokens: int | None = None


GenerateFn = Callable[[list[int], int], Generated]
"""(prompt ids, seed) -> the answer; a greedy one takes no notice of the seed."""


class Timings(NamedTuple):
    """What one method of generating took, each array [repeats, prompts].

    Attributes:
      seconds: of the answers.
      tokens: given in these seconds.
      round_tokens: see `Generated`.
      calls: of the target; see `Generated`.
      proposed: drafts.
      accepted: drafts kept.
      token_ids: the last answer to each prompt.
    """

    seconds: np.ndarray
    tokens: np.ndarray
    round_tokens: np.ndarray
    calls: np.ndarray
    proposed: np.ndarray
    accepted: np.ndarray
    token_ids: list[list[int]]

    def first(self, repeats: int) -> Self:
        """Returns the timings of the first repeats alone."""
        return self._make([*(leaf[:repeats] for leaf in self[:-1]), self.token_ids])

    def to_json(self) -> dict[str, Any]:
        """Returns all but the answers as plain values."""
        values = self._asdict()
        del values["token_ids"]
        return {name: leaf.tolist() for name, leaf in values.items()}


def warm_up(methods: Mapping[str, GenerateFn], prompts: Sequence[list[int]]) -> None:
    """Lets every method answer every prompt once, so that everything is compiled."""
    for name, generate in methods.items():
        print(f"warming up {name}", file=sys.stderr, flush=True)
        for prompt in prompts:
            generate(prompt, 0)


def measure(
    methods: Mapping[str, GenerateFn], prompts: Sequence[list[int]], repeats: int
) -> Iterator[dict[str, Timings]]:
    """Times every method on every prompt, by turns; yields after each repeat all up to it.

    Prompt k of repeat r has the seed 1000 r + k.
    """
    shape = [repeats, len(prompts)]
    timings = {
        name: Timings(*(np.zeros(shape) for _ in range(6)), token_ids=[[] for _ in prompts])
        for name in methods
    }
    for repeat in range(repeats):
        print(f"repeat {repeat + 1} of {repeats}", file=sys.stderr, flush=True)
        for index, prompt in enumerate(prompts):
            for name, generate in methods.items():
                seed = 1000 * repeat + index
                seconds, found = timed(lambda g=generate, p=prompt, s=seed: g(p, s))
                num_tokens = len(found.token_ids) if found.num_tokens is None else found.num_tokens
                *leaves, token_ids = timings[name]
                values = (seconds if found.seconds is None else found.seconds, num_tokens,
                          *found[1:5])  # fmt: skip
                for leaf, value in zip(leaves, values, strict=True):
                    leaf[repeat, index] = value
                token_ids[index] = found.token_ids
        yield {name: own.first(repeat + 1) for name, own in timings.items()}


def summarise(timings: Mapping[str, Timings]) -> dict[str, dict[str, Any]]:
    """Returns each method's speed, acceptance, ratios to every other, and answers like the first's.

    What is not known of a method, or does not apply to it, is None.
    """
    report: dict[str, dict[str, Any]] = {}
    first = next(iter(timings.values())).token_ids
    for name, own in timings.items():
        speed = own.tokens.sum(axis=1) / own.seconds.sum(axis=1)
        proposed, calls = own.proposed.sum(), own.calls.sum()
        agreeing = [ours == theirs for ours, theirs in zip(own.token_ids, first, strict=True)]
        report[name] = {
            "tokens_per_second": float(np.median(speed)),
            "acceptance_rate": float(own.accepted.sum() / proposed) if proposed else None,
            "tokens_per_target_call": float(own.round_tokens.sum() / calls) if calls else None,
            "same_answers": sum(agreeing) if any(own.token_ids) else None,
            "num_prompts": len(agreeing),
            "ratio_to": {
                other: speed_ratio(own.seconds, own.tokens, theirs.seconds, theirs.tokens)._asdict()
                for other, theirs in timings.items()
                if other != name
            },
        }
    return report


def format_summary(report: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the summary as a table: a line and a column of ratios for each method."""
    rows = []
    for name, row in report.items():
        same = row["same_answers"]
        rows.append(
            [
                name,
                number_cell(row["tokens_per_second"], ".1f"),
                number_cell(row["acceptance_rate"], ".1%"),
                number_cell(row["tokens_per_target_call"], ".2f"),
                NOTHING if same is None else f"{same}/{row['num_prompts']}",
                *(ratio_cell(row["ratio_to"].get(other)) for other in report),
            ]
        )
    columns = ["", "tokens/s", "accepted", "per call", "same", *(f"/ {name}" for name in report)]
    return format_table(columns, rows)


def ratio_cell(ratio: Mapping[str, float] | None) -> str:
    """Returns a ratio with its interval; nothing where there is none."""
    if ratio is None:
        return NOTHING
    return "{median:.2f} [{low:.2f}, {high:.2f}]".format(**ratio)
