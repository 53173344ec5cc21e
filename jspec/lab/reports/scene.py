"""An experiment's cells by setting, batch size and method: what is compared with what."""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.lab.reports.timed import Timed, TimedCell

_NUMBER = re.compile(r"[^0-9A-Za-z]+(\d+|auto)$")
_MOST_SHOWN = 6
SHOWN = f"At most {_MOST_SHOWN} methods: of the fastest drafters the fastest number."


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
