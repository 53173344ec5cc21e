"""Many independent rows of one short context, driven through the compiled rounds."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.common.errors import InputError
from jspec.common.typing import Params
from jspec.drafters import BuiltDrafter, make_drafter
from jspec.evaluation.auditing.subject import Subject
from jspec.generation.auto import AUTO, numbers_of
from jspec.generation.batch import needed_switches
from jspec.generation.engine import CostsAt, Row, make_engine
from jspec.generation.programs import make_spec
from jspec.generation.request import Settings
from jspec.models import init_cache, make_apply
from jspec.speculation.acceptance.types import AcceptanceRule
from jspec.speculation.control import drafters_of
from jspec.speculation.types import Drafter, ModelParams, SpecState, StepInfo, TargetView
from jspec.weights.resolver import LoadedModel
from jspec.weights.vocabulary import mask_padding, used_vocab_size

ALPHABET_SIZE = 4
_ROWS_A_RUN = 128
_PATHS_A_CALL = 32  # of ten tokens: few enough rows for the products of a round
_MAX_NUM_DRAFT_TOKENS = 2
_COST_OF_A_DRAFT = 0.5  # of a plain step
_COST_OF_A_GREEDY_DRAFT = 0.05
_COST_OF_READING = 0.01  # of a token that a drafter has missed


class Context(NamedTuple):
    """What the rows have in common.

    Attributes:
      prompt: token ids.
      first: the first token of every row's output, so that all others are drawn in rounds.
      alphabet: the tokens that may come.
    """

    prompt: list[int]
    first: int
    alphabet: list[int]


def choose_context(target: LoadedModel, settings: Settings) -> Context:
    """Returns a short context that repeats itself, of likely tokens that the settings allow.

    Raises:
      InputError: they allow fewer than two.
    """
    start = np.array([[used_vocab_size(target) // 2]], np.int32)
    logits = np.array(_jit_logits(target)(target.params, start)[0, -1])
    for token_id, value in dict(settings.logit_bias).items():
        logits[token_id] += value
    logits[[*target.config.eos_ids, *settings.forbidden_token_ids]] = -np.inf
    if settings.allowed_token_ids is not None:
        logits[~np.isin(np.arange(len(logits)), settings.allowed_token_ids)] = -np.inf
    best = np.argsort(-logits)[:ALPHABET_SIZE]
    alphabet = [int(i) for i in best if np.isfinite(logits[i])]
    if len(alphabet) < 2:
        raise InputError(f"expected settings that allow two tokens, got {len(alphabet)}")
    return Context([alphabet[i % len(alphabet)] for i in (0, 1, 2, 0, 1, 3)], alphabet[0], alphabet)


def path_logits(target: LoadedModel, context: Context, num_tokens: int) -> np.ndarray:
    """Returns the target's logits of the alphabet along every path through it.

    Args:
      target: whose logits.
      context: what comes before.
      num_tokens: length of the paths.

    Returns:
      [k, ..., k, num_tokens, k] with num_tokens - 1 leading axes: entry [a, b, ..., t] belongs to
      the position after t tokens of the path a, b, ...
    """
    size = len(context.alphabet)
    paths = list(itertools.product(context.alphabet, repeat=num_tokens - 1))
    blocks = np.array([[*context.prompt, context.first, *path] for path in paths], np.int32)
    begin = len(context.prompt)
    logits_of = _jit_logits(target)
    chunks = [
        np.asarray(logits_of(target.params, blocks[i : i + _PATHS_A_CALL]))[:, begin:]
        for i in range(0, len(blocks), _PATHS_A_CALL)
    ]
    chunks = [chunk[..., context.alphabet] for chunk in chunks]
    return np.concatenate(chunks).reshape(*[size] * (num_tokens - 1), num_tokens, size)


def _jit_logits(target: LoadedModel) -> Callable[[Params, np.ndarray], jax.Array]:
    """Returns a function from parameters and texts [b t] to logits: one pass, an empty cache."""
    apply = mask_padding(make_apply(target.config), target)
    dtype = target.params["embedding"].dtype

    def run(params: Params, tokens: jax.Array) -> jax.Array:
        batch_size, capacity = tokens.shape
        cache = init_cache(target.config, batch_size=batch_size, capacity=capacity, dtype=dtype)
        return apply(params, tokens, cache)[0]

    return jax.jit(run)


class Rows:
    """Compiled rounds of the subject over many rows of one context.

    Attributes:
      settings: those of every row, the alphabet included.
      num_rounds: that a run takes; every row then has at least so many tokens.
      num_draft_tokens: a round; few, so that the tokens looked at take several rounds.
      num_proposed: drafts of all rounds so far in which the target was its own.
      num_accepted: how many of them were kept.
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
          rule: in the place of the subject's, for a negative control.
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
        self._engine = make_engine(subject.target, self._drafter, self._rule, self._numbers)
        self.num_proposed = self.num_accepted = 0

    def run(
        self, num_rows: int, *, params: Params | None = None
    ) -> Iterator[tuple[np.ndarray, SpecState]]:
        """Yields the first tokens [rows num_rounds] of runs with seeds 0, 1, ..., and their states.

        Args:
          num_rows: at least so many rows in all.
          params: of the target; None takes its own.
        """
        for infos, state in self.run_infos(num_rows, params=params):
            yield first_tokens(infos, self.num_rounds), state

    def run_infos(
        self,
        num_rows: int,
        *,
        params: Params | None = None,
        settings: Settings | None = None,
        first_seed: int = 0,
    ) -> Iterator[tuple[StepInfo, SpecState]]:
        """Yields what the rounds of each run did, and the state after them.

        Args:
          num_rows: at least so many rows in all.
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
        """Returns the settings with nothing allowed but the alphabet, if it is not everything."""
        alphabet = self._context.alphabet
        if len(alphabet) == used_vocab_size(self._target):
            return dataclasses.replace(settings, logprobs=False)
        return dataclasses.replace(settings, allowed_token_ids=tuple(alphabet), logprobs=False)

    def _start(self, params: ModelParams, settings: Settings) -> SpecState:
        """Returns one row that has emitted the context's first token, its drafter caught up."""
        context = self._context
        num_slots = len(context.prompt) + 1 + self.num_rounds * (self.num_draft_tokens + 1)
        row = Row(
            settings, context.prompt, stop_ids=(), max_length=num_slots + 1, costs=self._costs()
        )
        state = self._engine.prefill(
            params, row, num_slots + self.num_draft_tokens + 1, needed_switches([settings])
        )
        state = state.replace(last_token=jnp.array([context.first], jnp.int32))
        if self._drafter is None:
            return state
        # Done once for all rows: a draft model that has lagged since the prompt catches up.
        return state.replace(draft=jax.jit(self._catch_up)(params, state))

    def _costs(self) -> CostsAt | None:
        """Returns costs of rounds under which rows of different fortunes choose differently.

        At temperature 0 all rows have the same fortune: drafts are cheap enough to be tried.
        """
        if not self._numbers or self._drafter is None:
            return None
        is_greedy = self.settings.temperature == 0
        cost = _COST_OF_A_GREEDY_DRAFT if is_greedy else _COST_OF_A_DRAFT
        one_drafter = 1 + cost * np.array(self._numbers)
        num_drafters = len(drafters_of(self._drafter.kinds))
        reading = np.full([num_drafters], _COST_OF_READING)
        return CostsAt(np.tile(one_drafter, (num_drafters, 1)), reading)

    def _catch_up(self, params: ModelParams, state: SpecState) -> Any:
        assert self._drafter is not None
        width = self._drafter.num_draft_tokens
        apply = make_apply(self._target.config)
        _, draft = self._drafter.propose(
            params.draft,
            state.draft,
            state.last_token,
            limit=lambda kind: jnp.full_like(kind, width),
            rng_keys=self._rule.noise.draft_keys(state.seed, state.target_cache.length, width),
            settings=state.settings.after(state.last_token),
            view=TargetView(params.target, apply, state.target_cache),
        )
        return draft


def first_tokens(infos: StepInfo, num_tokens: int) -> np.ndarray:
    """Returns the first tokens that each row emitted, [b num_tokens]; each has so many.

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


def _few(num_draft_tokens: int | str) -> int:
    """Returns the number of drafts a round, bounded; the bound where rows choose it themselves."""
    most = _MAX_NUM_DRAFT_TOKENS
    return most if isinstance(num_draft_tokens, str) else min(num_draft_tokens, most)


def build_drafter(subject: Subject) -> BuiltDrafter:
    """Returns the subject's drafter, of few drafts a round."""
    spec = make_spec(
        subject.target,
        subject.draft,
        subject.drafter,
        subject.drafter_options,
        _few(subject.num_draft_tokens),
    )
    return make_drafter(subject.drafter, spec)
