"""The decoder as one pure function: tokens and a cache in, logits and a cache out."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Float32, Int

from jspec.common.typing import AnyLogits, ApplyFn, Params
from jspec.kernels import SplitKernel, SplitLogits, compute_block
from jspec.models import encoder_decoder
from jspec.models.cache import KVCache, causal_mask
from jspec.models.config import DecoderConfig
from jspec.models.layers import (
    Attention,
    Experts,
    FeedForward,
    RMSNorm,
    finish_logits,
    kernel_param,
    linear,
    look_up,
    rope_cos_sin,
    scaled,
)


class Decoder(nn.Module):
    """The decoder of every family. See `ApplyFn` for the call.

    It runs the given layers, in rising order, or all. The cache has one entry a layer. Of a split
    vocabulary it may return `SplitLogits`.
    """

    config: DecoderConfig
    layers: tuple[int, ...] | None = None
    has_split_logits: bool = False

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "b t"] | Float[Array, "b t d"],
        cache: KVCache,
        positions: Int[Array, "b t"] | None = None,
        block_mask: Bool[Array, "#b t u"] | None = None,
        hidden_layers: Sequence[int] = (),
        logits_at: Int[Array, "b"] | None = None,
        first_layer: int = 0,
    ) -> tuple[AnyLogits, Array, KVCache]:
        """Runs one block of tokens; see `ApplyFn`."""
        cfg = self.config
        layers = tuple(range(cfg.num_layers)) if self.layers is None else self.layers
        embedding = kernel_param(self, "embedding", (cfg.vocab_size, cfg.embed_dim))
        x = tokens
        if jnp.issubdtype(tokens.dtype, jnp.integer):
            x = look_up(embedding, tokens)
        # The residual stream is float32. It is small, and rounding it would make the answers of a
        # bfloat16 model depend on how many tokens a call takes.
        x = x.astype(jnp.float32)
        if first_layer == 0:  # embeddings, looked up here or by the caller
            x = scaled(x, cfg.embedding_scale)
        num_tokens = x.shape[1]
        if block_mask is None:
            block_mask = causal_mask(num_tokens)
        # A mask wider than the block covers slots that earlier calls of this block have written.
        offset = block_mask.shape[-1] - num_tokens
        if positions is None:
            positions = cache.length[:, None] + offset + jnp.arange(num_tokens)
        positions = jnp.broadcast_to(positions, x.shape[:2])
        # Layers of one kind share their angles and masks.
        kinds = dict.fromkeys(cfg.rope_of(layer) for layer in layers)
        ropes = {kind: rope_cos_sin(cfg, positions, kind) for kind in kinds}
        windows = dict.fromkeys(cfg.window_of(layer) for layer in layers)
        masks = {window: cache.visible(block_mask, window) for window in windows}
        outputs = {first_layer: x}  # by number of layers run; 0 is the embedding
        for index, layer in list(enumerate(layers))[first_layer:]:
            rope, visible = ropes[cfg.rope_of(layer)], masks[cfg.window_of(layer)]
            name, inputs = f"layers_{layer}", (x, rope, visible, cache.layer(index), offset)
            # Initialising needs Flax's modules; afterwards the compiled layer is called directly.
            if self.is_initializing():
                x, layer_cache = Block(cfg, cfg.is_sparse(layer), name=name)(*inputs)
            else:
                params = self.get_variable("params", name)
                x, layer_cache = _apply_block(cfg, cfg.is_sparse(layer), params, *inputs)
            cache = cache.with_layer(index, layer_cache)
            outputs[index + 1] = x
        x = RMSNorm(cfg.norm_epsilon, name="final_norm")(x)
        hidden = jnp.stack([outputs[i] for i in hidden_layers], axis=2) if hidden_layers else x
        # Prefill needs logits at its last token only: the head is the largest product of all.
        if logits_at is not None:
            x = jnp.take_along_axis(x, logits_at[:, None, None], axis=1)
        head = embedding
        if not cfg.tie_embeddings:
            head = kernel_param(self, "head", (cfg.head_size or cfg.vocab_size, cfg.embed_dim))
        if self.has_split_logits and isinstance(head, SplitKernel):
            part = finish_logits(cfg, linear(x, head.part))
            return SplitLogits(part, head.count), hidden, cache
        return finish_logits(cfg, linear(x, head)), hidden, cache


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to the residual stream.

    Norms stand before or after each, or in both places, as `config.norms` says.
    """

    config: DecoderConfig
    is_sparse: bool = False  # whether the feed-forward layer is made of experts

    @nn.compact
    def __call__(
        self,
        x: Float32[Array, "b t d"],
        rope: tuple[Float32[Array, "b t half"], Float32[Array, "b t half"]],
        visible: Bool[Array, "b t s"],
        cache: KVCache,
        block_offset: int,
    ) -> tuple[Float32[Array, "b t d"], KVCache]:
        """Applies the block to the stream and the one-layer cache."""
        attention = Attention(self.config, name="attention")
        inputs = self._norm("attention_norm", x, "pre")
        mixed, cache = attention(inputs, rope, visible, cache, block_offset)
        x = self._add(x, "attention_post_norm", mixed)
        mlp = (Experts if self.is_sparse else FeedForward)(self.config, name="mlp")
        return self._add(x, "mlp_post_norm", mlp(self._norm("mlp_norm", x, "pre"))), cache

    def _add(self, x: Array, norm: str, outputs: Array) -> Array:
        return x + scaled(self._norm(norm, outputs, "post"), self.config.residual_scale)

    def _norm(self, name: str, values: Array, place: str) -> Array:
        if self.config.norms not in (place, "both"):
            return values
        return RMSNorm(self.config.norm_epsilon, name=name)(values)


