"""Timed answers by setting, batch size and method: what is compared with what, and its numbers."""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jspec.generation.result import RoundCounts
from jspec.lab.analysis.ratios import Ratio, acceptance, compare_amounts, observed_alpha

_NUMBER = re.compile(r"[^0-9A-Za-z]+(\d+|auto)$")
_MOST_SHOWN = 6
SHOWN = f"At most {_MOST_SHOWN} methods: of the fastest drafters the fastest number."


class TimedAnswer(NamedTuple):
    """One answer; of its tokens, all but the first are those of rounds, which decoding gave."""

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


class TimedCell(NamedTuple):
    """Prompts that were answered together, once: a finished cell of kind "generate".

    Its seconds are for all of it, reading the prompts included; each prompt and turn has an answer.
    """

    method: str
    setting: str
    batch_size: int
    prompts: tuple[int, ...]
    seed: int
    repeat: int
    seconds: float
    answers: tuple[TimedAnswer, ...]


def parse_cells(done: Iterable[Mapping[str, Any]]) -> list[TimedCell]:
    """Returns the cells in the lines of results.jsonl."""
    return [
        TimedCell(
            **line["key"] | {"prompts": tuple(line["key"]["prompts"])},
            seconds=line["record"]["seconds"],
            answers=tuple(map(_parse_answer, line["record"]["answers"])),
        )
        for line in done
    ]


def _parse_answer(answer: Mapping[str, Any]) -> TimedAnswer:
    return TimedAnswer(
        answer.get("category") or "all",
        answer.get("num_prompt_tokens", 0),
        tuple(answer["token_ids"]),
        answer["num_round_tokens"],
        answer["decode_seconds"],
        tuple(RoundCounts(*a_round) for a_round in answer["rounds"]),
    )


def answers_by_prompt(cells: Iterable[TimedCell]) -> list[list[TimedAnswer]]:
    """Returns the answers to each batch of prompts, without those of later repeats.

    A repeat draws with the same seed, so it gives the same answer: only its times are new.
    """
    first: dict[tuple[tuple[int, ...], int], TimedCell] = {}
    for cell in sorted(cells, key=lambda cell: cell.repeat):
        first.setdefault((cell.prompts, cell.seed), cell)
    groups: dict[tuple[int, ...], list[TimedAnswer]] = {}
    for (prompts, _), cell in first.items():
        groups.setdefault(prompts, []).extend(cell.answers)
    return list(groups.values())


Clock = Callable[[TimedCell], tuple[float, float]]


def decoding(cell: TimedCell) -> tuple[float, float]:
    """Returns seconds of decoding and the tokens that they gave: without reading the prompt."""
    seconds = sum(answer.decode_seconds for answer in cell.answers)
    return seconds, sum(answer.num_round_tokens for answer in cell.answers)


def whole(cell: TimedCell) -> tuple[float, float]:
    """Returns the seconds of whole answers, reading the prompt included, and all their tokens."""
    return cell.seconds, sum(len(answer.token_ids) for answer in cell.answers)


def calls(cell: TimedCell) -> tuple[float, float]:
    """Returns seconds of decoding and the target calls in them."""
    return decoding(cell)[0], sum(len(answer.rounds) for answer in cell.answers)


