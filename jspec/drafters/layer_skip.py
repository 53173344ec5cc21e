"""Self-speculation: some of the target's own layers, and its head, propose.

The first k layers (LayerSkip, arXiv 2404.16710) need no extra cache, as what they compute while
drafting is a part of the target's call on [last, d1, ..., dw], which then begins at layer k.

    layers 0 .. k-1 | committed | last  d1  d2  d3 |   written while drafting, one token a call
    layers k ..     | committed |                  |   written by the verify call

Other layers (Draft & Verify, arXiv 2309.08168) have other keys and values than the target has: they
are a draft model with its own cache, whose parameters happen to be the target's. So are the
first k in a cascade, where the block may be another member's.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float32, Int32

from jspec.common.errors import InputError
from jspec.common.typing import ApplyFn, Params, RowTokens
from jspec.drafters.chain import ChainDrafter
from jspec.drafters.memory import empty_caches
from jspec.drafters.model import ModelDrafter, ModelState
from jspec.drafters.spec import BuiltDrafter, DrafterSpec
from jspec.models import KVCache, make_apply
from jspec.models.cache import Source
from jspec.speculation.types import Kind, Proposal, RoundInputs, SourceView, TargetPrefix

_KIND = Kind("layer_skip", 0.3, 0.5, is_certain=True)  # they were not trained for it


class _Begun(struct.PyTreeNode):
    """The block [last, d1, ..., dw] as far as the first layers have come."""

    cache: KVCache  # the target's, the tokens that were fed committed for the time being
    hidden: Float32[Array, "b t d"]  # outputs of the first layers at them; 0 at the others
    num_fed: Int32[Array, ""]


@dataclasses.dataclass(frozen=True)
class FirstLayersDrafter(ChainDrafter):
    """Proposes a chain sampled from the target's first layers, in the target's own cache.

    It has neither parameters nor state, and nothing to catch up on: the target's cache is whole.
    `apply` runs the first layers as a separate model.
    """

    _: dataclasses.KW_ONLY
    apply: ApplyFn
    num_layers: int
    embed_dim: int
    kind = _KIND
    can_roll_back = True

    def propose(
        self, params: Params, state: tuple[()], inputs: RoundInputs
    ) -> tuple[Proposal, tuple[()]]:
        """Drafts one token after another, and begins the verify call on all of them.

        All rows run in lockstep: one that wants fewer drafts goes on, and no committed token ever
        sees its block slots after the last draft that is meant. The same holds for the slots after
        the last token fed, where `hidden` is 0.
        """
        view, (b, width) = inputs.view, inputs.rng_keys.shape
        call = functools.partial(self._feed, view.params)
        # One slot more than drafts: the block begins with the last committed token.
        hidden = jnp.zeros([b, width + 1, self.embed_dim], jnp.float32)
        # The target's own cache: layers from k on are not written here.
        begun = _Begun(view.cache, hidden, jnp.int32(0))
        proposal, begun, num_calls = self.draw_chain(call, call, begun, inputs)
        block = jnp.concatenate([inputs.last_token[:, None], proposal.tokens], axis=1)
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
    """Proposes a chain sampled from any of the target's layers, with their own cache.

    They are a draft model, which lags and catches up like any other; its parameters are the
    target's.
    """

    kind = _KIND

    def propose(
        self, params: Params, state: ModelState, inputs: RoundInputs
    ) -> tuple[Proposal, ModelState]:
        """Drafts one token after another; see `ModelDrafter`."""
        return super().propose(inputs.view.params, state, inputs)


def choose_layers(layers: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """Returns the layers of a target's `num_layers` that draft: those asked for, or the default.

    Raises:
      InputError: layers that the target does not have, or not in their order.
    """
    if layers is None:
        # Measured with SmolLM2-135M, which was not trained for it, on answers of 32 tokens: the
        # first 27 of 30 layers keep 31 % of the drafts, 20 keep 10 %, 15 keep 5 %, and 20 with the
        # last two 0.5 %. Fewer layers cost less, but no other
        # choice kept as many drafts for its cost.
        return tuple(range(max(num_layers * 9 // 10, 1)))
    layers, listed = tuple(layers), ",".join(map(str, layers)) or "none"
    if any(not 0 <= layer < num_layers for layer in layers):
        is_first = layers == tuple(range(len(layers)))
        raise InputError(
            f"expected draft_layers among the target's {num_layers}, from 0 to {num_layers - 1}; "
            f"got {f'the first {len(layers)}' if is_first else listed}"
        )
    if not layers or any(low >= high for low, high in itertools.pairwise(layers)):
        raise InputError(f"expected draft_layers in rising order, at least one; got {listed}")
    return layers


def build(spec: DrafterSpec) -> BuiltDrafter:
    """Returns the drafter of the layers that the options name."""
    config = spec.target_config
    layers = choose_layers(spec.options.draft_layers, config.num_layers)
    apply, fields = make_apply(config, layers), spec.chain_fields
    # In a cascade the block may be another member's: these layers then need their own cache.
    if layers == tuple(range(len(layers))) and not spec.is_member:
        drafter = FirstLayersDrafter(
            **fields, apply=apply, num_layers=len(layers), embed_dim=config.embed_dim
        )
        return BuiltDrafter(drafter)
    # The cache has slots for the chosen layers only, in their order.
    part = dataclasses.replace(config, num_layers=len(layers))
    init_cache = empty_caches(part, spec.dtype)
    drafter = LayerSubsetDrafter(
        **fields, apply=apply, init_cache=init_cache, make_source=_source_of_layers(layers)
    )
    return BuiltDrafter(drafter)


def _source_of_layers(layers: Sequence[int]) -> Callable[[Params, SourceView], Source]:
    def take(params: Params, source: SourceView) -> Source:
        every: Source = source.constants
        keys, values = (tuple(part[i] for i in layers) for part in (every.keys, every.values))
        return Source(keys, values, every.length)

    return take
