"""Many independent rows of one short context, driven through the compiled rounds."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.common.errors import InputError
from jspec.common.memory import tree_bytes
from jspec.common.typing import ApplyFn, Params
from jspec.drafters import BuiltDrafter, entries_of, make_drafter
from jspec.generation.auto import AUTO, numbers_of
from jspec.generation.batch import needed_switches
from jspec.generation.engine import Engine
from jspec.generation.graph_trial import check_one_graph
from jspec.generation.layout import Layout
from jspec.generation.options import make_spec
from jspec.generation.own_code import check_own_code
from jspec.generation.request import Request, SamplingParams
from jspec.generation.rows import Row
from jspec.lab.auditing.subject import Subject
from jspec.models import DecoderConfig, EncoderConfig, init_cache, make_apply
from jspec.models.encoder_decoder import init_source, read_alike
from jspec.speculation.control import drafters_of
from jspec.speculation.types import (
    AcceptanceRule,
    Drafter,
    ModelParams,
    RoundInputs,
    SpecState,
    StepInfo,
    TargetView,
)
from jspec.weights.resolver import LoadedModel
from jspec.weights.vocabulary import mask_padding, used_vocab_size

_ALPHABET_SIZE = 4
_ROWS_A_RUN = 128
_SOURCE_BYTES = 2**30  # of the sources of all rows that run at once
_MOST_DRAFTS = 2
_COST_OF_A_DRAFT, _COST_OF_A_CHEAP_DRAFT = 0.5, 0.05  # in plain steps
_SOURCE_TOKENS = 5  # of an encoder-decoder's source
_COST_OF_READING = 0.01  # of a token that a drafter has missed, in plain steps


class Context(NamedTuple):
    """What the rows have in common.

    Attributes:
      prompt: token ids.
      first: the first token of every row's output, so that all others are drawn in rounds.
      alphabet: the only tokens that may follow.
    """

    prompt: list[int]
    first: int
    alphabet: list[int]


def choose_context(target: LoadedModel, settings: SamplingParams) -> Context:
    """Returns a short context that repeats itself, of likely tokens that the settings allow."""
    start = np.array([[used_vocab_size(target) // 2]], np.int32)
    logits = np.array(jit_logits(target)(target.params, start)[0, -1])
    for token_id, value in dict(settings.logit_bias).items():
        logits[token_id] += value
    logits[[*target.config.eos_ids, *settings.forbidden_token_ids]] = -np.inf
    if settings.allowed_token_ids is not None:
        logits[~np.isin(np.arange(len(logits)), settings.allowed_token_ids)] = -np.inf
    best = np.argsort(-logits)[:_ALPHABET_SIZE]
    alphabet = [int(i) for i in best if np.isfinite(logits[i])]
    if len(alphabet) < 2:
        raise InputError(f"expected settings that allow two tokens, got {len(alphabet)}")
    return Context([alphabet[i % len(alphabet)] for i in (0, 1, 2, 0, 1, 3)], alphabet[0], alphabet)


def jit_logits(target: LoadedModel) -> Callable[[Params, np.ndarray], jax.Array]:
    """Returns a function from parameters and texts [b t] to logits: one pass, an empty cache."""
    config, dtype = target.own_config, target.params["embedding"].dtype
    apply = mask_padding(make_apply(config), target)

    def run(params: ModelParams, tokens: jax.Array) -> jax.Array:
        batch_size, capacity = tokens.shape
        cache = init_cache(config, batch_size=batch_size, capacity=capacity, dtype=dtype)
        if (source := audited_source(config)) is not None:
            constants = read_alike(config, params.target, source, batch_size, dtype)
            cache = cache.replace(source=constants)
        return apply(params.target, tokens, cache)[0]

    program = jax.jit(Layout.of(target).spread(run))
    return lambda params, tokens: program(ModelParams(params, None), tokens)


def audited_source(config: DecoderConfig) -> np.ndarray | None:
    """Returns what the encoder reads of all rows; None of a decoder alone."""
    encoder = config.encoder
    if encoder is None:
        return None
    if encoder.is_audio:
        return _noise(encoder, 0)
    return config.vocab_size // 2 + np.arange(_SOURCE_TOKENS)


def make_request(target: LoadedModel, prompt: list[int], settings: SamplingParams) -> Request:
    """Returns a request with a prompt; a model that hears gets a noise of this prompt's own."""
    encoder = target.config.encoder
    if encoder is None or not encoder.is_audio:
        return Request(prompt, settings)
    return Request(prompt, settings, source=_noise(encoder, prompt))


