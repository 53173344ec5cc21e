"""Answers that were timed: the finished cells of an experiment of kind "generate"."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jspec.common.errors import InputError
from jspec.generation.stats import RoundCounts

NO_CATEGORY = "all"


class MeasuredAnswer(NamedTuple):
    """One answer.

    Attributes:
      category: of the prompt; NO_CATEGORY where it has none.
      num_prompt_tokens: of the prompt; 0 where it is not known.
      token_ids: what was answered.
      num_round_tokens: all but the first, which reading the prompt gives.
      prefill_seconds: to read the prompt.
      decode_seconds: from then to the last token.
      device_seconds: the part of it in which rounds ran on the device.
      rounds: one by one.
      repetition: share of the 4-grams of prompt and answer that had occurred before; None if it is
        not known.
    """

    category: str
    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    num_round_tokens: int
    prefill_seconds: float
    decode_seconds: float
    device_seconds: float
    rounds: tuple[RoundCounts, ...]
    repetition: float | None


class Cell(NamedTuple):
    """Prompts that were answered together, once.

    Attributes:
      method: label of the method of generating.
      setting: label of the sampling settings.
      batch_size: answers in hand at a time.
      prompts: their numbers.
      seed: of the draw.
      repeat: the same seed is timed several times.
      seconds: for all of it.
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
            method=str(key["method"]),
            setting=str(key["setting"]),
            batch_size=int(key["batch_size"]),
            prompts=tuple(key["prompts"]),
            seed=int(key["seed"]),
            repeat=int(key["repeat"]),
            seconds=float(record["seconds"]),
            answers=tuple(_parse_answer(answer) for answer in record["answers"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"expected a cell of kind generate, got {line.get('cell')!r} ({error!r})"
        ) from None


def _parse_answer(answer: Mapping[str, Any]) -> MeasuredAnswer:
    category, repetition = answer.get("category"), answer.get("repetition")
    return MeasuredAnswer(
        category=NO_CATEGORY if category is None else str(category),
        num_prompt_tokens=int(answer.get("num_prompt_tokens", 0)),
        token_ids=tuple(answer["token_ids"]),
        num_round_tokens=int(answer["num_round_tokens"]),
        prefill_seconds=float(answer["prefill_seconds"]),
        decode_seconds=float(answer["decode_seconds"]),
        device_seconds=float(answer["device_seconds"]),
        rounds=tuple(RoundCounts(*a_round) for a_round in answer["rounds"]),
        repetition=None if repetition is None else float(repetition),
    )


def of_category(cells: Iterable[Cell], category: str) -> list[Cell]:
    """Returns the cells all of whose answers are of a category."""
    return [cell for cell in cells if all(answer.category == category for answer in cell.answers)]


def categories_of(cells: Iterable[Cell]) -> list[str]:
    """Returns the categories of the answers in their order; none where there is only one."""
    names = list(dict.fromkeys(answer.category for cell in cells for answer in cell.answers))
    return names if len(names) > 1 else []


def distinct_answers(cells: Iterable[Cell]) -> list[list[MeasuredAnswer]]:
    """Returns the answers to each batch of prompts, without those of later repeats.

    A repeat draws with the same seed and so says the same again: only its times are new.
    """
    first: dict[tuple[tuple[int, ...], int], Cell] = {}
    for cell in sorted(cells, key=lambda cell: cell.repeat):
        first.setdefault((cell.prompts, cell.seed), cell)
    groups: dict[tuple[int, ...], list[MeasuredAnswer]] = {}
    for (prompts, _), cell in first.items():
        groups.setdefault(prompts, []).extend(cell.answers)
    return list(groups.values())


def all_rounds(answers: Iterable[Sequence[MeasuredAnswer]]) -> list[RoundCounts]:
    """Returns the rounds of groups of answers."""
    return [a_round for group in answers for answer in group for a_round in answer.rounds]
