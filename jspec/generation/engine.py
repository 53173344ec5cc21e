"""The compiled programs of one target and one drafter: where jit begins and ends."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jspec import kernels
from jspec.common import processes
from jspec.common.errors import InputError
from jspec.common.timing import compile_clock
from jspec.common.typing import ApplyFn, Params
from jspec.common.user_cache import compile_listeners
from jspec.generation.layout import Layout
from jspec.generation.rows import Row, capacity_for, empty_state, finish_row, with_request
from jspec.models import make_apply
from jspec.models.encoder_decoder import encode, make_source
from jspec.sampling.distribution import TokenLogprobs
from jspec.sampling.settings import Switches
from jspec.speculation.acceptance import RULES, get_rule
from jspec.speculation.beam import BeamInfo, BeamState, beam_round
from jspec.speculation.budget import CallSize, call_sizes
from jspec.speculation.plain import plain_step, prefill_chunk, run_rounds
from jspec.speculation.round import reads_logits, speculative_step, with_whole_logits
from jspec.speculation.types import (
    AcceptanceRule,
    Drafter,
    ModelParams,
    SourceView,
    SpecState,
    StepInfo,
)
from jspec.weights.resolver import LoadedModel
from jspec.weights.vocabulary import mask_padding

MAX_ROUNDS_PER_VISIT = 32
_VISIT_SECONDS = 0.04  # text comes 25 times a second
_DRAFTS_OF_BEAMS = 2
_SHORTEST_SOURCE = 64  # to which shorter ones are padded, in tokens
_LARGE = "jit_prefill_chunk", "jit_run_rounds"  # the others take next to no time


class Engine:
    """The programs: an empty state, a chunk of prefill, a row's insertion and end, many rounds.

    Prompts, seeds, temperatures and limits are data. A new program is compiled only for another
    capacity, batch size or set of switches.

    Attributes:
      apply: the target's ApplyFn, padding of its vocabulary masked; its logits are whole.
      drafter: the drafter; None for plain decoding.
      rule: the acceptance rule.
      is_lossless: whether the rule is.
      is_coupled: whether a row's tokens do not depend on its drafts at any temperature.
      numbers: numbers of drafts among which each row chooses; empty if the number is fixed.
      num_draft_tokens: maximum number of drafts a round; 0 for plain decoding.
      empty_state: (batch_size, capacity, switches) -> a state whose rows are done.
      insert: (state, row, prefilled) -> the state with a row replaced by a prefilled row.
      finish: (state, row) -> the state with a row done, for an end that only the host can see.
      layout: on which devices all of it runs.
    """

    def __init__(
        self,
        target: LoadedModel,
        drafter: Drafter | None,
        rule: AcceptanceRule,
        numbers: Sequence[int] = (),
        draft_params: Params = None,
        around: Callable[[ApplyFn], ApplyFn] = lambda apply: apply,
    ) -> None:
        """Prepares the programs; nothing is compiled yet. `numbers` rise from 0.

        Of the drafter's parameters only their places on a mesh are read. `around` changes the
        target's ApplyFn: a negative control's is wrong.

        Raises:
          InputError: a drafter of trees, and a rule for chains; of drawn ones, and a number that
            varies.
        """
        if drafter is not None and drafter.tree_depth > 0:
            _check_trees(rule, drafter, numbers)
        self.layout = layout = Layout.of(target, draft_params)
        shard = dataclasses.replace(target, config=target.own_config)
        apply = around(mask_padding(make_apply(shard.config, has_split_logits=True), target))
        self.apply = with_whole_logits(apply)
        self.drafter, self.numbers = drafter, tuple(numbers)
        self.rule, self.is_lossless = rule, rule.is_lossless
        self.is_coupled = rule.noise.is_shared and rule.is_lossless
        self.num_draft_tokens = 0 if drafter is None else drafter.num_draft_tokens

        def step(params: ModelParams, state: SpecState) -> tuple[SpecState, StepInfo]:
            if drafter is None:
                return plain_step(params, state, target=apply)
            speculate = functools.partial(speculative_step, target=apply, drafter=drafter)
            count = len(state.last_token)
            widths, sizes = self.widths(count), self.call_sizes(count, state.settings.switches)
            return speculate(params, state, rule=rule, widths=widths, sizes=sizes)

        self._config, self._fallback = shard.config, kernels.Fallback()
        self._widths_of_chunks = kernels.chunk_widths(target.params["embedding"])

        # The jit boundary. The arguments of `empty_state` are shapes, and therefore static; nothing
        # else is. Every other program donates the state that it takes, so that the caches, by far
        # the largest arrays after the weights, are written in place. Parameters, and the prefilled
        # row that `insert` copies from, are not donated: the caller still holds them.
        donated, self._options = functools.partial(jax.jit, donate_argnums=1), kernels.run_options()
        empty = layout.make(functools.partial(empty_state, shard, drafter, self.numbers))
        self.empty_state = jax.jit(empty, static_argnums=(0, 1, 2))
        prefill = functools.partial(prefill_chunk, target=apply, drafter=drafter)
        self._prefill = donated(layout.spread(prefill, lambda state, rows: (state, rows)))
        self.insert = jax.jit(layout.insert, donate_argnums=0)
        self._run = donated(
            layout.spread(_rounds_of(step), layout.stacked), compiler_options=self._options
        )
        self.finish = jax.jit(layout.at_row(finish_row), donate_argnums=0)

    def widths(self, batch_size: int) -> tuple[int, ...]:
        """Returns the widths, besides a full proposal's, for which a verify call is compiled."""
        # Each is a program of the whole target, which takes a GPU's compiler half a minute.
        if kernels.is_as_fast_as_one(batch_size * (self.num_draft_tokens + 1)):
            return ()
        may_be_silent = self.drafter is not None and self.drafter.may_be_silent
        return self.numbers or (0,) * may_be_silent

    def call_sizes(self, batch_size: int, switches: Switches) -> tuple[CallSize, ...]:
        """Returns the verify calls in which the blocks of the rows lie side by side.

        Where rows do not choose numbers, draft trees, or are read from copies there are none: then
        calls have `widths`.
        """
        drafter, config = self.drafter, self._config
        is_chosen = drafter is not None and drafter.tree_depth == 0 and bool(self.numbers)
        # Attention with a cap, or to an encoder's outputs, would copy each token's row.
        has_copies = config.attention_softcap is not None or config.encoder is not None
        is_in_place = not has_copies and kernels.reads_rows_in_place(config.head_dim)
        if batch_size == 1 or not is_chosen or not is_in_place or self.layout.mesh is not None:
            return ()
        return call_sizes(batch_size, self.numbers, reads_logits=reads_logits(switches, drafter))

    def capacity_for(self, max_length: int) -> int:
        """Returns the slots of a cache for rows of at most `max_length` tokens."""
        return capacity_for(max_length, self.num_draft_tokens + 1)

    def await_kernels(self, params: ModelParams, make_state: Callable[[], Any]) -> None:
        """Has what computes rounds chosen, where kernels compete: a trial, if there was none.

        Of the state shapes are enough.
        """
        kernels.await_choices(lambda: self._run.eval_shape(params, make_state(), np.int32(0)))

    def state_bytes(self, batch_size: int, capacity: int, switches: Switches) -> int:
        """Returns the size of an empty state in bytes, without making it."""
        return self.layout.num_bytes(self.empty_state.eval_shape(batch_size, capacity, switches))

    def temporary_bytes(self, batch_size: int, capacity: int) -> int:
        """Returns about how much programs need beside parameters and states; seldom too little.

        One layer's scores of attention, in float32 and rounded, which some kernels never write, its
        mask and its activations; logits, distributions and noise of a round. Not the weights that
        XLA makes float32 on a CPU without the C++.
        """
        config = self._config
        width = kernels.CHUNK if self.drafter is not None else 1  # in which drafters read on
        tokens = max(self._widths_of_chunks.wide, batch_size * width)
        scores = (8 * config.num_heads + 1) * capacity
        activations = 16 * (config.embed_dim + config.hidden_dim)
        logits = batch_size * (self.num_draft_tokens + 1) * config.vocab_size
        return self.layout.num_sharing * (tokens * (scores + activations) + 16 * logits)

    def chunks(self, num_tokens: int, *, widest: int | None = None) -> list[tuple[int, int]]:
        """Returns the calls that read a prompt: each call's first token and its width in tokens.

        With `widest`, if given, no call is wider than that and every wide call is full, so that
        more of what prompts have in common lies in full chunks. It may take a few more calls.
        """
        narrow, wide, fewest = self._widths_of_chunks
        if widest is not None:
            fewest = wide = wide if wide <= widest else narrow
        calls, begin = [], 0
        while begin < num_tokens:
            width = wide if num_tokens - begin >= fewest else narrow
            calls.append((begin, width))
            begin += width
        return calls

    @functools.cached_property
    def _read_source(self) -> Any:
        """The program that reads the source of one row; only encoder-decoders have it."""
        config, drafter = self._config, self.drafter

        def read(
            params: ModelParams, state: SpecState, inputs: jax.Array, length: jax.Array
        ) -> SpecState:
            cache, draft, dtype = state.target_cache, state.draft, state.target_cache.keys[0].dtype
            outputs = encode(config, params.target, inputs, length)
            constants = make_source(config, params.target, outputs, length, dtype)
            if drafter is not None:
                view = SourceView(inputs, length, outputs, constants)
                draft = drafter.read_source(params.draft, draft, view)
            return state.replace(target_cache=cache.replace(source=constants), draft=draft)

        return jax.jit(read, donate_argnums=1)

    def read_source(self, params: ModelParams, state: SpecState, row: Row) -> SpecState:
        """Reads a row's source, if any, into a state of one row, which is donated."""
        encoder, source = self._config.encoder, row.source
        if encoder is None or source is None:
            return state
        # Texts are padded to few lengths; sound always has the same length.
        length = len(source) // 2 if encoder.is_audio else len(source)
        if not encoder.is_audio:
            room = max(_SHORTEST_SOURCE, 1 << (length - 1).bit_length())
            source = np.pad(source, (0, min(room, encoder.max_len) - length)).astype(np.int32)
        with kernels.explained_failures():
            return self._read_source(params, state, source[None], np.array([length], np.int32))

    @functools.cached_property
    def begin_beams(self) -> Any:
        """The program that begins a search; see `BeamState.begin`."""
        sizes = "num_beams", "num_candidates", "max_steps"
        return jax.jit(self.layout.begin_beams, static_argnames=sizes)

    @functools.cached_property
    def _search(self) -> Any:
        def search(params: ModelParams, state: BeamState) -> tuple[BeamState, BeamInfo]:
            return beam_round(
                params,
                state,
                target=self.apply,
                drafter=self.drafter,
                widths=self.widths(len(state.last_token)),
                # Beams have no control: where rows choose, they have a usual number.
                most_drafts=min(_DRAFTS_OF_BEAMS, self.num_draft_tokens) if self.numbers else None,
            )

        run = self.layout.spread(_rounds_of(search), self.layout.stacked)
        return jax.jit(run, donate_argnums=1, compiler_options=self._options)

    def widths_of(self, num_tokens: int) -> frozenset[int]:
        """Returns the widths of the chunks of a prompt of this length: each has its program."""
        return frozenset(width for _, width in self.chunks(num_tokens))

    @property
    def warm_up_length(self) -> int:
        """Tokens of a prompt with chunks of every width, full ones and a last one that is not."""
        narrow, wide, _ = self._widths_of_chunks
        return narrow + wide + 1

    def begin(self, row: Row, capacity: int, switches: Switches) -> SpecState:
        """Returns a state of one row that has a request, and has read nothing of its prompt."""
        return self.put_request(self.empty_state(1, capacity, switches), row)

    @property
    def keeps_answers(self) -> bool:
        """Whether the drafter looks up earlier answers, which its parameters hold."""
        return self.drafter is not None and self.drafter.keeps_answers

    def remember(self, params: ModelParams, token_ids: Sequence[int]) -> ModelParams:
        """Returns the parameters of the next rounds, which may look up an answer that has ended."""
        if not self.keeps_answers:
            return params
        from jspec.drafters.corpus import remember  # few drafters do

        return params._replace(draft=self.layout.place(remember(params.draft, token_ids)))

    def forget(self, params: ModelParams) -> ModelParams:
        """Returns the parameters without the answers that were remembered."""
        if not self.keeps_answers:
            return params
        from jspec.drafters.corpus import forget

        return params._replace(draft=self.layout.place(forget(params.draft)))

    def put_request(self, state: SpecState, row: Row) -> SpecState:
        """Returns an empty state of one row with a request in it."""
        return with_request(state, row, self._config.vocab_size)

    def read(
        self, params: ModelParams, state: SpecState, prompt: Sequence[int], begin: int, width: int,
        *, has_scores: bool = False,
    ) -> tuple[SpecState, TokenLogprobs | None]:  # fmt: skip
        """Reads one of a prompt's `chunks`; the state that is passed is donated.

        With scores, the log-probabilities of the next tokens, [1 width], are returned, too.
        """
        tokens, following = np.zeros([2, 1, width], np.int32)
        for array, first in ((tokens, begin), (following, begin + 1)):
            array[0, : len(prompt) - first] = prompt[first : first + width]
        num_tokens = np.array([min(width, len(prompt) - begin)], np.int32)
        scored = following if has_scores else None
        with kernels.explained_failures():
            return self._fallback.run(self._prefill, params, state, tokens, num_tokens, scored)

    def is_read_into(self, params: ModelParams, state: SpecState) -> list[bool]:
        """Returns of each leaf of a state of one row whether reading a chunk may change it.

        Shapes in place of arrays are enough: nothing is computed.
        """
        width = self._widths_of_chunks.narrow
        tokens, count = np.zeros([1, width], np.int32), np.ones([1], np.int32)
        program = self.layout.program_in(self._prefill.trace(params, state, tokens, count))
        # What a program hands on untouched is the same variable before and after.
        before = program.invars[len(jax.tree.leaves(params)) :]
        return [
            after is not earlier for after, earlier in zip(program.outvars, before, strict=False)
        ]

    def prefill(
        self, params: ModelParams, row: Row, capacity: int, switches: Switches, num_unread: int = 0
    ) -> SpecState:
        """Returns a state of one row that has read the prompt and drawn its first token.

        The prompt's last `num_unread` tokens are left out.
        """
        prompt = row.prompt[: len(row.prompt) - num_unread]
        state = self.read_source(params, self.begin(row, capacity, switches), row)
        for begin, width in self.chunks(len(prompt)):
            state, _ = self.read(params, state, prompt, begin, width)
        return state

    def run(
        self, params: ModelParams, state: SpecState, num_rounds: int
    ) -> tuple[SpecState, StepInfo]:
        """Runs rounds until `num_rounds`, at most `MAX_ROUNDS_PER_VISIT`, or all rows are done.

        Returns:
          The next state, on the device; the one that was passed is donated. And the infos of the
          rounds that were run, on the host, [rounds b ...].
        """
        with kernels.explained_failures():
            state, *results = self._fallback.run(self._run, params, state, np.int32(num_rounds))
            return state, self._fetch(*results)

    def _fetch(self, infos: Any, counts: jax.Array) -> Any:
        # Rows of a mesh end their rounds by themselves; in a round that was not run no row emits.
        # Of other processes' rows each must know the tokens: they decide alike what comes next.
        infos, counts = processes.fetch((infos, counts))
        return jax.tree.map(lambda leaf: leaf[: counts.max()], infos)

    def search(self, params: ModelParams, state: BeamState) -> tuple[BeamState, BeamInfo, bool]:
        """Runs at most `MAX_ROUNDS_PER_VISIT` rounds of a beam search; see `run`.

        The last result is whether the search is over.
        """
        with kernels.explained_failures():
            most = np.int32(MAX_ROUNDS_PER_VISIT)
            state, *results = self._fallback.run(self._search, params, state, most)
            return state, self._fetch(*results), bool(jax.device_get(state.is_done))


