"""Answers prompts in one way, timed: the kind "generate"."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.common.compile_clock import Instant
from jspec.evaluation.experiments.cells import Cell
from jspec.evaluation.experiments.draws import draw_settings
from jspec.evaluation.experiments.models import Generators
from jspec.evaluation.experiments.repetition import repetition
from jspec.evaluation.experiments.spec import Experiment
from jspec.evaluation.experiments.store import Store
from jspec.evaluation.experiments.warm_up import WarmUp
from jspec.generation.encode_prompt import encode_conversation
from jspec.generation.prompts import Prompt
from jspec.generation.request import Request, Result
from jspec.generation.validate_options import settings_read_by


@dataclasses.dataclass
class Conversation:
    """A prompt whose turns are answered one by one.

    Attributes:
      index: of the prompt.
      category: of the prompt.
      turns: what the user says.
      answers: what the model has said so far.
    """

    index: int
    category: str | None
    turns: Sequence[str]
    answers: list[str] = dataclasses.field(default_factory=list)


class GenerateWorker:
    """Answers prompts; programs are compiled before anything is timed."""

    def __init__(
        self, experiment: Experiment, prompts: Mapping[int, Prompt], generators: Generators
    ) -> None:
        self._experiment, self._prompts, self._generators = experiment, prompts, generators
        self._warm_up = WarmUp()

    def describe(self) -> dict[str, Any]:
        """Returns what each way is."""
        return self._generators.describe()

    def run(self, cell: Cell) -> dict[str, Any]:
        """Answers the cell's prompts together, turn after turn.

        A conversation goes on with the model's own answers. Times are without compilation.
        """
        generator = self._generators.get(cell.key["method"], cell.key["batch_size"])
        conversations = [self._begin(index) for index in cell.key["prompts"]]
        seconds, answers = 0.0, []
        for turn in range(max(len(one.turns) for one in conversations)):
            going = [one for one in conversations if turn < len(one.turns)]
            requests = [self._request(cell, one) for one in going]
            self._warm_up.prepare(generator, requests)
            begin = Instant()
            results = generator.generate(requests)
            seconds += Instant().run_seconds_since(begin)
            for one, result in zip(going, results, strict=True):
                one.answers.append(result.text)
                place = {"prompt": one.index, "turn": turn, "category": one.category}
                answers.append(place | answer_record(result))
        return {"seconds": seconds, "answers": answers}

    def _begin(self, index: int) -> Conversation:
        prompt, limit = self._prompts[index], self._experiment.turns
        return Conversation(index, prompt.category, prompt.turns[: limit or None])

    def _request(self, cell: Cell, one: Conversation) -> Request:
        """Returns the request for a conversation's next answer."""
        ids = encode_conversation(
            self._generators.models.target,
            one.turns[: len(one.answers) + 1],
            one.answers,
            chat=self._experiment.wants_chat,
        )
        settings = draw_settings(self._experiment, cell.key, one.index)
        method = self._experiment.methods[cell.key["method"]]
        return Request(
            ids, settings_read_by(method.drafter, method.options, settings), one.category
        )


def answer_record(result: Result) -> dict[str, Any]:
    """Returns what is kept of an answer, as plain values."""
    stats = result.stats
    return {
        "num_prompt_tokens": len(result.prompt_token_ids),
        "token_ids": result.token_ids,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "num_round_tokens": stats.num_round_tokens,
        "prefill_seconds": stats.prefill_seconds,
        "decode_seconds": stats.decode_seconds,
        "device_seconds": stats.device_seconds,
        "rounds": [list(one) for one in stats.rounds],
        "repetition": repetition([*result.prompt_token_ids, *result.token_ids]),
    }


def make_worker(
    experiment: Experiment, prompts: Mapping[int, Prompt], store: Store
) -> GenerateWorker:
    """Returns the worker; see `kinds.make_worker`."""
    return GenerateWorker(experiment, prompts, Generators(experiment, store))
