"""Measures the cells of the kinds "generate" and "estimate", with the models that they need."""

import dataclasses
import functools
import itertools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from jspec.common import processes
from jspec.common.errors import InputError, WorkdirError, describe_error, say
from jspec.common.journal import Journal
from jspec.common.progress import Progress, counted
from jspec.common.timing import Instant
from jspec.common.work_dir import write_json
from jspec.drafters.tables import count_ngrams, save_table
from jspec.generation.auto import costs_of_first
from jspec.generation.batch import needed_switches
from jspec.generation.costs import RoundCosts
from jspec.generation.generator import Generator
from jspec.generation.layout import place_model
from jspec.generation.options import settings_read_by
from jspec.generation.prompts import Prompt, encode_conversation, read_prompts
from jspec.generation.request import Request, SamplingParams
from jspec.generation.result import Result, check_answered
from jspec.generation.rows import capacity_for
from jspec.lab.experiments.cells import Cell, settings_of
from jspec.lab.experiments.estimates import DraftDistribution, Estimator
from jspec.lab.experiments.spec import Experiment, MethodSpec
from jspec.lab.experiments.store import AnyStore
from jspec.models.sharding import make_mesh
from jspec.weights.resolver import LoadedModel, load_model
from jspec.weights.vocabulary import used_vocab_size

_FIRST_SEED = 10**9  # of a table's answers: far from the seeds of what is measured
_TABLE_BATCH_SIZE = 8

_WARM_VISITS = 2  # of the host to each row, besides the prefill


class Models:
    """The target, the draft models, and a Generator for each method's label and batch size."""

    def __init__(self, experiment: Experiment, store: AnyStore) -> None:
        self._experiment, self._store = experiment, store
        self._mesh = make_mesh(experiment.mesh) if experiment.mesh else None
        self._load = functools.cache(self._load_model)
        self.generator = functools.cache(self._make_generator)
        self.target = self._load(experiment.target, experiment.target_quantization, mesh=self._mesh)

    def _load_model(self, name: str, quantization: str, mesh: Mesh | None = None) -> LoadedModel:
        return load_model(name, dtype=self._experiment.dtype, quantization=quantization, mesh=mesh)

    def draft(self, method: MethodSpec) -> LoadedModel | None:
        """Returns the draft model of a method; None if it has none."""
        if method.draft is None:
            return None
        return place_model(self._load(method.draft, method.draft_quantization), self._mesh)

    def with_table(self, method: MethodSpec) -> MethodSpec:
        """Returns a method, with the workdir's table if it needs one and names none."""
        if not method.needs_table:
            return method
        path = counted_table(self._experiment, self.target, self._store)
        options = dataclasses.replace(method.options, draft_table=path)
        return dataclasses.replace(method, options=options)

    def _make_generator(self, label: str, batch_size: int) -> Generator:
        """Returns a method's Generator; call it as `generator`, which keeps it.

        Whatever it raises, another call tries again.
        """
        method = self.with_table(self._experiment.methods[label])
        make = functools.partial(
            Generator, self.target, self.draft(method), drafter=method.drafter,
            drafter_options=method.options, num_draft_tokens=method.num_draft_tokens,
            acceptance=method.acceptance, rule_options=method.rule_options,
            batch_size=batch_size, max_seq_len=self._experiment.max_seq_len,
        )  # fmt: skip
        generator = make()
        is_auto = bool(generator.engine.numbers)
        if not is_auto and not self._experiment.measure_costs:
            return generator
        measure = (lambda: generator.costs) if is_auto else generator.round_costs.measure
        with self._store.setup():
            path = self._store.folder / "costs.json"
            recall = functools.partial(recorded_costs, path, label, batch_size)
            costs = costs_of_first(recall, measure)
        return make(costs=costs) if is_auto else generator

    def describe(self, method: str) -> dict[str, Any]:
        """Returns a method's Generator as plain values; the error of one that cannot be made."""
        try:
            return self.generator(method, self._experiment.batch_sizes[0]).describe()
        except WorkdirError:
            raise
        except Exception as error:
            if processes.is_loss(error):
                raise
            return {"error": describe_error(error)}


