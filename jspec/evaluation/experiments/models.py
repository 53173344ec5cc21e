"""The models and Generators of an experiment, each made once in a process, when it is needed."""

import dataclasses
from typing import Any

from jspec.common.cli import parse_quantization
from jspec.common.workdir_errors import WorkdirError, describe_error
from jspec.evaluation.experiments.method_spec import MethodSpec
from jspec.evaluation.experiments.shared_costs import COSTS, recorded_costs
from jspec.evaluation.experiments.spec import Experiment
from jspec.evaluation.experiments.store import Store
from jspec.evaluation.experiments.tables import counted_table
from jspec.generation.auto import AUTO
from jspec.generation.generator import Generator
from jspec.weights.resolver import LoadedModel, load_model


class Models:
    """The models of an experiment, and its ways with what the workdir gives them.

    Attributes:
      target: the target.
    """

    def __init__(self, experiment: Experiment, store: Store) -> None:
        """Loads the target.

        Raises:
          InputError: it cannot be loaded.
        """
        self._experiment, self._store = experiment, store
        self._loaded: dict[tuple[str, str], LoadedModel] = {}
        self._table: str | None = None
        self.target = self._load(experiment.target, experiment.target_quantization)

    def _load(self, name: str, quantization: str) -> LoadedModel:
        if (name, quantization) not in self._loaded:
            self._loaded[name, quantization] = load_model(
                name, dtype=self._experiment.dtype, quantization=parse_quantization(quantization)
            )
        return self._loaded[name, quantization]

    def draft(self, method: MethodSpec) -> LoadedModel | None:
        """Returns the draft model of a way; None if it has none.

        Raises:
          InputError: it cannot be loaded.
        """
        return None if method.draft is None else self._load(method.draft, method.draft_quantization)

    def complete(self, method: MethodSpec) -> MethodSpec:
        """Returns a way with the workdir's table, if it needs one and brings none of its own."""
        if not method.needs_table:
            return method
        if self._table is None:
            self._table = counted_table(self._experiment, self.target, self._store)
        options = dataclasses.replace(method.options, draft_table=self._table)
        return dataclasses.replace(method, options=options)


class Generators:
    """A Generator for each way and batch size."""

    def __init__(self, experiment: Experiment, store: Store) -> None:
        """Loads the target.

        Raises:
          InputError: it cannot be loaded.
        """
        self.models = Models(experiment, store)
        self._experiment, self._store = experiment, store
        self._made: dict[tuple[str, int], Generator | Exception] = {}

    def get(self, method: str, batch_size: int) -> Generator:
        """Returns the Generator of a way.

        Raises:
          WorkdirError: the workdir cannot be written.
          Exception: it cannot be made, now or when it was tried before.
        """
        place = method, batch_size
        if place not in self._made:
            try:
                self._made[place] = self._make(method, batch_size)
            except WorkdirError:
                raise
            except Exception as error:  # raised below, and again for the way's other cells
                self._made[place] = error
        made = self._made[place]
        if isinstance(made, Exception):
            raise made
        return made

    def _make(self, label: str, batch_size: int) -> Generator:
        method = self.models.complete(self._experiment.methods[label])
        options: dict[str, Any] = {
            "drafter": method.drafter,
            "drafter_options": method.options,
            "acceptance": method.acceptance,
            "rule_options": method.rule_options,
            "batch_size": batch_size,
            "max_seq_len": self._experiment.max_seq_len,
        }
        draft = self.models.draft(method)
        if method.drafter == "none":
            return Generator(self.models.target, **options)
        options["num_draft_tokens"] = method.num_draft_tokens
        generator = Generator(self.models.target, draft, **options)
        is_auto = method.num_draft_tokens == AUTO
        if not is_auto and not self._experiment.measure_costs:
            return generator
        measure = (lambda: generator.costs) if is_auto else generator.measure_costs
        with self._store.setup():
            costs = recorded_costs(self._store.folder / COSTS, label, batch_size, measure)
        return (
            Generator(self.models.target, draft, costs=costs, **options) if is_auto else generator
        )

    def describe(self) -> dict[str, Any]:
        """Returns what each way is, as plain values; the error of one that cannot be made."""
        first = self._experiment.batch_sizes[0]
        return {method: self._describe(method, first) for method in self._experiment.methods}

    def _describe(self, method: str, batch_size: int) -> dict[str, Any]:
        try:
            return self.get(method, batch_size).describe()
        except WorkdirError:
            raise
        except Exception as error:
            return {"error": describe_error(error)}
