"""Encoder-decoders: T5 (arXiv 1910.10683) and Whisper (2212.04356).

    source ──► encoder ──► outputs ──► keys and values of each layer's cross-attention
    (once a request)                              │
                                                  ▼   constants in the cache: `KVCache.source`
    tokens ──► [self-attention, cross-attention, feed-forward] × layers ──► logits

Once a request's source has been read, its decoder is an `ApplyFn` like any other: rounds, drafters,
rules and beams see nothing of the encoder, and rolling back leaves the constants alone. A request
is a source and the tokens with which the decoder's text begins: a text, and the start token, of a
T5; 30 s of sound, and tokens of language and task, of a Whisper.

T5 norms by root mean squares, has no biases and does not scale its scores, to which it adds a
number for each distance of two tokens, in buckets that widen. The first layer's table of these
serves all layers. In a block the distance is counted along a token's own path, as for windows, so a
tree needs no other code. Version 1.1 has a gated GELU and a head of its own; the original has a
ReLU, and its embedding, scaled, as head.

Whisper norms by mean and variance and has biases, but for keys; embeddings of positions, learned in
the decoder, fixed in the encoder; and two convolutions before the encoder, which read the log-mel
spectrogram and halve its rate.

These layers are plain functions of parameters that `weights.tensor_names` names. They have
no hand-written kernels of whole blocks, only those of their operations.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from jspec import kernels
from jspec.common.typing import AnyLogits, Params, RowCounts
from jspec.kernels import attend, attend_capped
from jspec.models.cache import KVCache, Source, causal_mask
from jspec.models.config import DecoderConfig, EncoderConfig
from jspec.models.layers import finish_logits, head_kernel, linear, look_up

_ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
ACTIVATIONS = tuple(_ACTIVATIONS)


@dataclasses.dataclass(frozen=True)
class SourceDecoder:
    """The decoder of an encoder-decoder, as a function.

    Attributes:
      config: the model's.
      layers: those that are run, in rising order; None: all.
    """

    config: DecoderConfig
    layers: tuple[int, ...] | None = None

    def __call__(
        self,
        params: Params,
        tokens: Int[Array, "b t"] | Float[Array, "b t d"],
        cache: KVCache,
        *,
        positions: Int[Array, "b t"] | None = None,
        block_mask: Bool[Array, "#b t u"] | None = None,
        hidden_layers: Sequence[int] = (),
        logits_at: Int[Array, "b"] | None = None,
        first_layer: int = 0,
    ) -> tuple[AnyLogits, Array, KVCache]:
        """Runs the layers on one block; see `ApplyFn`.

        The cache has an entry for each layer that is run, and so has its source.
        """
        config, layers = self.config, self.layers
        encoder, source = encoder_of(config), cache.source
        assert source is not None
        layers = tuple(range(config.num_layers)) if layers is None else layers
        x = look_up(params["embedding"], tokens) if tokens.dtype.kind == "i" else tokens
        x = x.astype(jnp.float32)
        num_tokens = x.shape[1]
        block_mask = causal_mask(num_tokens) if block_mask is None else block_mask
        offset = block_mask.shape[-1] - num_tokens  # as in `Decoder`
        if encoder.is_audio and first_layer == 0:
            if positions is None:
                positions = cache.length[:, None] + offset + jnp.arange(num_tokens)
            # Drafts past the context's end have no position of their own; none is kept.
            positions = jnp.broadcast_to(positions, x.shape[:2])
            last = params["positions"].shape[0] - 1
            x += look_up(params["positions"], jnp.minimum(positions, last)).astype(jnp.float32)
        visible, bias = cache.visible(block_mask), None
        if not encoder.is_audio:
            bias = _relative_bias(encoder, params["relative"], cache.distances(block_mask), True)
        seen = source.visible(num_tokens)
        outputs = {first_layer: x}
        for index, layer in list(enumerate(layers))[first_layer:]:
            constants = source.keys[index], source.values[index], seen
            x, layer_cache = _decoder_layer(
                config, offset, params[f"layers_{layer}"], x, visible, bias, cache.layer(index),
                constants,
            )  # fmt: skip
            cache = cache.with_layer(index, layer_cache)
            outputs[index + 1] = x
        x = _norm(config, params["final_norm"], x)
        hidden = jnp.stack([outputs[i] for i in hidden_layers], axis=2) if hidden_layers else x
        if logits_at is not None:
            x = jnp.take_along_axis(x, logits_at[:, None, None], axis=1)
        return finish_logits(config, linear(x, head_kernel(config, params))), hidden, cache


@functools.partial(jax.jit, static_argnums=(0, 1))  # all layers are traced once
def _decoder_layer(
    config: DecoderConfig,
    offset: int,
    params: Params,
    x: Float32[Array, "b t d"],
    visible: Bool[Array, "b t s"],
    bias: Float[Array, "b n t s"] | None,
    cache: KVCache,
    constants: tuple[Array, Array, Array],
) -> tuple[Float32[Array, "b t d"], KVCache]:
    """Applies a layer to the stream and the one-layer cache.

    The constants are the source's keys and values, [b k s h], and which slots count, [b t s].
    """
    attention, cross = params["attention"], params["cross"]
    queries, keys, values = _qkv(config, attention, _norm(config, params["attention_norm"], x))
    cache = cache.write(keys, values, offset)
    x += _output(attention, cache.attend(queries, visible, bias=bias))
    queries = linear(_norm(config, params["cross_norm"], x), cross["query"])
    queries = _scaled(config, _biased(cross, "query_bias", queries))
    x += _output(cross, attend(_flat(queries), *constants))
    x += _feed_forward(config, params["mlp"], _norm(config, params["mlp_norm"], x))
    return x, cache


def encode(
    config: DecoderConfig, params: Params, source: Array, length: RowCounts
) -> Float32[Array, "b s d"]:
    """Returns what the encoder makes of sources.

    Args:
      config: the whole model's.
      params: the whole model's.
      source: token ids [b s], or log-mel spectrograms [b frames mels] with two frames an output.
      length: tokens of each text that count, or outputs of sound, [b].
    """
    encoder, params_of = encoder_of(config), params["encoder"]
    bias, config = None, as_encoder(config)
    if encoder.is_audio:
        x = _convolve(params_of["conv_1"], params_of["conv_1_bias"], source, stride=1)
        x = _convolve(params_of["conv_2"], params_of["conv_2_bias"], x, stride=2)
        x += params_of["positions"][: x.shape[1]].astype(jnp.float32)
    else:
        x = look_up(params["embedding"], source).astype(jnp.float32)
        place = jnp.arange(x.shape[1])
        distances = (place[:, None] - place)[None]
        bias = _relative_bias(encoder, params_of["relative"], distances, False)
    b, s = x.shape[:2]
    visible = jnp.broadcast_to((jnp.arange(s) < length[:, None])[:, None], (b, s, s))
    for layer in range(encoder.num_layers):
        x = _encoder_layer(config, params_of[f"layers_{layer}"], x, visible, bias)
    return _norm(config, params_of["final_norm"], x)


@functools.partial(jax.jit, static_argnums=0)
def _encoder_layer(
    config: DecoderConfig,
    params: Params,
    x: Float32[Array, "b s d"],
    visible: Bool[Array, "b s s"],
    bias: Float[Array, "1 n s s"] | None,
) -> Float32[Array, "b s d"]:
    attention = params["attention"]
    queries, *pair = _qkv(config, attention, _norm(config, params["attention_norm"], x))
    keys, values = (part.transpose(0, 2, 1, 3) for part in pair)
    if bias is None:
        mixed = attend(queries, keys, values, visible)
    else:
        mixed = attend_capped(queries, keys, values, visible, None, bias)
    x += _output(attention, mixed)
    return x + _feed_forward(config, params["mlp"], _norm(config, params["mlp_norm"], x))


def make_source(
    config: DecoderConfig,
    params: Params,
    outputs: Float32[Array, "b s d"],
    length: RowCounts,
    dtype: Any,
) -> Source:
    """Returns the constants of every layer's cross-attention, from the encoder's outputs."""
    padding = (0, 0), (0, 0), (0, encoder_of(config).max_len - outputs.shape[1]), (0, 0)

    def of_layer(layer: int) -> tuple[Array, Array]:
        cross = params[f"layers_{layer}"]["cross"]
        pair = linear(outputs, cross["key_value"])  # [b s k 2 h]
        parts = pair[:, :, :, 0], _biased(cross, "value_bias", pair[:, :, :, 1])
        keys, values = (
            jnp.pad(part.transpose(0, 2, 1, 3).astype(dtype), padding) for part in parts
        )
        return keys, values

    pairs = [of_layer(layer) for layer in range(config.num_layers)]
    return Source(tuple(keys for keys, _ in pairs), tuple(values for _, values in pairs), length)


def read_alike(
    config: DecoderConfig, params: Params, source: Array | np.ndarray, batch_size: int, dtype: Any
) -> Source:
    """Returns the constants of rows that all have one source, which is not padded.

    The source is token ids [s], or a spectrogram [frames mels].
    """
    count = len(source) // 2 if encoder_of(config).is_audio else len(source)
    length = jnp.full([1], count, jnp.int32)
    outputs = encode(config, params, jnp.asarray(source)[None], length)
    read = make_source(config, params, outputs, length, dtype)
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, batch_size, axis=0), read)


def init_source(config: DecoderConfig, batch_size: int, dtype: Any) -> Source | None:
    """Returns the sources of rows that have read none; None of a model without an encoder."""
    if config.encoder is None:
        return None
    shape = batch_size, config.num_kv_heads, config.encoder.max_len, config.head_dim
    return Source.init(config.num_layers, shape, dtype)


def as_encoder(config: DecoderConfig) -> DecoderConfig:
    """Returns the config of the encoder's layers."""
    encoder = encoder_of(config)
    heads = encoder.num_heads
    return dataclasses.replace(
        config, num_layers=encoder.num_layers, num_heads=heads, num_kv_heads=heads,
        head_dim=encoder.head_dim, hidden_dim=encoder.hidden_dim,
    )  # fmt: skip