@functools.partial(jax.jit, static_argnums=(0, 1, 7))  # what is no array
def _apply_block(config: DecoderConfig, is_sparse: bool, params: Params, *inputs: Any) -> Any:
    """Applies a `Block`; under jit, because all layers have the same shapes and are traced once."""
    *arrays, offset = inputs
    return apply_layer(Block(config, is_sparse), config, offset, params, *arrays)


def apply_layer(
    module: nn.Module, config: DecoderConfig, block_offset: int, params: Params, *arrays: Any
) -> Any:
    """Applies a layer's module, or what computes the same faster; see `kernels.compute_block`."""

    def reference(params: Params, *arrays: Any) -> Any:
        return module.apply({"params": params}, *arrays, block_offset=block_offset)

    return compute_block(reference, config, block_offset, params, *arrays)


def make_apply(
    config: DecoderConfig, layers: Sequence[int] | None = None, *, has_split_logits: bool = False
) -> ApplyFn:
    """Returns the decoder of that config as a pure function of its parameters.

    With `layers` it runs only these, in rising order, with the full model's parameters.
    """
    layers = None if layers is None else tuple(layers)
    if config.encoder is not None:
        return encoder_decoder.SourceDecoder(config, layers)
    module = Decoder(config, layers, has_split_logits)

    def apply(params: Params, tokens: Array, cache: KVCache, **options: Any) -> Any:
        return module.apply({"params": params}, tokens, cache, **options)

    return apply


def init_cache(
    config: DecoderConfig, *, batch_size: int, capacity: int, dtype: jax.typing.DTypeLike
) -> KVCache:
    """Returns an empty cache for a model of that config."""
    shape = (batch_size, config.num_kv_heads, capacity, config.head_dim)
    cache = KVCache.init(config.num_layers, shape, dtype)
    source = None
    if config.encoder is not None:
        source = encoder_decoder.init_source(config, batch_size, dtype)
    return cache.replace(is_split=config.num_shards > 1, source=source)


