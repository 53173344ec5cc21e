"""From models and the names of a drafter and a rule to compiled programs and their parameters."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from jspec.common.errors import InputError, check_count, check_range, whole_number
from jspec.common.memory import tree_bytes
from jspec.drafters import (
    DEFAULT_NUM_DRAFT_TOKENS,
    DrafterOptions,
    DrafterSpec,
    choose_drafter,
    make_drafter,
    with_shipped_head,
)
from jspec.generation.auto import AUTO, MOST_DRAFT_TOKENS, AutoCosts, numbers_of
from jspec.generation.capacity import capacity_for
from jspec.generation.costs import RoundCosts
from jspec.generation.engine import Engine
from jspec.generation.request import Settings
from jspec.generation.rows import Row, make_row
from jspec.generation.validate_options import (
    check_draft_temperature,
    check_num_draft_tokens,
    check_rule_options,
)
from jspec.speculation.acceptance import RuleOptions, get_rule
from jspec.speculation.types import ModelParams
from jspec.weights.resolver import LoadedModel
from jspec.weights.vocabulary import shared_vocab_size, used_vocab_size

RULE_DEFAULTS = RuleOptions()
DRAFTER_DEFAULTS = DrafterOptions()


class Programs:
    """What answers requests: models, drafter and rule, checked and ready to be compiled.

    Attributes:
      target: the model whose answers are wanted.
      max_seq_len: maximum number of tokens of prompt and answer together.
      batch_size: maximum number of rows that run together.
      drafter_name: name of the drafter.
      drafter: the drafter; None for plain decoding.
      num_draft_tokens: maximum number of drafts a round; 0 for plain decoding.
      params: parameters of target and drafter.
      rule: the acceptance rule.
      engine: the compiled programs.
      auto: costs by which the number of drafts is chosen; None where that number is fixed.
    """

    def __init__(
        self,
        target: LoadedModel,
        draft: LoadedModel | None = None,
        *,
        drafter: str | None = None,
        num_draft_tokens: int | str = DEFAULT_NUM_DRAFT_TOKENS,
        costs: RoundCosts | None = None,
        acceptance: str = "rejection",
        rule_options: RuleOptions = RULE_DEFAULTS,
        drafter_options: DrafterOptions = DRAFTER_DEFAULTS,
        batch_size: int = 1,
        max_seq_len: int | None = None,
    ) -> None:
        """Checks the options and prepares the programs; see `Generator` for arguments and errors.

        Nothing is compiled yet.
        """
        drafter = choose_drafter(
            drafter, has_draft=draft is not None, target=target.name, options=drafter_options
        )
        check_num_draft_tokens(num_draft_tokens, drafter)
        context = target.config.max_seq_len
        self.max_seq_len = context if max_seq_len is None else max_seq_len
        check_count("max_seq_len", self.max_seq_len, 2, context)
        check_count("batch_size", batch_size, 1, 4096)
        self.rule = get_rule(acceptance, rule_options)
        check_rule_options(rule_options, acceptance, drafter)
        self.target, self._draft, self.drafter_name = target, draft, drafter
        self.batch_size = batch_size
        self._acceptance, self._rule_options = acceptance, rule_options
        num_wanted = self._num_wanted(num_draft_tokens, costs)
        spec = make_spec(target, draft, drafter, drafter_options, num_wanted)
        self._drafter_options = spec.options
        self.drafter, draft_params = make_drafter(drafter, spec)
        self.num_draft_tokens = 0 if self.drafter is None else self.drafter.num_draft_tokens
        self.params = ModelParams(target.params, draft_params)
        self.auto = None
        if self.drafter is None or num_draft_tokens != AUTO:
            self.engine = Engine(target, self.drafter, self.rule)
        else:
            self.auto = self._auto_costs(numbers_of(self.drafter), costs)
            self.engine = self.auto.engine

    def _num_wanted(self, num_draft_tokens: int | str, costs: RoundCosts | None) -> int:
        """Returns the number of drafts that the drafter is built for."""
        is_auto, is_plain = num_draft_tokens == AUTO, self.drafter_name == "none"
        most = max(self.max_seq_len - 2, 1)
        wanted = min(MOST_DRAFT_TOKENS, most) if is_auto or is_plain else num_draft_tokens
        wanted = whole_number("num_draft_tokens", wanted, f" or {AUTO!r}")
        if costs is not None and (not is_auto or is_plain):
            raise InputError(
                f"expected num_draft_tokens={AUTO!r} and a drafter where costs of rounds are "
                f"given, got num_draft_tokens={num_draft_tokens!r} and {self.drafter_name!r}"
            )
        check_range("num_draft_tokens", wanted, 1, most)
        return wanted

    def _auto_costs(self, numbers: Sequence[int], costs: RoundCosts | None) -> AutoCosts:
        assert self.drafter is not None
        draft = self._draft
        return AutoCosts(
            Engine(self.target, self.drafter, self.rule, numbers),
            self.params,
            self.drafter,
            numbers=numbers,
            target=self.target,
            batch_size=self.batch_size,
            max_seq_len=self.max_seq_len,
            key={
                "models": [_describe(self.target), draft and _describe(draft)],
                "drafter": self.drafter_name,
                "drafter_options": dataclasses.asdict(self._drafter_options),
                "rule": self._acceptance,
            },
            costs=costs,
        )

    def measure_costs(self) -> RoundCosts | None:
        """Measures what rounds cost; see `Generator.measure_costs`."""
        if self.drafter is None:
            return None
        return (self.auto or self._auto_costs((0, self.num_draft_tokens), None)).measure()

    def make_row(self, prompt: list[int], settings: Settings) -> Row:
        """Returns the row of a request, without costs.

        Args:
          prompt: token ids of the prompt.
          settings: how to answer.

        Raises:
          InputError: if the models, the drafter or the rule cannot answer the request.
        """
        check_draft_temperature(settings, [(self.drafter_name, self._drafter_options)])
        return make_row(
            prompt,
            settings,
            config=self.target.config,
            vocab_size=self._vocab_size,
            max_seq_len=self.max_seq_len,
            acceptance=self._acceptance,
            temperatures=self.rule.temperatures,
        )

    @functools.cached_property
    def _vocab_size(self) -> int:
        return used_vocab_size(self.target)

    @property
    def drafter_of_kind(self) -> list[str]:
        """The name of the drafter that makes each kind of proposal."""
        return [] if self.drafter is None else [kind.drafter for kind in self.drafter.kinds]

    @functools.cached_property
    def _drafter_bytes(self) -> dict[str, int]:
        """The memory that drafting adds, in bytes: parameters, and the state of a full batch."""
        drafter = self.drafter
        if drafter is None:
            return {"parameters": 0, "state": 0}
        capacity = capacity_for(self.max_seq_len, self.num_draft_tokens + 1)
        state = jax.eval_shape(lambda: drafter.init(self.batch_size, capacity))
        return {"parameters": tree_bytes(self.params.draft), "state": tree_bytes(state)}

    def describe(self) -> dict[str, Any]:
        """Returns what decides an answer besides the request; see `Generator.describe`."""
        draft = self._draft
        return {
            "target": self.target.name,
            "target_quantization": self.target.quantization,
            "draft": None if draft is None else draft.name,
            "draft_quantization": None if draft is None else draft.quantization,
            "drafter": self.drafter_name,
            "drafter_bytes": self._drafter_bytes,
            "num_draft_tokens": self.num_draft_tokens if self.auto is None else AUTO,
            "costs": self.auto and self.auto.to_json(),
            "acceptance": self._acceptance,
            "is_lossless": self.rule.is_lossless,
            "drafter_options": dataclasses.asdict(self._drafter_options),
            "rule_options": dataclasses.asdict(self._rule_options),
            "dtype": self.target.params["embedding"].dtype.name,
            "max_seq_len": self.max_seq_len,
        }


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
    """Returns what a drafter is built from.

    Args:
      target: the model whose answers are wanted.
      draft: the draft model, for a drafter that needs one.
      drafter: name of the drafter.
      options: options of the drafters; a head that jspec ships need not be named in them.
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
