"""A number of draft tokens that adapts: the numbers to choose from, and what their rounds cost."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jspec.common.errors import InputError
from jspec.common.user_cache import cache_dir
from jspec.generation.calibration import measure_costs
from jspec.generation.capacity import capacity_for
from jspec.generation.costs import RoundCosts, recall_or_measure
from jspec.generation.engine import Engine
from jspec.generation.provenance import environment
from jspec.generation.rows import CostsAt
from jspec.models import make_apply
from jspec.speculation.control import drafters_of
from jspec.speculation.types import Drafter, ModelParams
from jspec.weights.resolver import LoadedModel
from jspec.weights.vocabulary import mask_padding

AUTO = "auto"
_METHOD = 2  # version of the measurement: what another version measured is measured again
_NUMBERS = (0, 1, 3, 7)  # few, as a verify call is compiled for each
MOST_DRAFT_TOKENS = _NUMBERS[-1]
_MACHINE = ("backend", "device", "processor", "native", "versions")


def numbers_of(drafter: Drafter) -> tuple[int, ...]:
    """Returns the numbers of drafts to choose from, in increasing order from 0."""
    width = drafter.num_draft_tokens
    return (*(number for number in _NUMBERS if number < width), width)


class AutoCosts:
    """The costs of a Generator's rounds: given, recalled from a file, or measured on first use.

    Attributes:
      engine: the compiled programs, whose rows choose the number of drafts.
    """

    def __init__(
        self,
        engine: Engine,
        params: ModelParams,
        drafter: Drafter,
        *,
        numbers: Sequence[int],
        target: LoadedModel,
        batch_size: int,
        max_seq_len: int,
        key: Mapping[str, Any],
        costs: RoundCosts | None,
    ) -> None:
        """Prepares; nothing is measured yet.

        Args:
          engine: the compiled programs, whose rows choose among `numbers`.
          params: parameters of target and drafter.
          drafter: the drafter.
          numbers: numbers of drafts, in increasing order from 0.
          target: the target model.
          batch_size: number of rows that run together.
          max_seq_len: maximum number of tokens of prompt and answer together.
          key: names and options of models and drafter, on which the costs depend.
          costs: recorded costs; None to recall or measure them.

        Raises:
          InputError: if the costs are those of other numbers or drafters.
        """
        self.engine, self._params, self._drafter = engine, params, drafter
        self._numbers = tuple(numbers)
        self._target, self._batch_size, self._key = target, batch_size, key
        self._max_context = self._context(max_seq_len)
        self._known = costs
        if costs is not None:
            self._check(costs)

    @property
    def costs(self) -> RoundCosts:
        """The costs; they are measured now if they are not known."""
        if self._known is None:
            path, key = cache_dir() / "costs.json", dict(self._key) | self._machine()
            self._known = recall_or_measure(path, key, self.measure, self._check)
        return self._known

    def at(self, max_length: int) -> CostsAt:
        """Returns the costs for a row of at most `max_length` tokens, in whatever batch it is."""
        context = self._context(max_length)
        return CostsAt(self.costs.at(context), self.costs.reading_at(context))

    def to_json(self) -> dict[str, Any] | None:
        """Returns the costs as plain values; None while they are not known."""
        return None if self._known is None else self._known.to_json()

    def measure(self) -> RoundCosts:
        """Measures the costs now, even if they are known."""
        return measure_costs(
            self.engine,
            self._params,
            target=mask_padding(make_apply(self._target.config), self._target),
            drafter=self._drafter,
            numbers=self._numbers,
            batch_size=self._batch_size,
            max_context=self._max_context,
        )

    def _context(self, max_length: int) -> int:
        return capacity_for(max_length, self._drafter.num_draft_tokens + 1)

    def _check(self, costs: RoundCosts) -> None:
        expected = self._numbers, tuple(drafters_of(self._drafter.kinds))
        found = costs.numbers, costs.drafters
        if found != expected:
            numbers, drafters = map(list, expected)
            raise InputError(
                f"expected costs of rounds with {numbers} drafts by {drafters}, got "
                f"{list(found[0])} by {list(found[1])}"
            )
        if hasattr(self._drafter, "lag") and not costs.reading:
            raise InputError(
                "expected costs with the seconds of reading a token (`reading`), as a drafter has "
                "a cache of its own; got none"
            )

    def _machine(self) -> dict[str, Any]:
        """Returns everything else on which the costs depend: machine, software and sizes."""
        here = environment()
        return {
            **{name: here[name] for name in _MACHINE},
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
            "method": _METHOD,
            "bytes": [sum(leaf.nbytes for leaf in jax.tree.leaves(p)) for p in self._params],
            "batch_size": self._batch_size,
            "max_context": self._max_context,
            "numbers": list(self._numbers),
        }
