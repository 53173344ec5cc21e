"""Answers that were timed: the finished cells of an experiment of kind "generate"."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jspec.common.errors import InputError
from jspec.generation.stats import RoundCounts


class MeasuredAnswer(NamedTuple):
    """One answer.

    Attributes:
      category: of the prompt; "all" where it has none.
      num_prompt_tokens: of the prompt; 0 where it is not known.
      token_ids: of the answer.
      num_round_tokens: all but the first token, which reading the prompt gives.
      decode_seconds: from the first token to the last.
      rounds: one by one.
    """

    category: str
    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    num_round_tokens: int
    decode_seconds: float
    rounds: tuple[RoundCounts, ...]

    @property
    def max_length(self) -> int:
        """Tokens of prompt and answer."""
        return self.num_prompt_tokens + len(self.token_ids)


class Cell(NamedTuple):
    """Prompts that were answered together, once.

    Attributes:
      method: label of the method of generating.
      setting: label of the sampling settings.
      batch_size: answers that are generated together.
      prompts: their numbers.
      seed: of the draw.
      repeat: the same seed is timed several times.
      seconds: for all of it, reading the prompts included.
      answers: one a prompt and turn.
    """

    method: str
    setting: str
    batch_size: int
    prompts: tuple[int, ...]
    seed: int
    repeat: int
    seconds: float
    answers: tuple[MeasuredAnswer, ...]


def parse_cells(done: Iterable[Mapping[str, Any]]) -> list[Cell]:
    """Returns the cells in the lines of results.jsonl.

    Raises:
      InputError: a cell of another kind.
    """
    return [_parse_cell(line) for line in done]


def _parse_cell(line: Mapping[str, Any]) -> Cell:
    try:
        key, record = line["key"], line["record"]
        return Cell(
            str(key["method"]),
            str(key["setting"]),
            int(key["batch_size"]),
            tuple(key["prompts"]),
            int(key["seed"]),
            int(key["repeat"]),
            float(record["seconds"]),
            tuple(map(_parse_answer, record["answers"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        name = line.get("cell")
        raise InputError(f"expected a cell of kind generate, got {name!r} ({error!r})") from None


def _parse_answer(answer: Mapping[str, Any]) -> MeasuredAnswer:
    return MeasuredAnswer(
        str(answer.get("category") or "all"),
        int(answer.get("num_prompt_tokens", 0)),
        tuple(answer["token_ids"]),
        int(answer["num_round_tokens"]),
        float(answer["decode_seconds"]),
        tuple(RoundCounts(*a_round) for a_round in answer["rounds"]),
    )


def answers_by_prompt(cells: Iterable[Cell]) -> list[list[MeasuredAnswer]]:
    """Returns the answers to each batch of prompts, without those of later repeats.

    A repeat draws with the same seed, so it gives the same answer: only its times are new.
    """
    first: dict[tuple[tuple[int, ...], int], Cell] = {}
    for cell in sorted(cells, key=lambda cell: cell.repeat):
        first.setdefault((cell.prompts, cell.seed), cell)
    groups: dict[tuple[int, ...], list[MeasuredAnswer]] = {}
    for (prompts, _), cell in first.items():
        groups.setdefault(prompts, []).extend(cell.answers)
    return list(groups.values())


def rounds_by_prompt(cells: Iterable[Cell]) -> list[list[RoundCounts]]:
    """Returns the rounds of the answers to each batch of prompts, without later repeats."""
    return [[r for answer in group for r in answer.rounds] for group in answers_by_prompt(cells)]
