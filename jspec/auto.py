"""A number of draft tokens that adapts: which numbers there are, and what rounds of them cost."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jspec.calibration import measure_costs
from jspec.costs import RoundCosts, recall_or_measure
from jspec.engine import Engine
from jspec.errors import InputError
from jspec.speculation.control import drafters_of
from jspec.speculation.types import Drafter, ModelParams
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
        expected = self._numbers, tuple(drafters_of(drafter.kinds))
        if costs is not None and (costs.numbers, costs.drafters) != expected:
            raise InputError(
                f"expected costs of rounds with {list(expected[0])} drafts by {list(expected[1])}, "
                f"got {list(costs.numbers)} by {list(costs.drafters)}"
            )

    def get(self, *, batch_size: int, max_context: int, key: Mapping[str, Any]) -> RoundCosts:
        """Returns the costs.

        Args:
          batch_size: rows that run together.
          max_context: slots of the largest cache that will be used.
          key: names and options of models and drafter, plain values.
        """
        if self._costs is not None:
            return self._costs
        place = {
            "backend": jax.default_backend(),
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
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
                kinds=self._drafter.kinds,
                numbers=self._numbers,
                batch_size=batch_size,
                max_context=max_context,
            ),
        )
        return self._costs

    def to_json(self) -> dict[str, Any] | None:
        """Returns the costs as plain values; None while they are not known."""
        return None if self._costs is None else self._costs.to_json()
