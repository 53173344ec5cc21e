"""An experiment's cells by setting, batch size and way: what is compared with what."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jspec.evaluation.reports.measured import Cell, categories_of, of_category
from jspec.evaluation.reports.methods import MethodNumbers, method_numbers
from jspec.evaluation.reports.wording import LOSSY_RULES, code


class Scene(NamedTuple):
    """The methods that were timed in turn, at one setting and batch size.

    Attributes:
      setting: its label.
      settings: its fields.
      batch_size: answers in hand at a time.
      methods: of the config, by label; the first is the base.
      cells: of each way that has any.
    """

    setting: str
    settings: Mapping[str, Any]
    batch_size: int
    methods: Mapping[str, Mapping[str, Any]]
    cells: Mapping[str, Sequence[Cell]]

    @property
    def base(self) -> str:
        """The way that all others are compared with."""
        return next(iter(self.methods))

    @property
    def base_name(self) -> str:
        """What a sentence calls it."""
        return name_base(self.methods)

    @property
    def others(self) -> list[str]:
        """The ways with cells but the base."""
        return [method for method in self.cells if method != self.base]

    @property
    def is_lossy(self) -> Mapping[str, bool]:
        """Whether each way changes the answers' distribution."""
        return {
            label: method.get("acceptance") in LOSSY_RULES for label, method in self.methods.items()
        }


class Summary(NamedTuple):
    """The numbers of a scene.

    Attributes:
      scene: what they were measured in.
      overall: of every way, the base first.
      by_category: the same for the prompts of each category; empty if there is only one.
    """

    scene: Scene
    overall: list[MethodNumbers]
    by_category: dict[str, list[MethodNumbers]]


def name_base(methods: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns what a sentence calls the base."""
    label = next(iter(methods))
    return "plain decoding" if methods[label].get("drafter", "none") == "none" else code(label)


def make_scenes(config: Mapping[str, Any], cells: Sequence[Cell]) -> list[Scene]:
    """Returns the scenes in which the base was timed, in the config's order."""
    methods, settings = config.get("methods", {}), config.get("settings", {})
    grouped: dict[tuple[str, int], dict[str, list[Cell]]] = {}
    for cell in cells:
        if cell.method in methods and cell.setting in settings:
            own = grouped.setdefault((cell.setting, cell.batch_size), {})
            own.setdefault(cell.method, []).append(cell)
    order = {label: index for index, label in enumerate(settings)}
    scenes = [
        Scene(
            setting,
            settings[setting],
            batch_size,
            methods,
            {method: own[method] for method in methods if method in own},
        )
        for (setting, batch_size), own in grouped.items()
    ]
    scenes.sort(key=lambda scene: (order[scene.setting], scene.batch_size))
    return [scene for scene in scenes if scene.base in scene.cells]


def summarise(scene: Scene) -> Summary:
    """Returns the numbers of all ways, over everything and for each category."""
    overall = [
        method_numbers(method, cells, scene.cells[scene.base])
        for method, cells in scene.cells.items()
    ]
    by_category = {}
    for category in categories_of(scene.cells[scene.base]) if scene.batch_size == 1 else []:
        base = of_category(scene.cells[scene.base], category)
        by_category[category] = [
            method_numbers(method, of_category(cells, category), base, has_whole=False)
            for method, cells in scene.cells.items()
        ]
    return Summary(scene, overall, by_category)


def by_length(scenes: Sequence[Scene], default: int) -> list[dict[int, Scene]]:
    """Returns the scenes of one answer at a time in groups that differ in the answers' length.

    Args:
      scenes: of an experiment.
      default: tokens of an answer where a setting says nothing else.

    Returns:
      For each other setting, the scenes by `max_new_tokens`, rising.
    """
    groups: dict[str, dict[int, Scene]] = {}
    for scene in scenes:
        if scene.batch_size == min(other.batch_size for other in scenes):
            rest = {key: v for key, v in scene.settings.items() if key != "max_new_tokens"}
            length = int(scene.settings.get("max_new_tokens", default))
            groups.setdefault(json.dumps(rest, sort_keys=True), {}).setdefault(length, scene)
    return [dict(sorted(group.items())) for group in groups.values()]