def _rounds_of(step: Any) -> Any:
    """Returns the program of many rounds; its count of them is an array [1], one a shard."""

    def run(params: ModelParams, state: Any, num_rounds: jax.Array) -> Any:
        rounds = functools.partial(run_rounds, step=step, max_rounds=MAX_ROUNDS_PER_VISIT)
        state, infos, count = rounds(params, state, num_rounds)
        return state, infos, count[None]

    return run


def _check_trees(rule: AcceptanceRule, drafter: Drafter, numbers: Sequence[int]) -> None:
    """Checks that a rule knows the trees of a drafter; and a number that varies, scores.

    Raises:
      InputError: if not.
    """
    if rule.tree is None:
        able = [name for name in RULES if get_rule(name).tree is not None]
        raise InputError(
            f"expected an acceptance rule for trees ({', '.join(able)}) with tree_depth, got one "
            "for chains"
        )
    chains = {kind.drafter for kind in drafter.kinds if not kind.is_tree}
    if numbers and chains:
        raise InputError(
            f"expected num_draft_tokens as a number with trees of {', '.join(sorted(chains))}, got "
            "'auto', which needs `scores` in their proposals, and is_tree in their kinds"
        )


class CompileNotice:
    """One line for each set of things that programs are compiled for.

    Attributes:
      is_silent: whether nobody is told.
    """

    def __init__(self, tell: Callable[[str], object] | None) -> None:
        """`tell` is called with the line; None says nothing."""
        self._tell, self.is_silent = tell, tell is None
        self._known, self._told = set[str](), set[frozenset[str]]()
        self._seconds = 0.0  # that the last set has taken

    @contextlib.contextmanager
    def around(self, parts: Sequence[str], widths: Collection[int] = ()) -> Iterator[None]:
        """Tells of the first program that is compiled within.

        Args:
          parts: what it is compiled for; those that are new are named.
          widths: of the chunks of a prompt that it reads, if any.
        """
        if self._tell is None:
            yield
            return
        parts = [*parts, *(f"chunks of {width} tokens" for width in sorted(set(widths)))]
        purpose = frozenset(parts)

        def listen(program: str) -> None:
            if program.startswith(_LARGE) and not self._is_told(purpose):
                self._say(parts)
                self._told.add(purpose)

        compile_listeners.append(listen)
        begin = compile_clock().seconds
        try:
            yield
        finally:
            compile_listeners.remove(listen)
            self._known |= purpose
            if self._is_told(purpose):
                self._seconds += compile_clock().seconds - begin

    def _is_told(self, purpose: frozenset[str]) -> bool:
        return any(purpose <= told for told in self._told)  # rounds after a prompt are no news

    def _say(self, parts: Sequence[str]) -> None:
        new = [part for part in parts if part not in self._known]
        is_new = "new " if new and self._known else ""  # what is known may be new together
        # As long as the last time: what is compiled is much alike.
        about = f": about {self._seconds:.0f} s" if self._seconds else ""
        assert self._tell is not None
        self._tell(f"compiling once for {is_new}{', '.join(new or parts)}{about}")
        self._seconds = 0.0


