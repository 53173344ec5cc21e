"""Self-speculation: some of the target's own layers, and its head, propose.

The first k layers (LayerSkip, arXiv 2404.16710) need no cache of their own: what they compute while
drafting is a part of the target's call on [last, d1, ..., dw], which then begins at layer k.

    layers 0 .. k-1 | committed | last  d1  d2  d3 |   written while drafting, one token a call
    layers k ..     | committed |                  |   written by the verify call

Other layers (Draft & Verify, arXiv 2309.08168) have other keys and values than the target has: they
are a draft model with a cache of its own, whose parameters happen to be the target's. So are the
first k in a cascade, where the block may be another member's.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float32, Int32, Key

from jspec.common.typing import ApplyFn, Params, RowTokens
from jspec.drafters.chain import draw_chain
from jspec.drafters.layer_choice import LayerSkipOptions, choose_layers
from jspec.drafters.memory import Stateless, StopsUnsure
from jspec.drafters.model import ModelDrafter, ModelState
from jspec.drafters.spec import (
    BuiltDrafter,
    DrafterEntry,
    DrafterSpec,
)
from jspec.models import KVCache, init_cache, make_apply
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.acceptance.types import Proposal, TargetPrefix
from jspec.speculation.types import Kind, LimitFn, TargetView

_ASSUMED = 0.3, 0.5  # acceptance of a few of the layers, before it is known: not trained for it
_KINDS = (Kind("layer_skip", *_ASSUMED),)


class _Begun(struct.PyTreeNode):
    """The block [last, d1, ..., dw] as far as the first layers have come.

    Attributes:
      cache: the target's, the tokens that were fed committed for the time being.
      hidden: outputs of the first layers at them, [b w+1 d]; 0 at the others.
      num_fed: how many they are.
    """

    cache: KVCache
    hidden: Float32[Array, "b t d"]
    num_fed: Int32[Array, ""]


@dataclasses.dataclass(frozen=True)
class FirstLayersDrafter(StopsUnsure, Stateless):
    """Proposes a chain sampled from the target's first layers, in the target's own cache.

    It has neither parameters nor state, and nothing to catch up on: the target's cache is whole.

    Attributes:
      apply: the first layers as a model of their own.
      num_layers: how many they are.
      embed_dim: width of the residual stream.
      num_draft_tokens: drafts a round.
      vocab_size: ids that are really used; the padding beyond them is cut.
      target_vocab_size: width of the target's distributions.
      min_confidence: it proposes no further where no token is this likely; 0 never stops it.
    """

    apply: ApplyFn
    num_layers: int
    embed_dim: int
    num_draft_tokens: int
    vocab_size: int
    target_vocab_size: int
    min_confidence: float = 0.0

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """One: its drafts are all alike."""
        return _KINDS

    def propose(
        self,
        params: Params,
        state: tuple[()],
        last_token: RowTokens,
        *,
        limit: LimitFn,
        rng_keys: Key[Array, "b w"],
        settings: SamplingSettings,
        view: TargetView,
    ) -> tuple[Proposal, tuple[()]]:
        """Drafts one token after another, and begins the verify call on all of them.

        All rows run in lockstep: one that wants fewer drafts goes on, and no committed token ever
        sees its block slots after the last draft that is meant. The same holds for the slots after
        the last token fed, where `hidden` is 0.
        """
        del params
        b, width = rng_keys.shape
        call = functools.partial(self._feed, view.params)
        # One slot more than drafts: the block begins with the last committed token.
        hidden = jnp.zeros([b, width + 1, self.embed_dim], jnp.float32)
        proposal, begun, num_calls = draw_chain(
            call,
            call,
            # The target's own cache: layers from k on are not written here.
            _Begun(view.cache, hidden, jnp.int32(0)),
            last_token,
            limit=limit(jnp.zeros_like(last_token)),
            rng_keys=rng_keys,
            settings=settings,
            vocab_size=self.target_vocab_size,
            min_confidence=self.min_confidence,
        )
        block = jnp.concatenate([last_token[:, None], proposal.tokens], axis=1)
        # The last draft has not been fed: the verify call needs its first layers too.
        newest = jax.lax.dynamic_index_in_dim(block, num_calls, axis=1, keepdims=False)
        _, begun = call(begun, newest)  # of logits that nobody reads XLA leaves out the product
        # Nothing is committed yet: the slots hold the block's first layers.
        cache = begun.cache.rollback(view.cache.length)
        # The verify call goes on at layer k and does not compute the first k twice.
        prefix = TargetPrefix(begun.hidden, cache, self.num_layers)
        return proposal.replace(prefix=prefix), state

    def _feed(
        self, params: Params, begun: _Begun, token: RowTokens
    ) -> tuple[Float32[Array, "b u"], _Begun]:
        """Runs the first layers on the block's next token; returns the logits of the one after."""
        logits, outputs, cache = self.apply(
            params, token[:, None], begun.cache, hidden_layers=(self.num_layers,)
        )
        # `outputs` is [b 1 1 d]: one token, and one observed layer.
        hidden = begun.hidden.at[:, begun.num_fed].set(outputs[:, 0, 0])
        begun = _Begun(cache.commit(jnp.ones_like(token)), hidden, begun.num_fed + 1)
        return logits[:, 0, : self.vocab_size], begun


@dataclasses.dataclass(frozen=True)
class LayerSubsetDrafter(ModelDrafter):
    """Proposes a chain sampled from any of the target's layers, with a cache of their own.

    They are a draft model, which lags and catches up like any other; its parameters are the
    target's.
    """

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """One: its drafts are all alike."""
        return _KINDS

    def propose(
        self,
        params: Params,
        state: ModelState,
        last_token: RowTokens,
        *,
        limit: LimitFn,
        rng_keys: Key[Array, "b w"],
        settings: SamplingSettings,
        view: TargetView,
    ) -> tuple[Proposal, ModelState]:
        """Drafts one token after another; see `ModelDrafter`."""
        del params
        return super().propose(
            view.params, state, last_token,
            limit=limit, rng_keys=rng_keys, settings=settings, view=view,
        )  # fmt: skip


def build_layer_skip(spec: DrafterSpec) -> BuiltDrafter:
    """Returns the drafter of the target's layers `spec.options.draft_layers`.

    Raises:
      InputError: layers that the target does not have, or not in their order.
    """
    config = spec.target_config
    layers = choose_layers(spec.options.draft_layers, config.num_layers)
    options = {
        "apply": make_apply(config, layers),
        "num_draft_tokens": spec.num_draft_tokens,
        "vocab_size": spec.vocab_size,
        "target_vocab_size": config.vocab_size,
        "min_confidence": spec.options.draft_confidence,
    }
    # In a cascade the block may be another member's: these layers then need a cache of their own.
    if layers == tuple(range(len(layers))) and not spec.is_member:
        return BuiltDrafter(
            FirstLayersDrafter(num_layers=len(layers), embed_dim=config.embed_dim, **options)
        )
    # The cache has slots for the chosen layers only, in their order.
    part = dataclasses.replace(config, num_layers=len(layers))

    def empty_cache(batch_size: int, capacity: int) -> KVCache:
        return init_cache(part, batch_size=batch_size, capacity=capacity, dtype=spec.dtype)

    return BuiltDrafter(LayerSubsetDrafter(init_cache=empty_cache, **options))


ENTRY = DrafterEntry(
    name="layer_skip",
    build=build_layer_skip,
    proposes="what some of the target's own layers draw (`--draft_layers`)",
    source="2404.16710, 2309.08168",
    options=LayerSkipOptions,
    needs="layers",
    prior_cost=1.90,  # 20 of 30 layers
)