def recorded_costs(
    path: pathlib.Path, method: str, batch_size: int, measure: Callable[[], RoundCosts | None]
) -> RoundCosts | None:
    """Returns a workdir's costs of a method's rounds, which are measured once and written down.

    A resumed run with "auto" then makes the same choices. Other processes must be kept waiting.

    Raises:
      WorkdirError: the file is damaged or cannot be written.
    """
    try:
        entries = json.loads(path.read_bytes()) if path.exists() else {}
        by_size = entries.get(method, {})
        known = by_size.get(str(batch_size))
    except (OSError, ValueError, AttributeError) as error:
        raise WorkdirError(f"cannot read {path}: {error}") from None
    if known is not None:
        return RoundCosts.from_json(known)
    costs = measure()
    if costs is not None:
        write_json(path, entries | {method: by_size | {str(batch_size): costs.to_json()}})
    return costs


def counted_table(experiment: Experiment, target: LoadedModel, store: AnyStore) -> str:
    """Returns the path of the workdir's table, which is made if it is missing.

    Raises:
      InputError: the prompts file is unreadable or empty.
      WorkdirError: nothing can be written.
    """
    path = store.folder / "table.safetensors"
    with store.setup():
        if not processes.of_first(path.exists):
            table = count_ngrams(_table_answers(experiment, target, store), used_vocab_size(target))
            try:
                processes.of_first(lambda: save_table(table, path, target.tokenizer))
            except InputError as error:
                raise WorkdirError(str(error)) from None
    return str(path)


def _table_answers(experiment: Experiment, target: LoadedModel, store: AnyStore) -> list[list[int]]:
    """Returns the ids of answers with enough tokens together; the prompts take turns.

    They are kept in `table_answers.jsonl`: a killed run goes on with the next.
    """
    spec = experiment.table
    texts = [prompt.text for prompt in read_prompts(spec.prompts_file)]
    if not texts:
        raise InputError(f"expected at least one prompt in {spec.prompts_file}, got none")
    journal = Journal(store.folder / "table_answers.jsonl")
    known = processes.of_first(journal.read)
    answers = [list(map(int, record["token_ids"])) for record in known]
    generator = Generator(
        target, drafter="none", max_seq_len=experiment.max_seq_len, batch_size=_TABLE_BATCH_SIZE
    )
    say(f"counting a table on {counted(spec.num_tokens, 'token')} of the target's answers")
    progress = Progress(spec.num_tokens, _total(answers), "token")
    while _total(answers) < spec.num_tokens:
        # An answer does not depend on its batch: a resumed run may group them differently.
        numbers = range(len(answers), len(answers) + _TABLE_BATCH_SIZE)
        requests = [
            Request(
                texts[n % len(texts)],
                SamplingParams(spec.max_new_tokens, spec.temperature, seed=_FIRST_SEED + n),
            )
            for n in numbers
        ]
        results = generator.generate(requests, chat=experiment.wants_chat)
        check_answered(results)
        for number, result in zip(numbers, results, strict=True):
            if _total(answers) < spec.num_tokens:
                line = {"prompt": number % len(texts), "token_ids": result.token_ids}
                if processes.is_first():
                    journal.append(line)
                answers.append(result.token_ids)
        progress.show(_total(answers))
    return answers


def _total(answers: list[list[int]]) -> int:
    return sum(map(len, answers))


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
        engine, lengths = generator.engine, [len(request.prompt) for request in requests]
        programs = (
            id(generator),
            len(requests),
            capacity_for(min(longest, generator.max_seq_len), generator.num_draft_tokens + 1),
            frozenset().union(*map(engine.widths_of, lengths)),
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
