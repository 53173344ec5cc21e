"""A number of draft tokens that adapts: which numbers there are, and what rounds of them cost."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jspec.calibration import measure_costs
from jspec.costs import RoundCosts, recall_or_measure
from jspec.engine import Engine
from jspec.errors import InputError
from jspec.models import make_apply
from jspec.provenance import environment
from jspec.speculation.control import drafters_of
from jspec.speculation.types import Drafter, ModelParams
from jspec.vocabulary import mask_padding
from jspec.weights.resolver import LoadedModel
from jspec.weights.user_cache import cache_dir

AUTO = "auto"
_NUMBERS = (0, 1, 3, 7)  # each costs a compiled verify call
MOST_DRAFT_TOKENS = _NUMBERS[-1]


def numbers_of(drafter: Drafter) -> tuple[int, ...]:
    """Returns the numbers of drafts to choose from, rising from 0."""
    width = drafter.num_draft_tokens
    return (*(number for number in _NUMBERS if number < width), width)


class AutoCosts:
    """The costs of a Generator's rounds: given, or recalled, or measured when first asked for."""

    def __init__(
        self,
        engine: Engine,
        params: ModelParams,
        drafter: Drafter,
        numbers: Sequence[int],
        costs: RoundCosts | None,
    ) -> None:
        """Prepares; nothing is measured yet.

        Args:
          engine: the compiled programs.
          params: both sides' parameters.
          drafter: what proposes.
          numbers: of drafts to choose from, rising from 0.
          costs: recorded ones; None to recall or measure them.

        Raises:
          InputError: costs of something else.
        """
        self._engine, self._params, self._drafter = engine, params, drafter
        self._numbers, self._costs = tuple(numbers), costs
        if costs is not None:
            self._check(costs)

    def _check(self, costs: RoundCosts) -> None:
        expected = self._numbers, tuple(drafters_of(self._drafter.kinds))
        found = costs.numbers, costs.drafters
        if found != expected:
            numbers, drafters = map(list, expected)
            raise InputError(
                f"expected costs of rounds with {numbers} drafts by {drafters}, got "
                f"{list(found[0])} by {list(found[1])}"
            )

    def get(
        self, *, target: LoadedModel, batch_size: int, max_context: int, key: Mapping[str, Any]
    ) -> RoundCosts:
        """Returns the costs.

        Args:
          target: the target.
          batch_size: rows that run together.
          max_context: slots of the largest cache that will be used.
          key: names and options of models and drafter, plain values.
        """
        if self._costs is not None:
            return self._costs
        place = {
            "backend": jax.default_backend(),
            "device": jax.devices()[0].device_kind,
            "processor": environment()["processor"],
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
            "versions": environment()["versions"],
            "bytes": [sum(leaf.nbytes for leaf in jax.tree.leaves(p)) for p in self._params],
            "batch_size": batch_size,
            "max_context": max_context,
            "numbers": list(self._numbers),
        }
        self._costs = recall_or_measure(
            cache_dir() / "costs.json",
            dict(key) | place,
            lambda: measure_costs(
                self._engine,
                self._params,
                target=mask_padding(make_apply(target.config), target),
                drafter=self._drafter,
                numbers=self._numbers,
                batch_size=batch_size,
                max_context=max_context,
            ),
            self._check,
        )
        return self._costs

    def to_json(self) -> dict[str, Any] | None:
        """Returns the costs as plain values; None while they are not known."""
        return None if self._costs is None else self._costs.to_json()
