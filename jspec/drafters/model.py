"""A second, cheaper model as drafter, with its own KV cache.

    target   | committed ................ c | last |
    draft    | cached ........... b |            (lags by one or more tokens)
    propose           catch up  | c  last | d1  d2 ...

The drafter remembers every committed token and how many of them its cache holds. Before proposing
it reads those that are missing, the prompt among them, but for the newest committed token: the
round begins with a two-token call [newest committed, last]. A row without drafts wanted lags on.

With `draft_context` its cache begins with that many of the text's last tokens, when drafts are
first wanted. It then guesses from less, which changes no distribution.

With `tree_depth` the model drafts a tree.

    cache   | committed tokens | last | level 1: k drafts | level 2: k drafts | ...

The drafts of a level are fed in one call, under a mask. What is committed afterwards is a path of
what was fed, in slots that do not lie together; the drafter moves them together itself.

With `draft_vocab_size` the model's head is over the most frequent tokens only, as counted in a
text, and then over the first ids: those of a byte-level BPE come in the order in which its merges
were learned, the most frequent pair first. A head of fewer rows is read faster, and its logits are
those of the whole head, bit for bit. The drafts are drawn from their softmax, and the proposal says
so: every rule stays exact, and a token that is never drafted comes from the residual.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float32, Int, Int32

from jspec.common.errors import InputError
from jspec.common.typing import ApplyFn, BlockFlags, Params, RowCounts, RowFlags, RowTokens, Tokens
from jspec.drafters.chain import ChainDrafter
from jspec.drafters.memory import History, empty_caches, read_on, tokens_read
from jspec.drafters.options import AUTO
from jspec.drafters.spec import BuiltDrafter, DrafterSpec, growing_fields
from jspec.drafters.token_texts import read_plain
from jspec.drafters.translated_model import make_translated_drafter
from jspec.drafters.trees import Fed, make_tree, propose_grown
from jspec.models import DecoderConfig, KVCache, make_apply
from jspec.models.cache import Source
from jspec.models.encoder_decoder import encode, make_source
from jspec.models.layers import head_of_ids
from jspec.speculation.acceptance.tree import kept_path, tree_of
from jspec.speculation.types import Kind, Proposal, RoundInputs, SourceView

HEAD_IDS = "head_ids"  # beside the draft model's parameters


def with_draft_vocabulary(spec: DrafterSpec) -> DrafterSpec:
    """Returns what the drafter is built from, with a draft model whose head has fewer rows.

    Without the option `draft_vocab_size`, or a draft model, the same.

    Raises:
      InputError: more tokens than draft and target share, or a text that cannot be read.
    """
    size, config, params = spec.options.draft_vocab_size, spec.draft_config, spec.draft_params
    if size == 0 or config is None:
        return spec
    if size > spec.vocab_size:
        raise InputError(
            f"expected draft_vocab_size of at most {spec.vocab_size}, the ids that draft and "
            f"target share; got {size}"
        )
    ends = {*config.eos_ids, *spec.target_config.eos_ids}
    ids = draft_ids(size, spec.vocab_size, ends, _frequent_ids(spec))
    head = head_of_ids(config, params, ids)
    return spec._replace(
        draft_config=dataclasses.replace(config, tie_embeddings=False, head_size=len(ids)),
        draft_params={**params, "head": head, HEAD_IDS: jnp.asarray(ids, jnp.int32)},
    )


def draft_ids(
    size: int, vocab_size: int, ends: set[int], frequent: Sequence[int] = ()
) -> Int[np.ndarray, "u"]:
    """Returns `size` ids and those of `ends`, in rising order, all of them below `vocab_size`.

    The most `frequent` come first, then the lowest ids.
    """
    counted = (token_id for token_id in frequent if token_id < vocab_size)
    kept = list(dict.fromkeys([*counted, *range(vocab_size)]))[:size]
    # Without the tokens that end a text no draft would ever end a text.
    return np.array(sorted({*kept, *(end for end in ends if end < vocab_size)}), np.int64)


def _frequent_ids(spec: DrafterSpec) -> list[int]:
    """Returns the ids of the text's tokens, the most frequent first; none without a text."""
    name = spec.options.draft_vocab_text
    if name is None:
        return []
    assert spec.tokenizer is not None
    counts = collections.Counter(spec.tokenizer.encode(read_plain(name), add_bos=False))
    # Of equal counts the lower id first, so that the order does not depend on the text's.
    return sorted(counts, key=lambda token_id: (-counts[token_id], token_id))