class Timed:
    """What the cells of one method say beside the baseline's, at one setting and batch size."""

    def __init__(self, cells: Sequence[TimedCell], base: Sequence[TimedCell]) -> None:
        self.cells, self.base = cells, base
        self._answers = answers_by_prompt(cells)  # repeats left out
        self.rounds = [[r for answer in group for r in answer.rounds] for group in self._answers]
        self._is_single = all(cell.batch_size == 1 for cell in cells)
        self._clock = decoding if self._is_single else whole

    @functools.cached_property
    def compared(self) -> tuple[Ratio | None, int, int]:
        """The speed-up, on how many prompts (or batches) it rests, and on how many repeats."""
        return compare_amounts(_amounts(self.cells, self._clock), _amounts(self.base, self._clock))

    @property
    def speedup(self) -> Ratio | None:
        """Tokens a second to the baseline's: of decoding, in a batch of everything."""
        return self.compared[0]

    @property
    def whole_speedup(self) -> Ratio | None:
        """The same for whole answers, reading the prompt included."""
        return compare(self.cells, self.base, whole)

    @functools.cached_property
    def cost(self) -> Ratio | None:
        """Time of a round of one answer, in rounds of the baseline; None in a batch."""
        return compare(self.base, self.cells, calls) if self._is_single else None

    @property
    def tokens_per_second(self) -> float | None:
        """The amount that `speedup` compares."""
        return _total_rate(map(self._clock, self.cells))

    @property
    def milliseconds(self) -> float | None:
        """For which the reader of one answer waits for a token, on average."""
        rate = _total_rate(map(decoding, self.cells))
        return 1000 / rate if rate else None

    @functools.cached_property
    def acceptance(self) -> Ratio | None:
        """Share of the proposed drafts that are accepted; None without drafts."""
        return acceptance(self.rounds)

    @property
    def alpha(self) -> Ratio | None:
        """Share of the examined drafts that are accepted; see `observed_alpha`."""
        return observed_alpha(self.rounds)

    @property
    def tokens_per_call(self) -> float | None:
        """Tokens that a target call gives, its own included."""
        num_tokens = sum(answer.num_round_tokens for group in self._answers for answer in group)
        num_rounds = sum(map(len, self.rounds))
        return num_tokens / num_rounds if num_rounds else None

    @property
    def proposed_per_round(self) -> float | None:
        """Drafts, the mean."""
        counts = [a_round.num_proposed for prompt in self.rounds for a_round in prompt]
        return float(np.mean(counts)) if counts else None

    @property
    def same_answers(self) -> tuple[int, int]:
        """Answers that are token for token the baseline's, of how many; repeats count once."""
        ours, theirs = (
            {(c.prompts, c.seed): [answer.token_ids for answer in c.answers] for c in cells}
            for cells in (self.cells, self.base)
        )
        shared = ours.keys() & theirs.keys()
        pairs = [pair for key in shared for pair in zip(ours[key], theirs[key], strict=False)]
        return sum(answer == expected for answer, expected in pairs), len(pairs)


def compare(cells: Sequence[TimedCell], base: Sequence[TimedCell], clock: Clock) -> Ratio | None:
    """Returns how many times faster `cells` are than `base`; None where nothing shared is timed."""
    return compare_amounts(_amounts(cells, clock), _amounts(base, clock))[0]


def _amounts(
    cells: Sequence[TimedCell], clock: Clock
) -> dict[tuple[int, tuple[int, ...]], tuple[float, float]]:
    """Returns seconds and amount by repeat and prompts, summed over seeds.

    A repeat that lacks some seed of the prompts is left out.
    """
    seeds: dict[tuple[int, tuple[int, ...]], dict[int, tuple[float, float]]] = {}
    for cell in cells:
        seeds.setdefault((cell.repeat, cell.prompts), {})[cell.seed] = clock(cell)
    most = max(map(len, seeds.values()), default=0)
    full = {place: zip(*samples.values(), strict=True) for place, samples in seeds.items()
            if len(samples) == most}  # fmt: skip
    return {place: (sum(seconds), sum(amount)) for place, (seconds, amount) in full.items()}


def _total_rate(pairs: Iterable[tuple[float, float]]) -> float | None:
    seconds, amount = np.sum([(0.0, 0.0), *pairs], axis=0)
    return float(amount / seconds) if seconds else None


