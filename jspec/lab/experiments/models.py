"""The models, tables and Generators of an experiment, each made when it is first needed."""

import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from jspec.common import processes
from jspec.common.errors import InputError, WorkdirError, describe_error
from jspec.common.journal import Journal
from jspec.common.progress import Progress, counted
from jspec.common.work_dir import write_json
from jspec.drafters.tables import count_ngrams, save_table
from jspec.generation.auto import costs_of_first
from jspec.generation.costs import RoundCosts
from jspec.generation.generator import Generator
from jspec.generation.layout import place_model
from jspec.generation.prompts import read_prompts
from jspec.generation.request import Request, SamplingParams
from jspec.generation.result import check_answered
from jspec.lab.experiments.spec import Experiment, MethodSpec
from jspec.lab.experiments.store import AnyStore
from jspec.models.sharding import make_mesh
from jspec.weights.resolver import LoadedModel, load_model
from jspec.weights.vocabulary import used_vocab_size

_FIRST_SEED = 10**9  # of a table's answers: far from the seeds of what is measured
_TABLE_BATCH_SIZE = 8


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
        measure = (lambda: generator.costs) if is_auto else generator.measure_costs
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
    print(f"counting a table on {counted(spec.num_tokens, 'token')} of the target's answers",
          file=sys.stderr, flush=True)  # fmt: skip
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