def encoder_of(config: DecoderConfig) -> EncoderConfig:
    """Returns what an encoder-decoder has besides its decoder."""
    assert config.encoder is not None
    return config.encoder


def _norm(config: DecoderConfig, params: Params, x: Float32[Array, "b t d"]) -> Array:
    epsilon = jnp.float32(config.norm_epsilon)
    if "bias" not in params:
        return kernels.rms_norm(x, params["scale"], epsilon)
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(variance + epsilon)
    return normed * params["scale"].astype(jnp.float32) + params["bias"].astype(jnp.float32)


def _qkv(config: DecoderConfig, params: Params, inputs: Array) -> tuple[Array, Array, Array]:
    """Returns scaled queries [b t n h], keys and values [b t k h]."""
    qkv = linear(inputs, params["qkv"])  # [b t k g+2 h]
    queries = _scaled(config, _biased(params, "query_bias", qkv[:, :, :, :-2]))
    values = _biased(params, "value_bias", qkv[:, :, :, -1])
    return _flat(queries), qkv[:, :, :, -2], values


def _scaled(config: DecoderConfig, queries: Array) -> Array:
    scale = config.attention_scale
    return queries * (config.head_dim**-0.5 if scale is None else scale)


def _flat(queries: Float[Array, "b t k g h"]) -> Float[Array, "b t n h"]:
    return queries.reshape(*queries.shape[:2], -1, queries.shape[-1])