def _noise(encoder: EncoderConfig, seed: int | Sequence[int]) -> np.ndarray:
    shape = 2 * encoder.max_len, encoder.num_mels
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def rows_at_once(target: LoadedModel, most: int) -> int:
    """Returns how many rows run at once: fewer where the source of each takes much memory."""
    config, dtype = target.config, target.params["embedding"].dtype
    if config.encoder is None:
        return most
    of_one = tree_bytes(jax.eval_shape(lambda: init_source(config, 1, dtype)))
    return max(1, min(most, _SOURCE_BYTES // of_one))


class Rows:
    """Compiled rounds of a subject over many rows of one context.

    Attributes:
      subject: what is audited.
      context: of all rows.
      settings: of every row, the alphabet included.
      num_rounds: of a run; every row then has at least this many tokens.
      num_draft_tokens: drafts a round; few, so that the tokens looked at take several rounds.
      drafter: what drafts; None for plain decoding.
      draft_params: its parameters.
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
        around: Callable[[ApplyFn], ApplyFn] = lambda apply: apply,
    ) -> None:
        """Prepares the programs; nothing is compiled yet.

        For a negative control `rule` and `drafter` replace the subject's, and `around` changes the
        target's ApplyFn; such a drafter gets the parameters of the subject's.
        """
        self.subject, self.context, self.num_rounds = subject, context, num_rounds
        self._rows_per_run = rows_at_once(subject.target, rows_per_run)
        self.settings = self._with_alphabet(subject.settings)
        built = build_drafter(subject)
        self.drafter = drafter or built.drafter
        self._rule = rule or subject.rule
        self.num_draft_tokens, self._numbers = 0, ()
        if self.drafter is not None:
            self.num_draft_tokens = self.drafter.num_draft_tokens
            if subject.num_draft_tokens == AUTO:
                self._numbers = numbers_of(self.drafter)
        check_one_graph()
        self._engine = Engine(
            subject.target, self.drafter, self._rule, self._numbers, built.params, around
        )
        self.draft_params = self._engine.layout.place(built.params)
        self.num_proposed = self.num_accepted = 0

    def run(
        self,
        num_rows: int,
        *,
        params: Params | None = None,
        settings: SamplingParams | None = None,
        first_seed: int = 0,
    ) -> Iterator[tuple[StepInfo, SpecState]]:
        """Yields what the rounds of each run did, and the state after them, for `num_rows` or more.

        `params` and `settings` replace the target's and the subject's. The rows' seeds are
        `first_seed` and the numbers after it.
        """
        params_of_both = ModelParams(params or self.subject.target.params, self.draft_params)
        start = self._start(params_of_both, self._with_alphabet(settings or self.settings))
        for first in range(first_seed, first_seed + num_rows, self._rows_per_run):
            state = jax.tree.map(lambda leaf: jnp.repeat(leaf, self._rows_per_run, axis=0), start)
            seeds = jnp.arange(first, first + self._rows_per_run, dtype=jnp.uint32)
            state, infos = self._engine.run(
                params_of_both, state.replace(seed=seeds), self.num_rounds
            )
            if params is None:
                self.num_proposed += int(infos.num_proposed.sum())
                self.num_accepted += int(infos.num_accepted.sum())
            yield infos, state

    def _with_alphabet(self, settings: SamplingParams) -> SamplingParams:
        if len(self.context.alphabet) < used_vocab_size(self.subject.target):
            allowed = tuple(self.context.alphabet)
            settings = dataclasses.replace(settings, allowed_token_ids=allowed)
        return dataclasses.replace(settings, logprobs=False)

    def _start(self, params: ModelParams, settings: SamplingParams) -> SpecState:
        """Returns one row that has emitted the context's first token, its drafter caught up."""
        prompt = self.context.prompt
        num_slots = len(prompt) + 1 + self.num_rounds * (self.num_draft_tokens + 1)
        costs, capacity = self._costs(), num_slots + self.num_draft_tokens + 1
        source = audited_source(self.subject.target.config)
        row = Row(settings, prompt, (), max_length=num_slots + 1, costs=costs, source=source)
        state = self._engine.prefill(params, row, capacity, needed_switches([settings]))
        state = state.replace(last_token=jnp.array([self.context.first], jnp.int32))
        if self.drafter is None:
            return state
        # Once for all rows: a draft model that has lagged since the prompt catches up.
        return jax.jit(self._engine.layout.spread(self._catch_up))(params, state)

    def _costs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Returns costs of rounds under which rows with other acceptance choose differently."""
        if not self._numbers or self.drafter is None:
            return None
        # At temperature 0 all rows accept alike, and a tree is drafted whole: both only if cheap.
        is_cheap = self.settings.temperature == 0 or self.drafter.tree_depth
        cost = _COST_OF_A_CHEAP_DRAFT if is_cheap else _COST_OF_A_DRAFT
        num_drafters = len(drafters_of(self.drafter.kinds))
        calls = np.tile(1 + cost * np.array(self._numbers), (num_drafters, 1))
        return calls, calls, np.full([num_drafters], _COST_OF_READING)

    def _catch_up(self, params: ModelParams, state: SpecState) -> SpecState:
        assert self.drafter is not None
        width, apply = self.drafter.num_draft_tokens, make_apply(self.subject.target.own_config)
        inputs = RoundInputs(
            state.last_token,
            limit=lambda kind: jnp.full_like(kind, width),
            rng_keys=self._rule.noise.draft_keys(state.seed, state.target_cache.length, width),
            settings=state.settings.after(state.last_token),
            view=TargetView(params.target, apply, state.target_cache),
        )
        return state.replace(draft=self.drafter.propose(params.draft, state.draft, inputs)[1])


def first_tokens(infos: StepInfo, num_tokens: int) -> np.ndarray:
    """Returns the first tokens that each row emitted, [b num_tokens]; each has that many.

    `infos` are those of all rounds, [rounds b ...].
    """
    blocks = np.asarray(infos.tokens).transpose(1, 0, 2)
    is_text = np.arange(blocks.shape[2]) < np.asarray(infos.num_tokens).T[..., None]
    tokens, is_emitted = blocks.reshape(len(blocks), -1), is_text.reshape(len(blocks), -1)
    order = np.argsort(~is_emitted, axis=1, kind="stable")[:, :num_tokens]
    assert np.take_along_axis(is_emitted, order, axis=1).all()
    return np.take_along_axis(tokens, order, axis=1)


def build_drafter(subject: Subject) -> BuiltDrafter:
    """Returns the subject's drafter, with at most two drafts a round; two if rows choose.

    A tree keeps all of its drafts: fewer would be another tree.

    Raises:
      InputError: it or the rule is the user's, and wrong; see `check_own_code`.
    """
    wanted = subject.num_draft_tokens
    number = _MOST_DRAFTS if isinstance(wanted, str) else min(wanted, _MOST_DRAFTS)
    if subject.has_tree and not isinstance(wanted, str):
        number = wanted
    models, options = (subject.target, subject.draft), subject.drafter_options
    built = make_drafter(subject.drafter, make_spec(*models, subject.drafter, options, number))
    entries = entries_of(subject.drafter)
    check_own_code(entries, built, subject.acceptance, subject.rule, subject.target)
    return built
