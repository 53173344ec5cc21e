"""A draft model of another vocabulary than the target's (arXiv 2502.05202).

The drafter reads the text in its own tokens (`translated_text`), and translates what it drafts:

  shared     The draft's distribution, restricted to the tokens that both vocabularies have and
             normalised again. The draft is drawn from it and reported with it: every acceptance
             rule stays exact (algorithm 4 of the paper, token-level intersection).
  spelling   The draft's likeliest tokens, of its whole vocabulary. Their text is cut into tokens of
             the target, which are proposed as drafts that follow from the text alone (algorithm 2,
             string-level exact match). This reaches target tokens that the draft does not have.
  auto       A row spells at temperature 0, and draws from what is shared above.

    the draft says     | _filter | _( | x | ): | \\n |
    proposed           | _filter | _(x  |  ):\\n   |        spelling: whole words of the target

All of it runs on the device, so no tokenizer is called: tables cut the text nearly always as the
tokenizers would. Logits processors, which are made of the target's tokens, do not change what is
spelt. A row whose text takes half as many draft tokens again as the target has, as in a script that
the draft cannot write, is not drafted for: its cache would be too long.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float32, Int32

from jspec.common.errors import InputError
from jspec.common.typing import ApplyFn, BlockFlags, Params, RowCounts, RowFlags, RowTokens, Tokens
from jspec.drafters.chain import ChainDrafter
from jspec.drafters.memory import empty_caches, read_on, tokens_read
from jspec.drafters.options import AUTO, SHARED, SPELLING
from jspec.drafters.spec import DrafterSpec
from jspec.drafters.translated_text import BLOCK, TranslatedText, spell
from jspec.drafters.vocabulary_map import (
    Reading,
    VocabularyMap,
    check_bytes,
    check_shared,
    describe_shared,
    make_vocabulary_map,
    most_alike,
)
from jspec.kernels import run_if
from jspec.models import KVCache, make_apply
from jspec.sampling.settings import COLDEST, SamplingSettings
from jspec.speculation.types import Kind, Proposal, RoundInputs

_HOW = {
    SHARED: "drawn from the shared tokens",
    SPELLING: "spelt",
    AUTO: "spelt at temperature 0, else drawn from the shared tokens",
}
_FIRST = 4  # draft tokens of a round's first call, of which usually two are new


class TranslatedParams(NamedTuple):
    """Parameters of the draft model, and the map between the vocabularies."""

    draft: Params
    tables: VocabularyMap


class Begun(NamedTuple):
    """The draft model after the text and its newest token, before any draft."""

    logits: Float32[Array, "b v"]
    cache: KVCache


class TranslatedState(struct.PyTreeNode):
    """The drafter's memory of the committed tokens.

    Attributes:
      text: the tokens of both vocabularies.
      cache: the draft model's: of what it reads of the text, and after a proposal of the drafts.
      fed: the draft tokens in the last of its slots, from `fed_begin` on, [b f].
      fed_begin: [b].
    """

    text: TranslatedText
    cache: KVCache
    fed: Int32[Array, "b f"]
    fed_begin: RowCounts


@dataclasses.dataclass(frozen=True)
class TranslatedDrafter(ChainDrafter):
    """Proposes what a draft model of another vocabulary draws or spells.

    `vocab_size` counts the ids that the draft really uses.

    Attributes:
      apply: the draft model.
      init_cache: (batch size, capacity) -> its empty cache.
      reading: how the draft reads texts.
      translation: "shared", "spelling" or "auto".
      num_alike: see `most_alike`, of the target's tokens.
      max_seq_len: of the draft model.
      summary: how it drafts, and what the vocabularies share.
    """

    apply: ApplyFn = dataclasses.field(kw_only=True)
    init_cache: Callable[[int, int], KVCache] = dataclasses.field(kw_only=True)
    reading: Reading = dataclasses.field(kw_only=True)
    translation: str = dataclasses.field(kw_only=True)
    num_alike: int = dataclasses.field(kw_only=True)
    max_seq_len: int = dataclasses.field(kw_only=True)
    summary: str = dataclasses.field(default="", kw_only=True)
    kind = Kind("model", 0.7, 0.7)
    has_lag = True
    can_roll_back = True
    has_slot_per_token = False  # its slots are those of its own tokens
    reads_text = True  # a token alone may have no bytes, or be several tokens of the draft

    @property
    def may_be_silent(self) -> bool:
        """Always: what it drafts may have no tokens of the target, or its cache may be full."""
        return True

    @property
    def num_compared(self) -> int:
        """Draft tokens at the end of the text that are compared with the cache's."""
        return 2 * BLOCK + self.num_draft_tokens

    def init(self, batch_size: int, capacity: int) -> TranslatedState:
        """Returns the state of rows that have seen nothing."""
        slots = capacity + _num_spare(capacity) + self.num_draft_tokens
        none = jnp.zeros([batch_size], jnp.int32)
        return TranslatedState(
            text=TranslatedText.init(batch_size, capacity),
            cache=self.init_cache(batch_size, slots),
            fed=jnp.zeros([batch_size, self.num_compared], jnp.int32),
            fed_begin=none,
        )

    def lag(self, state: TranslatedState, kind: RowCounts) -> RowCounts:
        """Returns the tokens in the calls that read what is missing, padding included, [b]."""
        # The first call reads a few of them.
        length = state.text.length(self.reading) + 1 - _FIRST
        return tokens_read(jnp.maximum(length - state.cache.length, 0))

    def observe(
        self,
        params: TranslatedParams,
        state: TranslatedState,
        tokens: Tokens,
        hidden: Array,
        valid: BlockFlags,
    ) -> TranslatedState:
        """Remembers committed tokens; slots stay cached whose tokens the draft still reads."""
        text, same = state.text.append(params.tables, self.reading, tokens, valid)
        length = self._num_agreeing(params.tables, state, text, same)
        # What lies beyond may be overwritten by calls that others of the batch need.
        return state.replace(text=text, cache=state.cache.rollback(length))

    def _num_agreeing(
        self, tables: VocabularyMap, state: TranslatedState, text: TranslatedText, same: RowCounts
    ) -> RowCounts:
        """Returns how many of the cache's slots hold what the draft reads of a text, [b].

        `same` are those of which this is known already, as far as the cache goes.
        """
        width, begin, end = state.fed.shape[1], state.fed_begin, state.cache.length
        tokens = text.window(tables, self.reading, begin, width)
        num_known = jnp.minimum(end, text.length(self.reading)) - begin
        agrees = (tokens == state.fed) & (jnp.arange(width) < num_known[:, None])
        num_agreeing = jnp.sum(jnp.cumprod(agrees, axis=1, dtype=jnp.int32), axis=1)
        # Of a text that was cut short the tokens between the two are not on record.
        compared = jnp.where(begin <= same, begin + num_agreeing, same)
        return jnp.minimum(jnp.maximum(compared, same), end)

    def propose(
        self, params: TranslatedParams, state: TranslatedState, inputs: RoundInputs
    ) -> tuple[Proposal, TranslatedState]:
        """Reads what is new, drafts in the draft's tokens, and translates."""
        tables, reading = params.tables, self.reading
        is_real = jnp.ones_like(inputs.last_token, bool)[:, None]
        text, same = state.text.append(tables, reading, inputs.last_token[:, None], is_real)
        length = text.length(reading)
        wanted = jnp.where(self._has_room(state.text, length), inputs.wanted(), 0)
        is_wanted = wanted > 0
        agreeing = self._num_agreeing(tables, state, text, same)
        cache = state.cache.rollback(jnp.where(is_wanted, agreeing, state.cache.length))
        window = functools.partial(text.window, tables, reading)
        begin = jnp.maximum(length - _FIRST, 0)
        call = functools.partial(self.apply, params.draft)
        cache = read_on(call, cache, jnp.where(is_wanted, begin, cache.length), window)
        cache = cache.rollback(jnp.where(is_wanted, begin, cache.length))

        def read_last(carry: tuple[Array, KVCache]) -> tuple[Array, KVCache]:
            # Usually some of these slots are rewritten with what they held.
            cache = carry[1]
            logits, _, read = call(window(begin, _FIRST), cache, logits_at=length - 1 - begin)
            return logits[:, 0, : self.vocab_size], read

        logits = jnp.zeros([len(wanted), self.vocab_size], jnp.float32)
        logits, cache = run_if(is_wanted.any(), read_last, (logits, cache))
        begun = Begun(logits, cache.rollback(jnp.where(is_wanted, length, cache.length)))
        proposal, drafted, num_drafted, cache = self._draft(params, begun, inputs, wanted)
        return proposal, self._remember(
            state, cache, is_wanted, same, window, length, drafted, num_drafted
        )

    def _has_room(self, text: TranslatedText, length: RowCounts) -> RowFlags:
        """Returns which rows' drafts fit after `length` tokens, the newest one's included."""
        end = length + self.num_draft_tokens
        # By the row's own length, as its drafts must not depend on the batch's capacity.
        spare = _num_spare(jnp.maximum(text.history.length, _LEAST_CAPACITY))
        most = text.history.length + 1 + spare
        return (end <= most) & (end <= self.max_seq_len)

    def _draft(
        self, params: TranslatedParams, begun: Begun, inputs: RoundInputs, wanted: RowCounts
    ) -> tuple[Proposal, Tokens, RowCounts, KVCache]:
        """Returns the proposal, the draft tokens of it [b w], their number, and the cache."""
        if self.translation == SHARED:
            return self._draw(params, begun, inputs, wanted)
        if self.translation == SPELLING:
            return self._spell(params, begun, inputs, wanted)
        spells = inputs.settings.temperature < COLDEST
        # A batch of rows of one kind runs one of the two only.
        drawn, first, num_first, cache = self._draw(
            params, begun, inputs, jnp.where(spells, 0, wanted)
        )
        lengths = jnp.where(spells, begun.cache.length, cache.length)
        again = begun._replace(cache=cache.rollback(lengths))
        spelt, second, num_second, cache = self._spell(
            params, again, inputs, jnp.where(spells, wanted, 0)
        )
        tokens = jnp.where(spells[:, None], spelt.tokens, drawn.tokens)
        counts = jnp.where(spells, spelt.num_tokens, drawn.num_tokens)
        rows, slots = jnp.arange(len(tokens))[:, None], jnp.arange(tokens.shape[1])
        is_spelt = spells[:, None] & (slots < counts[:, None])
        assert drawn.probs is not None
        probs = run_if(
            is_spelt.any() & jnp.asarray(inputs.reads_probs),
            lambda probs: probs.at[rows, slots, tokens].add(is_spelt.astype(jnp.float32)),
            drawn.probs,
        )
        drafted = jnp.where(spells[:, None], second, first)
        num_drafted = jnp.where(spells, num_second, num_first)
        return Proposal(tokens, counts, probs), drafted, num_drafted, cache

    def _draw(
        self, params: TranslatedParams, begun: Begun, inputs: RoundInputs, wanted: RowCounts
    ) -> tuple[Proposal, Tokens, RowCounts, KVCache]:
        tables = params.tables

        def single(token: Int32[Array, "*b"]) -> Int32[Array, "*b"]:
            # A token that was drawn is shared, and is read as one token.
            return jnp.asarray(tables.readings.tokens)[tables.readings.begins[token]]

        def first(cache: KVCache, _: RowTokens) -> tuple[Float32[Array, "b u"], KVCache]:
            return begun.logits[:, tables.shared_draft], cache

        def later(cache: KVCache, token: RowTokens) -> tuple[Float32[Array, "b u"], KVCache]:
            logits, cache = self._call(params, cache, single(token))
            return logits[:, tables.shared_draft], cache

        proposal, cache, _ = self.draw_chain(
            first, later, begun.cache, inputs, wanted=wanted, ids=jnp.asarray(tables.shared_target)
        )
        return proposal, single(proposal.tokens), proposal.num_tokens, cache

    def _spell(
        self, params: TranslatedParams, begun: Begun, inputs: RoundInputs, wanted: RowCounts
    ) -> tuple[Proposal, Tokens, RowCounts, KVCache]:
        """Takes the draft's likeliest tokens, and cuts their text into tokens of the target."""
        drafting = dataclasses.replace(self, target_vocab_size=self.vocab_size)
        zeros = jnp.zeros_like(inputs.settings.temperature)
        greedy = SamplingSettings(zeros, jnp.zeros_like(wanted), zeros + 1, zeros)

        def first(cache: KVCache, _: RowTokens) -> tuple[Float32[Array, "b v"], KVCache]:
            return begun.logits, cache

        drafted, cache, _ = drafting.draw_chain(
            first,
            lambda cache, token: self._call(params, cache, token),
            begun.cache,
            inputs._replace(settings=greedy, reads_probs=False),
            wanted=wanted,
        )
        width = self.num_draft_tokens
        tokens, counts = spell(
            params.tables, drafted.tokens, drafted.num_tokens, width, self.num_alike
        )
        counts = jnp.minimum(counts, wanted)
        return Proposal(tokens, counts), drafted.tokens, drafted.num_tokens, cache

    def _call(
        self, params: TranslatedParams, cache: KVCache, token: RowTokens
    ) -> tuple[Float32[Array, "b v"], KVCache]:
        logits, _, cache = self.apply(params.draft, token[:, None], cache)
        return logits[:, 0, : self.vocab_size], cache.commit(jnp.ones_like(token))

    def _remember(
        self,
        state: TranslatedState,
        cache: KVCache,
        is_wanted: RowFlags,
        same: RowCounts,
        window: Callable[[RowCounts, int], Tokens],
        length: RowCounts,
        drafted: Tokens,
        num_drafted: RowCounts,
    ) -> TranslatedState:
        """Returns the state after a round's drafts: what was fed is known, nothing committed."""
        width = state.fed.shape[1]
        # The text with its newest token, and then the drafts but the last, which was not fed. As
        # many as the row itself has: what it has yet to read must not depend on its neighbours.
        offset = same[:, None] + jnp.arange(width) - length[:, None]
        index = jnp.clip(offset, 0, drafted.shape[1] - 1)
        drafts = jnp.take_along_axis(drafted, index, axis=1)
        fed = jnp.where(offset < 0, window(same, width), drafts)
        end = jnp.minimum(length + jnp.maximum(num_drafted - 1, 0), same + width)
        return state.replace(
            cache=cache.rollback(jnp.where(is_wanted, end, state.cache.length)),
            fed=jnp.where(is_wanted[:, None], fed, state.fed),
            fed_begin=jnp.where(is_wanted, same, state.fed_begin),
        )