def _biased(params: Params, name: str, values: Array) -> Array:
    """Adds a bias, if any; queries and values may have one, keys never."""
    # A bias of keys adds the same to all scores of a query, which a softmax does not see.
    return values + params[name].astype(jnp.float32) if name in params else values


def _output(params: Params, mixed: Float[Array, "b t n h"]) -> Float32[Array, "b t d"]:
    outputs = linear(mixed.reshape(*mixed.shape[:2], -1), params["out"])
    return _biased(params, "out_bias", outputs).astype(jnp.float32)


def _feed_forward(config: DecoderConfig, params: Params, inputs: Array) -> Array:
    activation = _ACTIVATIONS[config.activation]
    if encoder_of(config).is_gated:
        gate_up = linear(inputs, params["gate_up"])
        hidden = activation(gate_up[:, :, 0]) * gate_up[:, :, 1]
    else:
        hidden = activation(_biased(params, "up_bias", linear(inputs, params["up"])))
    return _biased(params, "down_bias", linear(hidden, params["down"]))


def _convolve(kernel: Array, bias: Array, frames: Float[Array, "b s c"], stride: int) -> Array:
    """Returns GELU of a convolution over three frames; the kernel is [d c 3]."""
    padded = jnp.pad(frames, ((0, 0), (1, 1), (0, 0)))
    length = frames.shape[1]
    shifts = [padded[:, i : i + length : stride] for i in range(3)]
    windows = jnp.stack(shifts, axis=-1)
    windows = windows.reshape(*windows.shape[:2], -1)
    return _ACTIVATIONS["gelu"](linear(windows, kernel.reshape(kernel.shape[0], -1)) + bias)


def relative_buckets(config: EncoderConfig, is_causal: bool) -> Int[np.ndarray, "distances"]:
    """Returns the bucket of each distance, query less key, from -max_distance to max_distance.

    Small distances have buckets of their own; the others share them on a logarithmic scale. A
    decoder sees nothing after a token, an encoder has half of the buckets for what is after it.
    """
    distances = np.arange(-config.max_distance, config.max_distance + 1)
    count = config.num_buckets if is_causal else config.num_buckets // 2
    exact = count // 2
    far = np.maximum(np.abs(distances), 1).astype(np.float32) / np.float32(exact)
    steps = np.log(far) / np.float32(math.log(config.max_distance / exact)) * (count - exact)
    wide = np.minimum(exact + steps.astype(np.int64), count - 1)
    buckets = np.where(np.abs(distances) < exact, np.abs(distances), wide)
    if is_causal:
        return np.where(distances < 0, 0, buckets)
    return buckets + count * (distances < 0)


def _relative_bias(
    config: EncoderConfig, table: Float[Array, "buckets n"], distances: Array, is_causal: bool
) -> Float32[Array, "b n t s"]:
    by_distance = table.astype(jnp.float32)[relative_buckets(config, is_causal)]
    most = config.max_distance
    return by_distance[jnp.clip(distances, -most, most) + most].transpose(0, 3, 1, 2)
