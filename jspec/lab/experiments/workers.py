"""Measures the cells of the kinds "generate" and "estimate", which run models."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.common.timing import Instant
from jspec.generation.batch import needed_switches
from jspec.generation.engine import NARROW_PROMPT
from jspec.generation.generator import Generator
from jspec.generation.options import settings_read_by
from jspec.generation.prompts import Prompt, encode_conversation
from jspec.generation.request import Request
from jspec.generation.result import Result, check_answered
from jspec.generation.rows import capacity_for
from jspec.lab.experiments.cells import Cell, settings_of
from jspec.lab.experiments.draft_distributions import DraftDistribution
from jspec.lab.experiments.estimates import Estimator
from jspec.lab.experiments.models import Models
from jspec.lab.experiments.spec import Experiment
from jspec.lab.experiments.store import AnyStore

_WARM_VISITS = 2  # of the host to each row, besides the prefill


class GenerateWorker:
    """Answers prompts; programs are compiled before anything is timed."""

    def __init__(
        self, experiment: Experiment, prompts: Mapping[int, Prompt], store: AnyStore
    ) -> None:
        self._experiment, self._prompts = experiment, prompts
        self._models = Models(experiment, store)
        self._warm: set[tuple] = set()

    def describe(self) -> dict[str, Any]:
        """Returns what each method is."""
        return {method: self._models.describe(method) for method in self._experiment.methods}

    def run(self, cell: Cell) -> dict[str, Any]:
        """Answers the cell's prompts together; a conversation goes on with the model's answers."""
        generator = self._models.generator(cell.key["method"], cell.key["batch_size"])
        generator.forget_answers()  # no cell depends on another
        said: dict[int, list[str]] = {index: [] for index in cell.key["prompts"]}
        seconds, answers = 0.0, []
        for turn in range(max(len(self._turns(index)) for index in said)):
            going = [index for index in said if turn < len(self._turns(index))]
            requests = [self._request(cell, index, said[index]) for index in going]
            self._warm_up(generator, requests)
            begin = Instant()
            results = generator.generate(requests)
            seconds += Instant().run_seconds_since(begin)  # without compilation
            check_answered(results)
            for index, result in zip(going, results, strict=True):
                said[index].append(result.text)
                category = self._prompts[index].category
                which = {"prompt": index, "turn": turn, "category": category}
                answers.append(which | answer_record(result))
        return {"seconds": seconds, "answers": answers}

    def _turns(self, index: int) -> tuple[str, ...]:
        return self._prompts[index].turns[: self._experiment.turns or None]

    def _request(self, cell: Cell, index: int, answers: list[str]) -> Request:
        turns, chat = self._turns(index)[: len(answers) + 1], self._experiment.wants_chat
        ids = encode_conversation(self._models.target, turns, answers, chat=chat)
        method = self._experiment.methods[cell.key["method"]]
        settings = settings_of(self._experiment, cell.key, index)
        settings = settings_read_by(method.drafter, method.options, settings)
        return Request(ids, settings, self._prompts[index].category)

    def _warm_up(self, generator: Generator, requests: Sequence[Request]) -> None:
        """Runs requests for a few rounds, untimed, unless their programs have been compiled."""
        longest = max(len(request.prompt) + request.settings.max_new_tokens for request in requests)
        programs = (
            id(generator),
            len(requests),
            capacity_for(min(longest, generator.max_seq_len), generator.num_draft_tokens + 1),
            any(len(request.prompt) > NARROW_PROMPT for request in requests),
            needed_switches([request.settings for request in requests]),
        )
        if programs not in self._warm:
            num_pieces, params = (1 + _WARM_VISITS) * len(requests), generator.params
            list(itertools.islice(generator.run(requests), num_pieces))
            generator.params = params  # without answers that have ended meanwhile
            self._warm.add(programs)


class EstimateWorker:
    """Compares the target's distributions along its own answers with those of the drafts.

    The answers are drawn by plain decoding; the last one is kept for the next method.
    """

    def __init__(
        self, experiment: Experiment, prompts: Mapping[int, Prompt], store: AnyStore
    ) -> None:
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
        text, chat = self._prompts[prompt].text, self._experiment.wants_chat
        ids = encode_conversation(self._models.target, [text], [], chat=chat)
        settings = settings_of(self._experiment, {"setting": setting, "seed": seed}, prompt)
        return self._plain.generate(Request(ids, settings.without_draft_sampling()))


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
    }