@dataclasses.dataclass(frozen=True)
class Scene:
    """The methods that were timed in turn, at one setting and batch size.

    The first is the baseline. `cells` has only methods with cells, `methods` all.
    """

    setting: str
    settings: Mapping[str, Any]
    batch_size: int
    methods: Mapping[str, Mapping[str, Any]]
    cells: Mapping[str, Sequence[TimedCell]]

    @property
    def baseline(self) -> str:
        """The method that all others are compared with."""
        return next(iter(self.methods))

    @property
    def baseline_name(self) -> str:
        """What texts call it."""
        is_plain = self.methods[self.baseline].get("drafter", "none") == "none"
        return "plain decoding" if is_plain else self.baseline

    @property
    def temperature(self) -> float:
        """Of the setting."""
        return self.settings.get("temperature", 0.0)

    @property
    def name(self) -> str:
        """What captions call it."""
        return self.setting + ("" if self.batch_size == 1 else f", batch size {self.batch_size}")

    @property
    def others(self) -> list[str]:
        """The methods with cells but the baseline."""
        return [method for method in self.cells if method != self.baseline]

    @functools.cached_property
    def families(self) -> dict[str, dict[str, int]]:
        """See `families`; methods without cells are left out."""
        return families({m: spec for m, spec in self.methods.items() if m in self.cells})

    @functools.cached_property
    def numbers(self) -> dict[str, Timed]:
        """Of every method over all prompts."""
        return {m: Timed(cells, self.cells[self.baseline]) for m, cells in self.cells.items()}

    @functools.cached_property
    def by_category(self) -> dict[str, dict[str, Timed]]:
        """The numbers over the prompts of each category; empty if there is only one category."""
        base = self.cells[self.baseline]
        names = dict.fromkeys(answer.category for cell in base for answer in cell.answers)
        if self.batch_size > 1 or len(names) < 2:
            return {}
        return {
            name: {m: Timed(_of(cells, name), _of(base, name)) for m, cells in self.cells.items()}
            for name in names
        }

    @functools.cached_property
    def shown(self) -> list[str]:
        """The methods of a crowded table or figure: the fastest numbers of the fastest drafters."""
        speeds = {
            m: timed.speedup.median if timed.speedup else 0.0 for m, timed in self.numbers.items()
        }
        family_of = {m: name for name, family in self.families.items() for m in family}
        fastest: dict[str, str] = {}
        for method in sorted(self.others, key=speeds.__getitem__, reverse=True):
            fastest.setdefault(family_of.get(method, method), method)
        chosen = list(fastest.values())[:_MOST_SHOWN]
        return [method for method in self.others if method in chosen]


def _of(cells: Sequence[TimedCell], category: str) -> list[TimedCell]:
    return [cell for cell in cells if all(answer.category == category for answer in cell.answers)]


def make_scenes(config: Mapping[str, Any], cells: Sequence[TimedCell]) -> list[Scene]:
    """Returns the scenes in which the baseline was timed, in the config's order."""
    methods, scenes = config.get("methods", {}), []
    for label, settings in config.get("settings", {}).items():
        here = [cell for cell in cells if cell.setting == label]
        for size in sorted({cell.batch_size for cell in here}):
            by_method = {m: [cell for cell in here if (cell.method, cell.batch_size) == (m, size)]
                         for m in methods}  # fmt: skip
            known = {method: found for method, found in by_method.items() if found}
            scenes.append(Scene(label, settings, size, methods, known))
    return [scene for scene in scenes if methods and scene.baseline in scene.cells]


def by_length(scenes: Sequence[Scene], default: int) -> list[dict[int, Scene]]:
    """Returns the scenes of the smallest batch size in groups that differ in the answers' length.

    Each group is by `max_new_tokens`, rising; `default` holds where a setting does not say.
    """
    groups: dict[str, dict[int, Scene]] = {}
    for scene in scenes:
        if scene.batch_size == min(sibling.batch_size for sibling in scenes):
            rest = {key: v for key, v in scene.settings.items() if key != "max_new_tokens"}
            length = int(scene.settings.get("max_new_tokens", default))
            groups.setdefault(json.dumps(rest, sort_keys=True), {}).setdefault(length, scene)
    return [dict(sorted(group.items())) for group in groups.values()]


def families(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Returns the methods that differ in the number of drafts alone: numbers by name and label.

    Plain decoding and numbers that adapt ("auto") belong to no family.
    """
    members: dict[str, dict[str, int]] = {}
    for label, method in methods.items():
        count = method.get("num_draft_tokens")
        if method.get("drafter") != "none" and isinstance(count, int):
            rest = {key: value for key, value in method.items() if key != "num_draft_tokens"}
            members.setdefault(json.dumps(rest, sort_keys=True), {})[label] = count
    named: dict[str, dict[str, int]] = {}
    for family in members.values():
        name = _NUMBER.sub("", next(iter(family)))
        name = next(iter(family)) if name in named else name
        named[name] = dict(sorted(family.items(), key=lambda item: item[1]))
    return named
