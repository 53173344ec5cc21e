"""The prompts of an experiment."""

import collections
import hashlib
import json
from collections.abc import Mapping

from jspec.common.errors import InputError
from jspec.evaluation.experiments.spec import Experiment
from jspec.generation.prompts import Prompt, read_prompts


def choose_prompts(experiment: Experiment) -> dict[int, Prompt]:
    """Returns the chosen prompts of the experiment's file, by their places in it.

    Of each category the first `per_category`; of those, `num_prompts`, evenly spaced.

    Raises:
      InputError: an unreadable file, a broken line, or none are left.
    """
    seen = collections.Counter[str | None]()
    chosen = {}
    for index, prompt in enumerate(read_prompts(experiment.prompts_file)):
        seen[prompt.category] += 1
        if not experiment.per_category or seen[prompt.category] <= experiment.per_category:
            chosen[index] = prompt
    if not chosen:
        raise InputError(f"expected at least one prompt in {experiment.prompts_file}, got none")
    places, count = list(chosen), experiment.num_prompts
    if 0 < count < len(places):
        places = [places[number * len(places) // count] for number in range(count)]
    return {place: chosen[place] for place in places}


def digest(prompts: Mapping[int, Prompt]) -> str:
    """Returns a checksum of prompts, so that a file that has changed is noticed."""
    plain = [[index, list(prompt.turns)] for index, prompt in prompts.items()]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]
