"""Drives the core as the Generator does, with nothing around it."""

import contextlib
import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jspec.generation.batch import needed_switches
from jspec.sampling.noise import Purpose, round_keys
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.acceptance import get_rule
from jspec.speculation.plain import plain_step, prefill_chunk, run_rounds
from jspec.speculation.round import speculative_step
from jspec.speculation.types import ModelParams, RoundInputs, SpecState, StepInfo, TargetView

PROMPT_WIDTH = 16
# Halves the time to compile, which is nearly all the time of these tests. What the optimised
# program says is tested through the Generator.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclasses.dataclass
class Result:
    """What a run gave.

    Attributes:
      tokens: the emitted ones of each row, the first of which the prefill drew.
      infos: of all rounds, arrays [rounds b ...].
      state: after the last round.
    """

    tokens: list[list[int]]
    infos: StepInfo
    state: SpecState

    @property
    def num_accepted(self) -> np.ndarray:
        """Accepted drafts, [rounds b]."""
        return self.infos.num_accepted


def _shared(build):
    """Returns the function, called once for equal arguments, or each time if they have no hash."""
    cached = functools.lru_cache(maxsize=64)(build)

    def call(*args):
        try:
            hash(args)
        except TypeError:
            return build(*args)
        return cached(*args)

    call.forget = cached.cache_clear
    return call


@_shared
def _compile_prefill(apply, drafter):
    """Returns the compiled prefill, which knows no rule."""
    prefill = functools.partial(prefill_chunk, target=apply, drafter=drafter)
    return jax.jit(prefill, compiler_options=QUICK)


@_shared
def _compile_plain(apply, max_rounds):
    """Returns the compiled rounds of plain decoding."""
    step = functools.partial(plain_step, target=apply)
    rounds = functools.partial(run_rounds, step=step, max_rounds=max_rounds)
    return step, jax.jit(rounds, compiler_options=QUICK)


@contextlib.contextmanager
def compiled_anew():
    """Has engines share no program with those before or after: for a mistake put into jspec."""
    for compiled in (_compile_prefill, _compile_plain):
        compiled.forget()
    yield
    for compiled in (_compile_prefill, _compile_plain):
        compiled.forget()


class Engine:
    """Compiled prefill and rounds of one target, drafter and rule.

    Equal drafters share their prefill, and all plain decoding of a target is one program.
    """

    def __init__(
        self, apply, empty_cache, params, drafter=None, rule="rejection", *, capacity=96,
        max_rounds=96, step=speculative_step,
    ):  # fmt: skip
        self.params = params if isinstance(params, ModelParams) else ModelParams(*params)
        self.drafter, self.empty_cache, self.capacity = drafter, empty_cache, capacity
        self.max_rounds = max_rounds
        self.prefill = _compile_prefill(apply, drafter)
        if drafter is None:
            self.step, self.rounds = _compile_plain(apply, max_rounds)
            return
        rule = get_rule(rule) if isinstance(rule, str) else rule
        self.step = functools.partial(step, target=apply, drafter=drafter, rule=rule)
        self.rounds = jax.jit(
            functools.partial(run_rounds, step=self.step, max_rounds=max_rounds),
            compiler_options=QUICK,
        )

    def with_params(self, *params):
        """Returns the same compiled programs over other parameters."""
        copied = copy.copy(self)
        copied.params = ModelParams(*params)
        return copied

    def start(
        self, prompts, *, seeds=None, temperature=0.0, draft_temperature=None, max_length=10**6,
        stop_ids=(),
    ):  # fmt: skip
        """Returns the state after prefill; scalars serve every row."""
        b = len(prompts)
        tokens = np.zeros([b, PROMPT_WIDTH], np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        if draft_temperature is None:
            draft_temperature = temperature
        stops = np.full([b, 2], -1, np.int32)
        stops[:, : len(stop_ids)] = stop_ids
        draft = None if self.drafter is None else self.drafter.init(b, self.capacity)
        max_length = np.broadcast_to(np.asarray(max_length, np.int32), b)
        state = SpecState(
            target_cache=self.empty_cache(b, self.capacity),
            draft=draft,
            last_token=jnp.asarray(np.zeros(b, np.int32)),
            seed=jnp.asarray(np.arange(b) if seeds is None else seeds, jnp.uint32),
            settings=settings_of(b, temperature),
            draft_temperature=jnp.asarray(np.broadcast_to(np.float32(draft_temperature), b)),
            stop_ids=jnp.asarray(stops),
            max_length=jnp.asarray(np.minimum(max_length, self.capacity)),
            is_done=jnp.asarray(np.zeros(b, bool)),
        )
        counts = jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)
        return self.prefill(self.params, state, jnp.asarray(tokens), counts)[0]

    def advance(self, state, num_rounds):
        """Runs at most so many rounds; returns the state and their infos alone."""
        state, infos, count = self.rounds(self.params, state, jnp.int32(num_rounds))
        return state, jax.tree.map(lambda leaf: np.asarray(leaf)[: int(count)], infos)

    def generate(self, prompts, *, rounds_per_call=None, **options) -> Result:
        """Runs until every row is done or the engine's rounds are over."""
        state = self.start(prompts, **options)
        tokens = [[token] for token in state.last_token.tolist()]
        chunks, total = [], 0
        while not chunks or (not bool(state.is_done.all()) and total < self.max_rounds):
            state, infos = self.advance(state, rounds_per_call or self.max_rounds)
            chunks.append(infos)
            total += len(infos.num_tokens)
        infos = jax.tree.map(lambda *leaves: np.concatenate(leaves), *chunks)
        for row, emitted in enumerate(tokens):
            emitted.extend(emitted_in_row(infos, row))
        return Result(tokens, infos, state)


