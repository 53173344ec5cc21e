"""Many independent rows of one short context, driven through the compiled rounds."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.common.typing import Params
from jspec.drafters import BuiltDrafter, make_drafter
from jspec.evaluation.auditing.context import Context
from jspec.evaluation.auditing.subject import Subject
from jspec.generation.auto import AUTO, numbers_of
from jspec.generation.batch import needed_switches
from jspec.generation.engine import Engine
from jspec.generation.programs import make_spec
from jspec.generation.request import Settings
from jspec.generation.rows import Row
from jspec.models import make_apply
from jspec.speculation.acceptance.types import AcceptanceRule
from jspec.speculation.control import drafters_of
from jspec.speculation.types import (
    Drafter,
    ModelParams,
    RoundInputs,
    SpecState,
    StepInfo,
    TargetView,
)
from jspec.weights.vocabulary import used_vocab_size

_ROWS_A_RUN = 128
_MOST_DRAFTS = 2
_COST_OF_A_DRAFT, _COST_OF_A_GREEDY_DRAFT = 0.5, 0.05  # in plain steps
_COST_OF_READING = 0.01  # of a token that a drafter has missed, in plain steps


class Rows:
    """Compiled rounds of the subject over many rows of one context.

    Attributes:
      settings: those of every row, the alphabet included.
      num_rounds: of a run; every row then has at least this many tokens.
      num_draft_tokens: drafts a round; few, so that the tokens looked at take several rounds.
      num_proposed: drafts of all rounds so far that ran with the target's own parameters.
      num_accepted: how many of them were accepted.
    """

    def __init__(
        self,
        subject: Subject,
        context: Context,
        num_rounds: int,
        *,
        rows_per_run: int = _ROWS_A_RUN,
        rule: AcceptanceRule | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """Prepares the programs; nothing is compiled yet.

        Args:
          subject: what is audited.
          context: of all rows.
          num_rounds: of a run.
          rows_per_run: rows that run together.
          rule: in place of the subject's, for a negative control.
          drafter: likewise; it gets the parameters of the subject's drafter.
        """
        self._target, self._context, self.num_rounds = subject.target, context, num_rounds
        self._rows_per_run = rows_per_run
        self.settings = self._with_alphabet(subject.settings)
        built = build_drafter(subject)
        self._drafter = built.drafter if drafter is None else drafter
        self._draft_params = built.params
        self.num_draft_tokens = 0 if self._drafter is None else self._drafter.num_draft_tokens
        self._rule = subject.rule if rule is None else rule
        self._numbers = ()
        if subject.num_draft_tokens == AUTO and self._drafter is not None:
            self._numbers = numbers_of(self._drafter)
        self._engine = Engine(subject.target, self._drafter, self._rule, self._numbers)
        self.num_proposed = self.num_accepted = 0

    def run(
        self,
        num_rows: int,
        *,
        params: Params | None = None,
        settings: Settings | None = None,
        first_seed: int = 0,
    ) -> Iterator[tuple[StepInfo, SpecState]]:
        """Yields what the rounds of each run did, and the state after them.

        Args:
          num_rows: at least this many rows in all.
          params: of the target; None takes its own.
          settings: of every row; None takes the subject's.
          first_seed: the rows' seeds are this and the numbers after it.
        """
        both = ModelParams(self._target.params if params is None else params, self._draft_params)
        settings = self.settings if settings is None else self._with_alphabet(settings)
        start = self._start(both, settings)
        for first in range(first_seed, first_seed + num_rows, self._rows_per_run):
            state = jax.tree.map(lambda leaf: jnp.repeat(leaf, self._rows_per_run, axis=0), start)
            seeds = jnp.arange(first, first + self._rows_per_run, dtype=jnp.uint32)
            state, infos = self._engine.run(both, state.replace(seed=seeds), self.num_rounds)
            if params is None:
                self.num_proposed += int(infos.num_proposed.sum())
                self.num_accepted += int(infos.num_accepted.sum())
            yield infos, state

    def _with_alphabet(self, settings: Settings) -> Settings:
        """Returns the settings with nothing allowed but the alphabet."""
        if len(self._context.alphabet) < used_vocab_size(self._target):
            allowed = tuple(self._context.alphabet)
            settings = dataclasses.replace(settings, allowed_token_ids=allowed)
        return dataclasses.replace(settings, logprobs=False)

    def _start(self, params: ModelParams, settings: Settings) -> SpecState:
        """Returns one row that has emitted the context's first token, its drafter caught up."""
        context = self._context
        num_slots = len(context.prompt) + 1 + self.num_rounds * (self.num_draft_tokens + 1)
        costs, capacity = self._costs(), num_slots + self.num_draft_tokens + 1
        row = Row(settings, context.prompt, stop_ids=(), max_length=num_slots + 1, costs=costs)
        state = self._engine.prefill(params, row, capacity, needed_switches([settings]))
        state = state.replace(last_token=jnp.array([context.first], jnp.int32))
        if self._drafter is None:
            return state
        # Once for all rows: a draft model that has lagged since the prompt catches up.
        return state.replace(draft=jax.jit(self._catch_up)(params, state))

    def _costs(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns costs of rounds under which rows with other acceptance choose differently.

        At temperature 0 all rows accept alike, so drafts are cheap enough to be tried.
        """
        if not self._numbers or self._drafter is None:
            return None
        cost = _COST_OF_A_DRAFT if self.settings.temperature > 0 else _COST_OF_A_GREEDY_DRAFT
        one_drafter = 1 + cost * np.array(self._numbers)
        num_drafters = len(drafters_of(self._drafter.kinds))
        reading = np.full([num_drafters], _COST_OF_READING)
        return np.tile(one_drafter, (num_drafters, 1)), reading

    def _catch_up(self, params: ModelParams, state: SpecState) -> Any:
        assert self._drafter is not None
        width = self._drafter.num_draft_tokens
        inputs = RoundInputs(
            state.last_token,
            limit=lambda kind: jnp.full_like(kind, width),
            rng_keys=self._rule.noise.draft_keys(state.seed, state.target_cache.length, width),
            settings=state.settings.after(state.last_token),
            view=TargetView(params.target, make_apply(self._target.config), state.target_cache),
        )
        return self._drafter.propose(params.draft, state.draft, inputs)[1]


def first_tokens(infos: StepInfo, num_tokens: int) -> np.ndarray:
    """Returns the first tokens that each row emitted, [b num_tokens]; each has that many.

    Args:
      infos: of all rounds, [rounds b ...].
      num_tokens: how many are wanted.
    """
    blocks = np.asarray(infos.tokens).transpose(1, 0, 2)
    is_kept = np.arange(blocks.shape[2]) < np.asarray(infos.num_tokens).T[..., None]
    tokens, is_emitted = blocks.reshape(len(blocks), -1), is_kept.reshape(len(blocks), -1)
    order = np.argsort(~is_emitted, axis=1, kind="stable")[:, :num_tokens]
    assert np.take_along_axis(is_emitted, order, axis=1).all()
    return np.take_along_axis(tokens, order, axis=1)


def build_drafter(subject: Subject) -> BuiltDrafter:
    """Returns the subject's drafter, with at most two drafts a round; two if rows choose."""
    wanted = subject.num_draft_tokens
    number = _MOST_DRAFTS if isinstance(wanted, str) else min(wanted, _MOST_DRAFTS)
    models, options = (subject.target, subject.draft), subject.drafter_options
    return make_drafter(subject.drafter, make_spec(*models, subject.drafter, options, number))