class ModelState(struct.PyTreeNode):
    """The drafter's memory of the committed tokens."""

    history: History
    cache: KVCache  # the draft model's; `cache.length` committed tokens are in it
    # Tokens after those that were fed while drafting; what turns out to be committed stays cached.
    fed: Int32[Array, "b w"]
    # Of trees, whose drafts that were fed are `fed`: the token that was fed before them, -1 if none
    # was; and their parents among them, -1 for that token.
    last: RowTokens | None = None
    parents: Int32[Array, "b w"] | None = None


@dataclasses.dataclass(frozen=True)
class ModelDrafter(ChainDrafter):
    """Proposes what a draft model draws, or a tree of that or of what it finds likeliest.

    Attributes:
      apply: the draft model.
      init_cache: (batch size, capacity) -> its empty cache.
      has_head_ids: whether its head is over some ids only, which its parameters name.
      context: the most tokens that it reads before its first drafts, the last ones; 0 for all.
      make_source: of an encoder-decoder: its own constants of a source, given its parameters.
    """

    apply: ApplyFn = dataclasses.field(kw_only=True)
    init_cache: Callable[[int, int], KVCache] = dataclasses.field(kw_only=True)
    has_head_ids: bool = dataclasses.field(default=False, kw_only=True)
    context: int = dataclasses.field(default=0, kw_only=True)
    make_source: Callable[[Params, SourceView], Source] | None = dataclasses.field(
        default=None, kw_only=True
    )
    kind = Kind("model", 0.7, 0.7, is_certain=True)
    has_lag = True
    can_roll_back = True

    @property
    def has_slot_per_token(self) -> bool:
        """Whether it reads all of a text."""
        return self.context == 0

    def ids(self, params: Params) -> Int32[Array, "u"] | None:
        """Returns the ids of the tokens that its logits are of; None for the first ones."""
        return params[HEAD_IDS] if self.has_head_ids else None

    def lag(self, state: ModelState, kind: RowCounts) -> RowCounts:
        """Returns the tokens in the calls that read what is missing, padding included, [b]."""
        missing = jnp.maximum(state.history.length - 1 - state.cache.end, 0)
        if self.context:
            missing = jnp.where(self._is_new(state), self.context, missing)
        return tokens_read(missing)

    def _is_new(self, state: ModelState) -> RowFlags:
        """Returns which rows' caches would begin after their texts' beginnings."""
        assert state.cache.begin is not None
        # Once only: an answer that goes on after a pause reads again from where it began.
        return (state.cache.begin < 0) & (state.history.length - 1 > self.context)

    def empty_cache(self, batch_size: int, capacity: int) -> KVCache:
        """Returns the cache of rows of which nothing was read."""
        cache = self.init_cache(batch_size, capacity)
        return cache.replace(begin=jnp.full_like(cache.length, -1)) if self.context else cache

    def init(self, batch_size: int, capacity: int) -> ModelState:
        """Returns the state of rows that have seen nothing."""
        history, shape = History.init(batch_size, capacity), self.shape
        if shape is None:
            fed = jnp.full([batch_size, self.num_draft_tokens], -1, jnp.int32)
            return ModelState(history, self.empty_cache(batch_size, capacity), fed)
        none = jnp.full([batch_size, shape.num_fed], -1, jnp.int32)
        cache = self.empty_cache(batch_size, capacity + shape.num_fed)
        return ModelState(history, cache, none, jnp.full([batch_size], -1, jnp.int32), none)

    def observe(
        self, params: Params, state: ModelState, tokens: Tokens, hidden: Array, valid: BlockFlags
    ) -> ModelState:
        """Remembers committed tokens; those that were fed while drafting count as cached."""
        if self.shape is not None:
            return self._observe_tree(self.shape.depth - 1, state, tokens, valid)
        width = min(tokens.shape[1], self.num_draft_tokens)
        # A draft stays cached if it and all before it were committed, and no slot is missing.
        is_fed = (state.fed[:, :width] == tokens[:, :width]) & valid[:, :width]
        is_fed &= (state.cache.end == state.history.length)[:, None]
        num_fed = jnp.sum(jnp.cumprod(is_fed, axis=1, dtype=jnp.int32), axis=1)
        return ModelState(
            history=state.history.append(tokens, valid),
            cache=state.cache.commit(num_fed),
            fed=jnp.full_like(state.fed, -1),
        )

    def _observe_tree(
        self, depth: int, state: ModelState, tokens: Tokens, valid: BlockFlags
    ) -> ModelState:
        """Remembers committed tokens; a path of those that were fed counts as cached.

        The drafts that were fed have at most this depth.
        """
        assert state.last is not None
        is_fed = (state.last == tokens[:, 0]) & valid[:, 0]
        is_fed &= state.cache.end == state.history.length
        everything = jnp.full(state.last.shape, state.fed.shape[1], jnp.int32)
        fed = tree_of(Proposal(state.fed, everything, parents=state.parents, max_depth=depth))
        # What was committed at each draft's depth, -2 beyond its end: nothing that was fed is -2.
        committed = jnp.where(valid[:, 1:], tokens[:, 1:], -2)[:, :depth]
        committed = jnp.pad(
            committed, ((0, 0), (0, depth - committed.shape[1])), constant_values=-2
        )
        expected = jnp.take_along_axis(committed, fed.depths[:, 1:] - 1, axis=1)
        path, num_drafts = kept_path(fed, expected == state.fed)
        return state.replace(
            history=state.history.append(tokens, valid),
            cache=state.cache.commit(jnp.where(is_fed, 1 + num_drafts, 0), path),
            last=jnp.full_like(state.last, -1),
            fed=jnp.full_like(state.fed, -1),
        )

    def read_source(self, params: Params, state: ModelState, source: SourceView) -> ModelState:
        """Puts the source into the draft model's cache; its history has the answer alone."""
        if self.make_source is None:
            return state
        return state.replace(cache=state.cache.replace(source=self.make_source(params, source)))

    def propose(
        self, params: Params, state: ModelState, inputs: RoundInputs
    ) -> tuple[Proposal, ModelState]:
        """Drafts one token after another, in a loop on the device."""
        if self.shape is not None:
            return propose_grown(self, params, state, inputs)
        wanted = inputs.wanted()
        is_wanted = wanted > 0
        first = functools.partial(self._first_call, params, state.history)

        def later(cache: KVCache, token: RowTokens) -> tuple[Array, KVCache]:
            logits, _, cache = self.apply(params, token[:, None], cache)
            return logits[:, 0, : self.vocab_size], cache.commit(jnp.ones_like(token))

        ready = self.ready_cache(params, state, is_wanted)
        ids = self.ids(params)
        proposal, cache, _ = self.draw_chain(first, later, ready, inputs, wanted=wanted, ids=ids)
        # The last draft is not fed, as no draft follows it.
        fed = jnp.concatenate([inputs.last_token[:, None], proposal.tokens[:, :-1]], axis=1)
        return proposal, self.remember(state, cache, fed, proposal.num_tokens, is_wanted)

    def grow(
        self, params: Params, inputs: RoundInputs, wanted: RowCounts, state: ModelState
    ) -> tuple[Proposal, ModelState]:
        """Grows a tree, level by level."""
        is_wanted = wanted > 0
        cache = self.ready_cache(params, state, is_wanted)
        logits, cache = self._first_call(params, state.history, cache, inputs.last_token)

        def feed(cache: KVCache, level: Fed) -> tuple[Float32[Array, "b k u"], KVCache]:
            positions, mask = level.positions(cache.length), level.mask
            logits, _, cache = self.apply(
                params, level.tokens, cache, positions=positions, block_mask=mask
            )
            return logits[..., : self.vocab_size], cache

        grown = make_tree(self, feed, cache, logits, inputs, wanted=wanted, ids=self.ids(params))
        length = jnp.where(is_wanted, state.history.length - cache.first, state.cache.length)
        return grown.proposal, state.replace(
            cache=grown.memory.rollback(length),
            last=jnp.where(is_wanted, inputs.last_token, -1),
            fed=grown.fed,
            parents=grown.fed_parents,
        )

    def _first_call(
        self, params: Params, history: History, cache: KVCache, token: RowTokens
    ) -> tuple[Float32[Array, "b u"], KVCache]:
        """Feeds the newest committed token and the last; returns the logits after them."""
        # If every draft of a round is accepted, the last was never fed to the drafter: this call
        # fills that hole. Else it rewrites one slot with what it held.
        block = jnp.stack([history.newest(), token], axis=1)
        logits, _, cache = self.apply(params, block, cache, logits_at=jnp.ones_like(token))
        return logits[:, 0, : self.vocab_size], cache.commit(jnp.full_like(token, 2))

    def ready_cache(self, params: Params, state: ModelState, is_wanted: RowFlags) -> KVCache:
        """Catches up; returns the cache without the newest committed token."""
        cache = self._catch_up(params, state, is_wanted)
        # The first call begins with that token and rewrites its slot: an up-to-date row steps back.
        before_newest = jnp.maximum(state.history.length - 1, 0)
        return cache.rollback(jnp.where(is_wanted, before_newest - cache.first, cache.length))

    def remember(
        self,
        state: ModelState,
        cache: KVCache,
        fed: Int32[Array, "b w"],
        num_tokens: RowCounts,
        is_wanted: RowFlags,
    ) -> ModelState:
        """Returns the state after a round's drafts.

        `cache` may have any length; `fed` are the tokens in it after the committed ones.
        """
        length = jnp.where(is_wanted, state.history.length - cache.first, state.cache.length)
        # A neighbour that wants more makes the batch feed more; what a row has yet to read must not
        # depend on its neighbours. So as many fed tokens count as the row has drafts.
        is_own = jnp.arange(fed.shape[1]) < num_tokens[:, None]
        # No token is -1, so that nothing else counts as fed.
        fed = jnp.where(is_own & is_wanted[:, None], fed, -1)
        return ModelState(state.history, cache.rollback(length), fed)

    def _catch_up(self, params: Params, state: ModelState, is_wanted: RowFlags) -> KVCache:
        """Feeds committed tokens until only the newest may be missing. Usually nothing to do."""
        history, cache = state.history, state.cache
        num_before = history.length - 1
        if self.context:
            assert cache.begin is not None
            is_new = is_wanted & self._is_new(state)
            begin = jnp.where(is_new, num_before - self.context, cache.begin)
            begin = jnp.where(is_wanted, jnp.maximum(begin, 0), begin)
            cache = cache.replace(begin=begin)
        first = cache.first
        goal = jnp.where(is_wanted, num_before - first, cache.length)

        def window(slot: RowCounts, width: int) -> Tokens:
            return history.window(first + slot, width)

        return read_on(functools.partial(self.apply, params), cache, goal, window)


