"""How fast one method of generating is, beside another that was timed in turn with it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jspec.evaluation.analysis.ratios import Ratio, speed_ratio
from jspec.evaluation.reports.measured import Cell

Clock = Callable[[Cell], tuple[float, float]]


def decoding(cell: Cell) -> tuple[float, float]:
    """Returns seconds of decoding and the tokens that they gave: without reading the prompt."""
    seconds = sum(answer.decode_seconds for answer in cell.answers)
    return seconds, sum(answer.num_round_tokens for answer in cell.answers)


def whole(cell: Cell) -> tuple[float, float]:
    """Returns the seconds of whole answers, reading the prompt included, and all their tokens."""
    return cell.seconds, sum(len(answer.token_ids) for answer in cell.answers)


def calls(cell: Cell) -> tuple[float, float]:
    """Returns seconds of decoding and the target calls in them."""
    seconds = sum(answer.decode_seconds for answer in cell.answers)
    return seconds, sum(len(answer.rounds) for answer in cell.answers)


class Comparison(NamedTuple):
    """A ratio of speeds and what it rests on.

    Attributes:
      ratio: with its interval.
      num_prompts: prompts, or batches of them, answered by both.
      num_repeats: times that each was.
    """

    ratio: Ratio
    num_prompts: int
    num_repeats: int

    @property
    def is_timed_once(self) -> bool:
        """Whether nothing is known of how much the ratio varies: its interval has no width."""
        return self.num_prompts * self.num_repeats <= 1


def compare(
    own: Sequence[Cell], base: Sequence[Cell], clock: Clock, *, num_samples: int = 2000
) -> Comparison | None:
    """Returns how many times faster `own` is than `base`, over what both have done.

    Args:
      own: cells of one way.
      base: of the other.
      clock: seconds and amount of a cell.
      num_samples: of the interval's bootstrap; 1 where none is wanted.

    Returns:
      The comparison; None where they have nothing in common that takes time.
    """
    tables = [_amounts(cells, clock) for cells in (own, base)]
    repeats, prompts = _shared_places(*tables)
    if not prompts:
        return None
    leaves = [
        np.array([[table[repeat, prompt][leaf] for prompt in prompts] for repeat in repeats])
        for table in tables
        for leaf in (0, 1)
    ]
    return Comparison(speed_ratio(*leaves, num_samples=num_samples), len(prompts), len(repeats))


def speed(cells: Sequence[Cell], clock: Clock) -> float | None:
    """Returns the amount a second, the median over repeats; None where nothing took time."""
    table = _amounts(cells, clock)
    repeats, prompts = _shared_places(table, table)
    if not prompts:
        return None
    totals = [np.sum([table[repeat, prompt] for prompt in prompts], axis=0) for repeat in repeats]
    return float(np.median([amount / seconds for seconds, amount in totals]))


_Place = tuple[int, tuple[int, ...]]


def _amounts(cells: Sequence[Cell], clock: Clock) -> dict[_Place, np.ndarray]:
    """Returns seconds and amount by repeat and prompts, summed over seeds.

    A repeat in which some seed of the prompts is missing is left out.
    """
    seeds: dict[_Place, dict[int, np.ndarray]] = {}
    for cell in cells:
        seeds.setdefault((cell.repeat, cell.prompts), {})[cell.seed] = np.array(clock(cell), float)
    most = max(map(len, seeds.values()), default=0)
    return {
        place: np.sum(list(own.values()), axis=0)
        for place, own in seeds.items()
        if len(own) == most
    }


def _shared_places(
    own: dict[_Place, np.ndarray], base: dict[_Place, np.ndarray]
) -> tuple[list[int], list[tuple[int, ...]]]:
    """Returns the repeats and prompts that both have, every prompt in every repeat.

    A run that is not over has begun a repeat: it counts if that leaves more than without it.
    """
    shared = {
        place for place in own.keys() & base.keys() if (own[place] > 0).all() and
        (base[place] > 0).all()
    }  # fmt: skip
    repeats = sorted({repeat for repeat, _ in shared})
    best: tuple[list[int], list[tuple[int, ...]]] = [], []
    for count in range(1, len(repeats) + 1):
        first = repeats[:count]
        prompts = sorted(
            {prompt for _, prompt in shared if all((repeat, prompt) in shared for repeat in first)}
        )
        if count * len(prompts) >= len(best[0]) * len(best[1]):
            best = first, prompts
    return best