def init_params(config: DecoderConfig, rng_key: Array) -> Params:
    """Returns freshly initialised float32 parameters; the key is consumed."""
    decoder_key, mtp_key = rng_key, None
    if config.num_mtp_layers:
        decoder_key, mtp_key = jax.random.split(rng_key)
    cache = init_cache(config, batch_size=1, capacity=2, dtype=jnp.float32)
    params = Decoder(config).init(decoder_key, jnp.zeros([1, 1], jnp.int32), cache)["params"]
    return params if mtp_key is None else {**params, "mtp": _init_mtp(config, mtp_key)}


def mtp_config(config: DecoderConfig) -> DecoderConfig:
    """Returns the shape of the single layer of `apply_mtp`."""
    return dataclasses.replace(config, num_layers=1, num_mtp_layers=0)


def apply_mtp(
    config: DecoderConfig,
    params: Params,
    embedded: Float[Array, "b t d"],
    hidden: Float[Array, "b t d"],
    cache: KVCache,
    *,
    positions: Int[Array, "b t"] | None = None,
    block_mask: Bool[Array, "#b t u"] | None = None,
) -> tuple[Float32[Array, "b t d"], KVCache]:
    """Runs the layer for multi-token prediction of a MiMo (arXiv 2505.07608).

        norm(hidden i), norm(token i+1)  -- fc, block, norm -->  what the head says of token i+2

    Args:
      config: the model's.
      params: the model's; the layer is `mtp`: `hidden_norm`, `token_norm`, `fc` [d 2·d], `block`
        (see `Block`) and `final_norm`.
      embedded: embeddings of tokens i + 1.
      hidden: the model's outputs at tokens i, after its final norm; or this layer's.
      cache: the layer's; pair i has position and slot i.
      positions: of the pairs; None for a chain.
      block_mask: which pairs of the block each sees; see `ApplyFn`.

    Returns:
      The normed output, which the model's head reads, and the cache with the block written and
      nothing committed.
    """
    cfg, layer, num_tokens = mtp_config(config), params["mtp"], embedded.shape[1]
    if positions is None:
        positions = cache.length[:, None] + jnp.arange(num_tokens)
    mask = causal_mask(num_tokens) if block_mask is None else block_mask

    def norm(name: str, values: Array) -> Array:
        return RMSNorm(cfg.norm_epsilon).apply({"params": layer[name]}, values)  # type: ignore[return-value]

    # vLLM and SGLang, with which the model was published, give the first pair no token.
    embedded = jnp.where(positions[..., None] == 0, 0.0, embedded.astype(jnp.float32))
    parts = norm("hidden_norm", hidden.astype(jnp.float32)), norm("token_norm", embedded)
    x = linear(jnp.concatenate(parts, axis=-1), layer["fc"])
    inputs = x, rope_cos_sin(cfg, positions), cache.visible(mask), cache.layer(0)
    offset = mask.shape[-1] - num_tokens  # as in `Decoder`
    x, layer_cache = apply_layer(Block(cfg), cfg, offset, layer["block"], *inputs)
    return norm("final_norm", x), cache.with_layer(0, layer_cache)


def _init_mtp(config: DecoderConfig, rng_key: Array) -> Params:
    """Returns the layer of `apply_mtp` without training; the key is consumed."""
    fc_key, block_key = jax.random.split(rng_key)
    cfg, dim = mtp_config(config), config.embed_dim
    # Flax only needs shapes here; nothing in the cache is kept.
    cache = init_cache(cfg, batch_size=1, capacity=2, dtype=jnp.float32)
    x, rope = jnp.zeros([1, 1, dim]), rope_cos_sin(cfg, jnp.zeros([1, 1], jnp.int32))
    inputs = x, rope, cache.visible(causal_mask(1)), cache.layer(0), 0
    norms = ("hidden_norm", "token_norm", "final_norm")
    return {name: {"scale": jnp.ones([dim])} for name in norms} | {
        "fc": nn.initializers.normal(0.02)(fc_key, (dim, 2 * dim)),
        "block": Block(cfg).init(block_key, *inputs)["params"],
    }
