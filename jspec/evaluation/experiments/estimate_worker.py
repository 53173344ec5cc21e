"""The kind "estimate": how often drafts would be accepted, from the distributions themselves."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from jspec.evaluation.experiments.cells import Cell, settings_of
from jspec.evaluation.experiments.draft_distributions import DraftDistribution
from jspec.evaluation.experiments.estimates import Estimator
from jspec.evaluation.experiments.models import Models
from jspec.evaluation.experiments.spec import Experiment
from jspec.evaluation.experiments.store import Store
from jspec.generation.generator import Generator
from jspec.generation.prompts import Prompt, encode_conversation
from jspec.generation.request import Request
from jspec.generation.result import Result


class EstimateWorker:
    """Compares the target's distributions along its own answers with those of the drafts.

    The answers are drawn by plain decoding; the last one is kept for the next method.
    """

    def __init__(self, experiment: Experiment, prompts: Mapping[int, Prompt], store: Store) -> None:
        self._experiment, self._prompts = experiment, prompts
        self._models = Models(experiment, store)
        target, wanted = self._models.target, experiment.estimate
        self._plain = Generator(target, drafter="none", max_seq_len=experiment.max_seq_len)
        self._estimator = Estimator(target, leniences=wanted.leniences, num_bins=wanted.num_bins)
        self._distribution = functools.cache(self._make_distribution)
        self._answer = functools.lru_cache(maxsize=1)(self._make_answer)

    def describe(self) -> dict[str, Any]:
        """Returns what each method is."""
        plain = self._plain.describe()
        names = "drafter", "draft", "draft_quantization"
        return {
            label: plain | {name: getattr(method, name) for name in names}
            for label, method in self._experiment.methods.items()
        }

    def run(self, cell: Cell) -> dict[str, Any]:
        """Returns the sums along one answer; see `Estimator.estimate`."""
        answer = self._answer(*(cell.key[name] for name in ("setting", "prompt", "seed")))
        estimated = self._estimator.estimate(
            self._distribution(cell.key["method"]),
            settings_of(self._experiment, cell.key, cell.key["prompt"]),
            answer.prompt_token_ids,
            answer.token_ids,
        )
        return {"category": self._prompts[cell.key["prompt"]].category, **estimated}

    def _make_distribution(self, label: str) -> DraftDistribution:
        method = self._models.with_table(self._experiment.methods[label])
        draft = self._models.draft(method)
        return self._estimator.make_distribution(method.drafter, method.options, draft)

    def _make_answer(self, setting: str, prompt: int, seed: int) -> Result:
        """Returns the target's own answer to a prompt."""
        text, chat = self._prompts[prompt].text, self._experiment.wants_chat
        ids = encode_conversation(self._models.target, [text], [], chat=chat)
        settings = settings_of(self._experiment, {"setting": setting, "seed": seed}, prompt)
        settings = dataclasses.replace(settings, draft_temperature=None)  # nothing is drafted
        return self._plain.generate(Request(ids, settings))
