"""From models and the names of a drafter and a rule to compiled programs and their parameters."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax

from jspec.common.errors import InputError, check_range, whole_number
from jspec.common.memory import tree_bytes
from jspec.drafters import DrafterOptions, DrafterSpec, make_drafter, with_shipped_head
from jspec.generation.auto import AUTO, MOST_DRAFT_TOKENS, AutoCosts, numbers_of
from jspec.generation.costs import RoundCosts
from jspec.generation.engine import Engine, make_engine
from jspec.speculation.acceptance.types import AcceptanceRule
from jspec.speculation.types import Drafter, ModelParams
from jspec.weights.resolver import LoadedModel
from jspec.weights.vocabulary import shared_vocab_size


class Programs(NamedTuple):
    """What answers requests.

    Attributes:
      engine: the compiled programs.
      params: both sides' parameters.
      drafter: None decodes plainly.
      auto: the costs by which the number of drafts is chosen; None where it is fixed.
    """

    engine: Engine
    params: ModelParams
    drafter: Drafter | None
    auto: AutoCosts | None

    @property
    def num_draft_tokens(self) -> int:
        """Drafts a round at most; 0 for plain decoding."""
        return 0 if self.drafter is None else self.drafter.num_draft_tokens

    def drafter_bytes(self, batch_size: int, capacity: int) -> dict[str, int]:
        """Returns the memory that drafting adds: parameters, and caches and texts of all rows.

        Args:
          batch_size: rows that run together.
          capacity: slots of each.
        """
        if self.drafter is None:
            return {"parameters": 0, "state": 0}
        state = jax.eval_shape(lambda: self.drafter.init(batch_size, capacity))  # type: ignore[union-attr]
        return {
            "parameters": tree_bytes(self.params.draft),
            "state": tree_bytes(state),
        }

    @property
    def drafter_of_kind(self) -> list[str]:
        """Who makes each kind of proposal."""
        return [] if self.drafter is None else [kind.drafter for kind in self.drafter.kinds]


def _describe(model: LoadedModel) -> list[str | None]:
    dtype = model.params["embedding"].dtype.name
    return [model.name, repr(model.config), dtype, model.quantization]


def make_spec(
    target: LoadedModel,
    draft: LoadedModel | None,
    drafter: str,
    options: DrafterOptions,
    num_draft_tokens: int,
) -> DrafterSpec:
    """Returns what a drafter of that name is built from.

    Args:
      target: the model whose answers are wanted.
      draft: the draft model, for a drafter that has one.
      drafter: a drafter's name.
      options: of the drafters; the head that comes with jspec need not be named.
      num_draft_tokens: drafts a round.
    """
    return DrafterSpec(
        num_draft_tokens=num_draft_tokens,
        target_config=target.config,
        vocab_size=shared_vocab_size(target, draft),
        draft_config=None if draft is None else draft.config,
        dtype=target.params["embedding"].dtype,
        draft_params=None if draft is None else draft.params,
        options=with_shipped_head(drafter, options, target.name),
        tokenizer=target.tokenizer,
    )


def make_programs(
    target: LoadedModel,
    draft: LoadedModel | None,
    *,
    drafter: str,
    drafter_options: DrafterOptions,
    num_draft_tokens: int | str,
    costs: RoundCosts | None,
    acceptance: str,
    rule: AcceptanceRule,
    max_seq_len: int,
    batch_size: int,
    numbers: Sequence[int] | None = None,
) -> Programs:
    """Prepares programs; nothing is compiled yet.

    Args:
      target: the model whose answers are wanted.
      draft: the draft model, for a drafter that has one.
      drafter: a drafter's name; see `make_drafter`.
      drafter_options: options of the drafters.
      num_draft_tokens: drafts a round, or "auto"; of no account for the drafter "none".
      costs: what rounds cost, for "auto"; None to measure them.
      acceptance: the rule's name.
      rule: what decides.
      max_seq_len: tokens that prompt and answer may come to.
      batch_size: rows that run together.
      numbers: of drafts, rising from 0, among which "auto" chooses; None takes its own.

    Raises:
      InputError: a value out of range, or models or costs that do not fit.
    """
    is_auto = num_draft_tokens == AUTO
    most = max(max_seq_len - 2, 1)
    largest = numbers[-1] if numbers else MOST_DRAFT_TOKENS
    num_wanted = min(largest, most) if is_auto or drafter == "none" else num_draft_tokens
    num_wanted = whole_number("num_draft_tokens", num_wanted, f" or {AUTO!r}")
    if costs is not None and (not is_auto or drafter == "none"):
        raise InputError(
            f"expected num_draft_tokens={AUTO!r} and a drafter where costs of rounds are given, "
            f"got num_draft_tokens={num_draft_tokens!r} and {drafter!r}"
        )
    check_range("num_draft_tokens", num_wanted, 1, most)
    spec = make_spec(target, draft, drafter, drafter_options, num_wanted)
    built = make_drafter(drafter, spec)
    params = ModelParams(target.params, built.params)
    if built.drafter is None or not is_auto:
        return Programs(make_engine(target, built.drafter, rule), params, built.drafter, None)
    numbers = numbers or numbers_of(built.drafter)
    engine = make_engine(target, built.drafter, rule, numbers)
    auto = AutoCosts(
        engine,
        params,
        built.drafter,
        numbers=numbers,
        target=target,
        batch_size=batch_size,
        max_seq_len=max_seq_len,
        key={
            "models": [_describe(target), draft and _describe(draft)],
            "drafter": drafter,
            "drafter_options": dataclasses.asdict(spec.options),
            "rule": acceptance,
        },
        costs=costs,
    )
    return Programs(engine, params, built.drafter, auto)