def make_model_drafter(spec: DrafterSpec, name: str = "model") -> tuple[ModelDrafter, Params]:
    """Returns the drafter over the draft model, for the drafter called `name`; and its parameters.

    Raises:
      InputError: there is no draft model, or see `with_draft_vocabulary`.
    """
    spec = with_draft_vocabulary(spec)
    config = spec.draft_config
    if config is None:
        raise InputError(f"the drafter {name!r} expects a draft model, and none was given")
    drafter = ModelDrafter(
        **spec.chain_fields,
        apply=make_apply(config),
        init_cache=empty_caches(config, spec.dtype),
        has_head_ids=config.head_size is not None,
        context=spec.options.draft_context,
        make_source=None if config.encoder is None else _source_reader(spec, config),
    )
    return drafter, spec.draft_params


def _source_reader(
    spec: DrafterSpec, config: DecoderConfig
) -> Callable[[Params, SourceView], Source]:
    """Returns what makes a draft's constants of a source: of the target's outputs, if it may."""

    def read(params: Params, source: SourceView) -> Source:
        outputs = source.outputs
        if not spec.shares_encoder:
            outputs = encode(config, params, source.inputs, source.length)
        return make_source(config, params, outputs, source.length, spec.dtype)

    return read


def build(spec: DrafterSpec) -> BuiltDrafter:
    """Returns the drafter over a draft model, of the target's vocabulary or another."""
    if spec.draft_tokenizer is not None:
        return BuiltDrafter(*make_translated_drafter(spec))
    if spec.options.draft_translation != AUTO:
        raise InputError(
            "expected draft_translation with a draft model of another vocabulary than the "
            f"target's, got {spec.options.draft_translation!r} with one of the same"
        )
    fields = growing_fields(spec)
    drafter, params = make_model_drafter(spec)
    return BuiltDrafter(dataclasses.replace(drafter, **fields), params)
