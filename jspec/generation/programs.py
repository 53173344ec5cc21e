"""From models and the names of a drafter and a rule to compiled programs and their parameters."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jspec import kernels
from jspec.common.errors import InputError, check_count, check_type, whole_number
from jspec.common.memory import Budget, Room, give_back_after_compiling, give_back_freed, tree_bytes
from jspec.common.user_cache import use_compile_cache
from jspec.drafters import (
    DEFAULT_NUM_DRAFT_TOKENS,
    DrafterEntry,
    DrafterOptions,
    choose_drafter,
    entries_of,
    make_drafter,
    name_of,
)
from jspec.generation.auto import AUTO, MOST_DRAFT_TOKENS, check_costs, numbers_of, recall_costs
from jspec.generation.compile_notice import CompileNotice
from jspec.generation.costs import RoundCosts, measure_costs
from jspec.generation.drafter_spec import make_spec
from jspec.generation.engine import MAX_ROUNDS_PER_VISIT, Engine
from jspec.generation.graph_trial import check_one_graph
from jspec.generation.own_code import check_own_code, digest_of_own_code
from jspec.generation.pattern_processor import make_pattern_processor
from jspec.generation.prompts import encode_prompt
from jspec.generation.request import Request
from jspec.generation.result import Result
from jspec.generation.rows import Row, make_row
from jspec.generation.validate_options import (
    check_beams,
    check_draft_temperature,
    check_num_draft_tokens,
    check_rule_options,
    check_temperature,
)
from jspec.sampling.processors import Processor
from jspec.speculation.acceptance import RuleOptions, get_rule
from jspec.speculation.acceptance.types import AcceptanceRule
from jspec.speculation.types import ModelParams
from jspec.weights.resolver import LoadedModel

RULE_DEFAULTS = RuleOptions()
DRAFTER_DEFAULTS = DrafterOptions()
_OWN_RULE = "own rule"  # the name of a rule that was given as an object


class Programs:
    """Models, drafter and rule, checked and ready to be compiled: what a `Generator` runs.

    Attributes:
      rule: the acceptance rule.
      engine: the compiled programs.
      params: parameters of target and drafter.
      compile_notice: says when programs are compiled.
      alone_costs: costs of rounds of one row, where rounds of a batch may have fewer rows than it.
    """

    def __init__(
        self,
        target: LoadedModel,
        draft: LoadedModel | None = None,
        *,
        drafter: str | DrafterEntry | None = None,
        num_draft_tokens: int | str = DEFAULT_NUM_DRAFT_TOKENS,
        costs: RoundCosts | None = None,
        acceptance: str | AcceptanceRule = "rejection",
        rule_options: RuleOptions = RULE_DEFAULTS,
        drafter_options: DrafterOptions = DRAFTER_DEFAULTS,
        batch_size: int = 1,
        max_seq_len: int | None = None,
        rounds_per_visit: int = 8,
        processors: Sequence[Processor] = (),
        on_result: Callable[[Result], object] | None = None,
        on_start: Callable[[Budget], object] | None = None,
        on_compile: Callable[[str], object] | None = None,
    ) -> None:
        """Prepares the models; nothing is compiled yet."""
        use_compile_cache()
        check_one_graph()
        if isinstance(processors, Processor) or not isinstance(processors, Sequence):
            raise InputError(f"expected processors as a list, such as [mine], got {processors!r}")
        for name, value, kind in (
            ("drafter", drafter or "", (str, DrafterEntry)),
            ("acceptance", acceptance, (str, AcceptanceRule)),
            ("drafter_options", drafter_options, DrafterOptions),
            ("rule_options", rule_options, RuleOptions),
            *(("each of processors", one, Processor) for one in processors),
        ):
            check_type(name, value, kind)
        has_draft, context = draft is not None, target.config.max_seq_len
        drafter = choose_drafter(
            drafter, has_draft=has_draft, target=target.name, options=drafter_options
        )
        self._entry, self.drafter = drafter, name_of(drafter)
        check_num_draft_tokens(num_draft_tokens, self.drafter, drafter_options)
        self.max_seq_len = context if max_seq_len is None else max_seq_len
        check_count("max_seq_len", self.max_seq_len, 2, context)
        check_count("batch_size", batch_size, 1, 4096)
        check_count("rounds_per_visit", rounds_per_visit, 1, MAX_ROUNDS_PER_VISIT)
        is_own = isinstance(acceptance, AcceptanceRule)
        self.rule = acceptance if is_own else get_rule(acceptance, rule_options)
        acceptance = _OWN_RULE if is_own else acceptance
        check_rule_options(rule_options, acceptance, self.drafter)
        self.target, self._draft, self.batch_size = target, draft, batch_size
        self._acceptance, self._rule_options = acceptance, rule_options
        self._rounds_per_visit, self._on_result = rounds_per_visit, on_result
        self.processors = (*processors, make_pattern_processor(target))  # last: it forbids
        self.compile_notice, self._on_start = CompileNotice(on_compile), on_start
        number = self._num_wanted(num_draft_tokens, drafter_options.tree_depth)
        spec = make_spec(target, draft, drafter, drafter_options, number)
        self._drafter_options, built = spec.options, make_drafter(drafter, spec)
        check_own_code(entries_of(drafter), built, acceptance, self.rule, target)
        auto = built.drafter if num_draft_tokens == AUTO else None
        numbers = () if auto is None else numbers_of(auto)
        self.engine = Engine(target, built.drafter, self.rule, numbers, built.params)
        self.num_draft_tokens = self.engine.num_draft_tokens
        placed, self._costs = self.engine.layout.place(built.params), costs
        self.alone_costs, self._are_costs_given = costs, costs is not None
        self.params = ModelParams(target.params, placed)
        if costs is not None:
            check_costs(costs, self.engine)
        give_back_after_compiling()
        give_back_freed()  # what loading models and heads has taken in addition

    def _num_wanted(self, num_draft_tokens: int | str, depth: int) -> int:
        """Returns the number of drafts that the drafter, of trees of that depth, is built for."""
        most = max(self.max_seq_len - 2, 1)
        if num_draft_tokens == AUTO or self.drafter == "none":
            most = min(MOST_DRAFT_TOKENS, most)
            if depth > most:
                expected = f"tree_depth of at most {most} with num_draft_tokens={AUTO}"
                raise InputError(f"expected {expected}, got {depth}")
            return most
        number = whole_number("num_draft_tokens", num_draft_tokens, f" or {AUTO!r}")
        if not 1 <= number <= most:
            why = f"the context sets the limit (max_seq_len {self.max_seq_len})"
            why = "the drafter none drafts nothing (--drafter=none)" if number < 1 else why
            raise InputError(f"expected num_draft_tokens from 1 to {most}, got {number}; {why}")
        return number

    def make_row(
        self, request: Request, *, chat: bool | None = None, system: str | None = None
    ) -> Row:
        """Returns the row of a request, without costs.

        Raises:
          InputError: if the models, the drafter or the rule cannot answer the request.
        """
        prompt = encode_prompt(self.target, request.prompt, chat=chat, system=system)
        settings = request.settings
        check_draft_temperature(settings, [(self._entry, self._drafter_options)])
        check_temperature(self._acceptance, self.rule.temperatures, settings.temperature)
        check_beams(settings, self.target, self.batch_size, self._acceptance, self.engine.numbers)
        return make_row(prompt, settings, self.target, self.max_seq_len)

    def with_costs(self, row: Row) -> Row:
        """Returns the row with the costs by which it chooses its numbers of drafts, if it does."""
        if (costs := self.costs) is None:
            return row
        context = self.engine.capacity_for(row.max_length)  # of the row alone, not of its batch
        alone = (self.alone_costs or costs).at(context)
        return row._replace(costs=(costs.at(context), alone, costs.reading_at(context)))

    @property
    def costs(self) -> RoundCosts | None:
        """The costs of rounds, measured now if need be; None if the number of drafts is fixed."""
        if self._costs is None and self.engine.numbers:
            self._costs = self._recall_costs(self.batch_size)
        return self._costs

    def recall_costs_alone(self) -> None:
        """Has the costs of rounds of one row known, too, unless costs were given."""
        if not self._are_costs_given and self.engine.numbers:
            self.alone_costs = self._recall_costs(1)

    def _recall_costs(self, batch_size: int) -> RoundCosts:
        self.engine.await_kernels(self.params, batch_size, self.max_seq_len)
        key = {
            "models": [_describe(self.target), self._draft and _describe(self._draft)],
            "drafter": self.drafter,
            "drafter_options": dataclasses.asdict(self._drafter_options),
            "rule": self._acceptance,
            "own_code": digest_of_own_code(self.engine.drafter),
            "kernels": self._kernels(),
            "is_one_graph": kernels.run_options() is not None,
        }
        return recall_costs(self.engine, self.params, batch_size, self.max_seq_len, key)

    def measure_costs(self) -> RoundCosts | None:
        """Measures what rounds cost on this machine: a plain step, and rounds with drafts.

        With a fixed number of drafts that number is measured beside 0; with "auto", all that it
        chooses from, in seconds, and about as long to compile. Plain decoding has none.
        """
        engine = self.engine
        if engine.drafter is None:
            return None
        if not engine.numbers:
            numbers = 0, self.num_draft_tokens
            engine = Engine(self.target, engine.drafter, self.rule, numbers, self.params.draft)
        return measure_costs(engine, self.params, self.batch_size, self.max_seq_len)

    def budget(self, room: Room) -> Budget:
        """Returns the device, and the memory that the models and caches of that size take on it."""
        budget, draft = self.engine.layout.budget(self.params, room), self._draft
        notes = [self._summary] if self._summary else []
        if draft is not None and draft.is_quantization_chosen:
            notes.append(f"the draft's weights in {draft.quantization}: faster here")
        return budget._replace(note="; ".join(notes))

    @property
    def _summary(self) -> str:
        drafter = self.engine.drafter
        return "" if drafter is None else drafter.summary

    @property
    def is_lossless(self) -> bool:
        """Whether the answers follow the target's distribution exactly."""
        return self.rule.is_lossless

    @functools.cached_property
    def _drafter_bytes(self) -> dict[str, int]:
        """The memory that drafting adds, in bytes: parameters, and the state of a full batch."""
        if (drafter := self.engine.drafter) is None:
            return {"parameters": 0, "state": 0}
        capacity = self.engine.capacity_for(self.max_seq_len)
        state = jax.eval_shape(lambda: drafter.init(self.batch_size, capacity))
        return {"parameters": tree_bytes(self.params.draft), "state": tree_bytes(state)}

    def _kernels(self) -> dict[str, str | None]:
        """What has computed the blocks of target and draft so far."""
        draft = self._draft
        return {
            "kernels": kernels.chosen_kernels(self.target.own_config),
            "draft_kernels": draft and kernels.chosen_kernels(draft.own_config),
        }

    def describe(self) -> dict[str, Any]:
        """Returns everything besides the request that decides an answer, as plain values.

        That is models, quantisation, dtype, drafter and rule with options, known costs of "auto",
        and the kernels that blocks have taken so far.
        """
        draft = self._draft
        return {
            "target": self.target.name,
            "target_quantization": self.target.quantization or "none",
            "draft": None if draft is None else draft.name,
            "draft_quantization": None if draft is None else draft.quantization or "none",
            "draft_vocabulary": self._summary or None,
            "drafter": self.drafter,
            "drafter_bytes": self._drafter_bytes,
            "num_draft_tokens": AUTO if self.engine.numbers else self.num_draft_tokens,
            "costs": self._costs and self._costs.to_json(),
            "acceptance": self._acceptance,
            "is_lossless": self.rule.is_lossless,
            **self._kernels(),
            "drafter_options": dataclasses.asdict(self._drafter_options),
            "rule_options": dataclasses.asdict(self._rule_options),
            "dtype": self.target.params["embedding"].dtype.name,
            "mesh": self.engine.layout.shape,
            "max_seq_len": self.max_seq_len,
        }


def _describe(model: LoadedModel) -> list[str | None]:
    dtype = model.params["embedding"].dtype.name
    return [model.name, repr(model.config), dtype, model.quantization]
