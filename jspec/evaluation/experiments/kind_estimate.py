"""How often drafts would be kept, from the distributions themselves: the kind "estimate"."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jspec.evaluation.experiments.cells import Cell
from jspec.evaluation.experiments.draft_distribution import DraftDistribution
from jspec.evaluation.experiments.draws import draw_settings
from jspec.evaluation.experiments.estimates import Estimator
from jspec.evaluation.experiments.models import Models
from jspec.evaluation.experiments.spec import Experiment
from jspec.evaluation.experiments.store import Store
from jspec.generation.encode_prompt import encode_conversation
from jspec.generation.generator import Generator
from jspec.generation.prompts import Prompt
from jspec.generation.request import Request, Result


class EstimateWorker:
    """Compares the target's distributions along its own answers with those of the drafts.

    The answers are drawn by plain decoding, and are the same for all ways: the last one is kept for
    the next way.
    """

    def __init__(
        self, experiment: Experiment, prompts: Mapping[int, Prompt], models: Models
    ) -> None:
        self._experiment, self._prompts, self._models = experiment, prompts, models
        self._plain = Generator(models.target, drafter="none", max_seq_len=experiment.max_seq_len)
        self._estimator = Estimator(
            models.target,
            leniences=experiment.estimate.leniences,
            num_bins=experiment.estimate.num_bins,
        )
        self._distributions: dict[str, DraftDistribution] = {}
        self._last: tuple[tuple[Any, ...], Result] | None = None

    def describe(self) -> dict[str, Any]:
        """Returns what each way is."""
        plain = self._plain.describe()
        return {
            label: plain
            | {
                "drafter": method.drafter,
                "draft": method.draft,
                "draft_quantization": method.draft_quantization,
            }
            for label, method in self._experiment.methods.items()
        }

    def run(self, cell: Cell) -> dict[str, Any]:
        """Returns the sums along one answer; see `Estimator.estimate`."""
        answer = self._answer(cell.key)
        estimated = self._estimator.estimate(
            self._distribution(cell.key["method"]),
            draw_settings(self._experiment, cell.key, cell.key["prompt"]),
            answer.prompt_token_ids,
            answer.token_ids,
        )
        return {"category": self._prompts[cell.key["prompt"]].category, **estimated}

    def _distribution(self, label: str) -> DraftDistribution:
        if label not in self._distributions:
            method = self._models.complete(self._experiment.methods[label])
            draft = self._models.draft(method)
            self._distributions[label] = self._estimator.make_distribution(
                method.drafter, method.options, draft
            )
        return self._distributions[label]

    def _answer(self, key: Mapping[str, Any]) -> Result:
        """Returns the target's own answer to the cell's prompt."""
        which = key["setting"], key["prompt"], key["seed"]
        if self._last is None or self._last[0] != which:
            prompt = self._prompts[key["prompt"]]
            ids = encode_conversation(
                self._models.target, [prompt.text], [], chat=self._experiment.wants_chat
            )
            settings = draw_settings(self._experiment, key, key["prompt"])
            settings = dataclasses.replace(settings, draft_temperature=None)  # nothing is drafted
            self._last = which, self._plain.generate(Request(ids, settings))
        return self._last[1]


def make_worker(
    experiment: Experiment, prompts: Mapping[int, Prompt], store: Store
) -> EstimateWorker:
    """Returns the worker; see `kinds.make_worker`."""
    return EstimateWorker(experiment, prompts, Models(experiment, store))