_LEAST_CAPACITY = 512  # no row has fewer slots


def _num_spare(capacity: Any) -> Any:
    """Returns how many more draft tokens than target tokens a row may have."""
    return capacity // 2 + BLOCK


def make_translated_drafter(spec: DrafterSpec) -> tuple[TranslatedDrafter, TranslatedParams]:
    """Returns the drafter over a draft model whose tokenizer is `spec.draft_tokenizer`.

    Raises:
      InputError: an option that needs the target's own vocabulary, or see `check_bytes`,
        `make_vocabulary_map` and `check_shared`.
    """
    config, tokenizer, options = spec.draft_config, spec.draft_tokenizer, spec.options
    assert config is not None
    assert tokenizer is not None
    assert spec.tokenizer is not None
    for name in ("tree_depth", "draft_vocab_size", "draft_context"):
        if getattr(options, name):
            raise InputError(
                f"expected {name} 0 with a draft model of another vocabulary than the target's, "
                f"got {getattr(options, name)}"
            )
    check_bytes("target", spec.tokenizer)
    check_bytes("draft", tokenizer)
    draft_size = min(tokenizer.vocab_size, config.vocab_size)
    tables, reading = make_vocabulary_map(spec.tokenizer, tokenizer, spec.vocab_size, draft_size)
    if options.draft_translation != SPELLING:
        check_shared(tables)
    drafter = TranslatedDrafter(
        **{**spec.chain_fields, "vocab_size": draft_size},
        apply=make_apply(config),
        init_cache=empty_caches(config, spec.dtype),
        reading=reading,
        translation=options.draft_translation,
        num_alike=most_alike(tables.target_table),
        max_seq_len=config.max_seq_len,
        summary=f"drafts of another vocabulary {_HOW[options.draft_translation]} "
        f"({describe_shared(tables)})",
    )
    return drafter, TranslatedParams(spec.draft_params, jax.tree.map(jnp.asarray, tables))