NO_TARGET = TargetView(None, lambda: None, None)


def inputs_of(last, limit, width, *, seeds=0, temperature=0.0, position=0, **fields):
    """Returns what a drafter is given in a round.

    Args:
      last: each row's newest token.
      limit: each row's number of drafts, or that of all.
      width: drafts with a key of their own.
      seeds: of each row, or of all.
      temperature: likewise; `settings` may be given in its place.
      position: of the round.
      fields: others of `RoundInputs`.
    """
    last = jnp.asarray(last, jnp.int32)
    seeds = jnp.broadcast_to(jnp.asarray(seeds).astype(jnp.uint32), last.shape)
    positions = jnp.broadcast_to(jnp.asarray(position, jnp.int32), last.shape)
    keys = round_keys(seeds, positions, Purpose.DRAFT, width)
    fields = {"settings": settings_of(len(last), temperature), "view": NO_TARGET} | fields
    return RoundInputs(last, lambda kind: 0 * kind + limit, keys, **fields)


@_shared
def _compile_propose(drafter, apply):
    """Returns the compiled proposal."""

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(params, state, last, limit, seeds, settings, view, is_free):
        fields = {"settings": settings, "view": TargetView(view[0], apply, view[1])}
        width = drafter.num_draft_tokens
        inputs = inputs_of(last, limit, width, seeds=seeds, is_free=is_free, **fields)
        return drafter.propose(params, state, inputs)

    return run


def propose(
    pair, drafter, params, state, last, limit=99, temperature=0.0, *, settings=None, cache=None,
    seeds=0, is_free=False,
):  # fmt: skip
    """Returns what a drafter proposes, and its state.

    Args:
      pair: with the target and its apply; None for a drafter that does not look at them.
      drafter: it.
      params: its own.
      state: before.
      last: each row's newest token.
      limit: each row's number of drafts, or that of all.
      temperature: of all rows.
      settings: in its place.
      cache: the target's, where the drafter looks at it.
      seeds: of each row, or of all.
      is_free: of each row, or of all.
    """
    settings = settings_of(len(last), temperature) if settings is None else settings
    last, limit, seeds = (np.asarray(x, np.int32) for x in (last, limit, seeds))
    run = _compile_propose(drafter, None if pair is None else pair.apply)
    view = None if pair is None else pair.target, cache
    limit, is_free = np.broadcast_to(limit, last.shape), np.broadcast_to(is_free, last.shape)
    return run(params, state, last, limit, seeds, settings, view, is_free)


def drafts_of(proposal):
    """Returns each row's drafts."""
    pairs = zip(proposal.tokens.tolist(), proposal.num_tokens.tolist(), strict=True)
    return [tokens[:count] for tokens, count in pairs]


def emitted_in_row(infos, row):
    """Returns the tokens that one row emitted in those rounds."""
    return [
        int(token)
        for tokens, count in zip(infos.tokens[:, row], infos.num_tokens[:, row], strict=True)
        for token in tokens[:count]
    ]


def settings_of(batch_size, temperature):
    """Returns settings without filters; the temperature may be one a row."""
    return SamplingSettings(
        temperature=jnp.asarray(np.broadcast_to(np.float32(temperature), batch_size)),
        top_k=jnp.asarray(np.zeros(batch_size, np.int32)),
        top_p=jnp.asarray(np.ones(batch_size, np.float32)),
        min_p=jnp.asarray(np.zeros(batch_size, np.float32)),
    )


def request_settings(settings, prompts, vocab_size, switches=None):
    """Returns the settings of rows with those prompts, with the processors.

    Args:
      settings: the user's, the same for every row.
      prompts: token ids of each row.
      vocab_size: of the logits.
      switches: what is compiled in; None takes what the settings need.
    """
    switches = needed_switches([settings]) if switches is None else switches
    distinct = list(dict.fromkeys(map(tuple, prompts)))
    states = [
        tuple(
            processor.init(settings, prompt=list(prompt), stop_ids=[], vocab_size=vocab_size)
            for processor in switches.processors
        )
        for prompt in distinct
    ]
    place = {prompt: index for index, prompt in enumerate(distinct)}
    rows = np.array([place[tuple(prompt)] for prompt in prompts])
    states = jax.tree.map(
        lambda *leaves: jnp.asarray(np.stack([np.asarray(leaf) for leaf in leaves])[rows]), *states
    )
    return settings_of(len(prompts), settings.temperature).replace(
        top_k=jnp.full([len(prompts)], settings.top_k, jnp.int32),
        top_p=jnp.full([len(prompts)], settings.top_p, jnp.float32),
        min_p=jnp.full([len(prompts)], settings.min_p, jnp.float32),
        states=states,
        switches=switches,
    )


def assert_committed_equal(cache, fresh, *, atol=6e-5):
    """Asserts that the committed slots of `cache` hold what `fresh` holds there.

    Few rows and many may be summed in different orders; a wrong slot is off by about 1.
    """
    length = np.asarray(cache.length)
    for ours, theirs in zip(cache.keys + cache.values, fresh.keys + fresh.values, strict=True):
        slots = min(ours.shape[2], theirs.shape[2])  # a drafter of trees has more of them
        assert (length <= slots).all()
        committed = np.arange(slots) < length[:, None]
        ours, theirs = (np.asarray(leaf)[:, :, :slots] for leaf in (ours, theirs))
        difference = np.abs(ours - theirs).max(axis=(1, 3))
        assert (difference[committed] <= atol).all(), np.argwhere((difference > atol) & committed)