def describe_switches(switches: Switches) -> list[str]:
    """Returns what is switched on, as people call it."""
    filters = [name for name in ("top_k", "top_p", "min_p") if getattr(switches, name)]
    processors = [processor.name for processor in switches.processors]
    named = {"filters": filters, "processors": processors}
    parts = [f"{title} ({', '.join(names)})" for title, names in named.items() if names]
    return parts + ["log-probabilities"] * switches.logprobs


class VisitLength:
    """The number of rounds of the next visit of the device.

    A visit takes a millisecond or two besides its rounds: on a GPU as long as a round of a small
    model. So it has as many rounds as take 40 ms, by the visit before, at most twice as many as it.

    Attributes:
      least: number of rounds, however long they take.
      num_rounds: of the next visit.
    """

    def __init__(self, least: int, *, is_fixed: bool = False) -> None:
        """`is_fixed` keeps the least number, as processes must that run the same rounds."""
        self.least = self.num_rounds = least
        self._is_fixed = is_fixed

    def note(self, seconds: float, num_rounds: int) -> None:
        """Takes in how long a visit took, and how many rounds were run in it."""
        # None of a visit's seconds is left where a clock counts too much of compiling.
        if seconds <= 0 or num_rounds == 0 or self._is_fixed:
            return
        wanted = math.ceil(_VISIT_SECONDS * num_rounds / seconds)
        most = min(2 * self.num_rounds, MAX_ROUNDS_PER_VISIT)  # one short visit may be an accident
        self.num_rounds = max(min(wanted, most), self.least)
