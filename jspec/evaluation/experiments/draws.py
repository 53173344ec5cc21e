"""How the answers of an experiment are drawn."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jspec.evaluation.experiments.spec import Experiment
from jspec.generation.request import Settings

SEEDS_APART = 1000


def draw_settings(experiment: Experiment, key: Mapping[str, Any], prompt: int) -> Settings:
    """Returns the settings of one answer: prompt k with seed s is drawn with seed 1000 s + k.

    Args:
      experiment: what is measured.
      key: of a cell; its `setting` and `seed` count.
      prompt: the index of the prompt.
    """
    settings = experiment.settings[key["setting"]]
    return dataclasses.replace(settings, seed=SEEDS_APART * key["seed"] + prompt)
