"""The head of EAGLE-3 (arXiv 2503.01840): one decoder layer that continues the target's features.

    features of three layers of the target at token i  -- fc -->  feature i   [d]
    feature i, embedding of token i+1  -- layer -->  hidden i  -- norm, head -->  probs of token i+2

Where the target has not been yet, `hidden` takes the feature's place: that is how a chain of drafts
is made. The embedding is the target's own.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Float32, Int

from jspec.common.typing import Params
from jspec.models.cache import KVCache, causal_mask
from jspec.models.config import DecoderConfig
from jspec.models.decoder import apply_layer, init_cache
from jspec.models.layers import Attention, FeedForward, RMSNorm, kernel_param, linear, rope_cos_sin


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """The shape of a head.

    Attributes:
      layer: the shape of its decoder layer; `vocab_size` counts the tokens that it can propose, and
        `embed_dim` is the target's.
      target_vocab_size: rows of the target's embedding.
      feature_layers: the layers of the target whose outputs are its features: 0 is the embedding,
        i the output of the i-th block.
      target_num_layers: of the target; 0 if it is not known.
    """

    layer: DecoderConfig
    target_vocab_size: int
    feature_layers: tuple[int, ...]
    target_num_layers: int = 0

    def __post_init__(self) -> None:
        # The cache and the tensors' names are those of a single layer.
        if self.layer.num_layers != 1:
            raise ValueError(f"expected a head of one layer, got {self.layer.num_layers}")
        if self.layer.vocab_size > self.target_vocab_size:
            raise ValueError(
                f"expected at most the target's {self.target_vocab_size} tokens, got "
                f"{self.layer.vocab_size}"
            )

    @property
    def feature_dim(self) -> int:
        """Width of the features before they are fused."""
        return len(self.feature_layers) * self.layer.embed_dim


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Returns a low, a middle and a high layer of a target, as published heads take them."""
    return min(2, num_layers), num_layers // 2, max(num_layers - 3, 1)


class EagleLayer(nn.Module):
    """A decoder layer whose attention reads something else than the residual stream."""

    PARTS: ClassVar = ("attention", "mlp_norm", "mlp")

    config: DecoderConfig

    @nn.compact
    def __call__(
        self,
        x: Float32[Array, "b t d"],
        rope: tuple[Float32[Array, "b t half"], Float32[Array, "b t half"]],
        visible: Bool[Array, "b t s"],
        cache: KVCache,
        both: Float32[Array, "b t i"],
        block_offset: int = 0,
    ) -> tuple[Float32[Array, "b t d"], KVCache]:
        """Applies it to the stream, the one-layer cache, and what attention reads."""
        cfg = self.config
        mixed, cache = Attention(cfg, name="attention")(both, rope, visible, cache, block_offset)
        # The residual is the feature before its norm; see `speculators` for the other kind.
        x = x + mixed
        normed = RMSNorm(cfg.norm_epsilon, name="mlp_norm")(x)
        return x + FeedForward(cfg, name="mlp")(normed), cache


class EagleHead(nn.Module):
    """The layer, the norm and the head."""

    config: EagleConfig

    @nn.compact
    def __call__(
        self,
        embedded: Float[Array, "b t d"],
        features: Float[Array, "b t d"],
        cache: KVCache,
        logits_at: Int[Array, "b"] | None = None,
        positions: Int[Array, "b t"] | None = None,
        block_mask: Bool[Array, "#b t s"] | None = None,
    ) -> tuple[Float32[Array, "b l u"], Float32[Array, "b t d"], KVCache]:
        """Runs one block of pairs; see `apply_head`."""
        cfg = self.config.layer
        eps, num_tokens = cfg.norm_epsilon, embedded.shape[1]
        if positions is None:  # pair i has position i, although its token stands at i + 1
            positions = cache.length[:, None] + jnp.arange(num_tokens)
        mask = causal_mask(num_tokens) if block_mask is None else block_mask
        rope, visible = rope_cos_sin(cfg, positions), cache.visible(mask)
        x = features.astype(jnp.float32)
        normed = RMSNorm(eps, name="embedding_norm")(embedded.astype(jnp.float32))
        # [b t 2·d], embedding first: the order in which published heads have their columns.
        both = jnp.concatenate([normed, RMSNorm(eps, name="feature_norm")(x)], axis=-1)
        inputs = x, rope, visible, cache, both
        if self.is_initializing():
            layer = EagleLayer(cfg)
            nn.share_scope(self, layer)  # published heads have no name between
            x, cache = layer(*inputs)
        else:
            own = {name: self.get_variable("params", name) for name in EagleLayer.PARTS}
            offset = mask.shape[-1] - num_tokens  # as in `Decoder`
            x, cache = apply_layer(EagleLayer(cfg), cfg, offset, own, *inputs)
        outputs = x
        if logits_at is not None:
            # Before the norm and the head: one row of logits is made instead of t.
            outputs = jnp.take_along_axis(x, logits_at[:, None, None], axis=1)
        head = kernel_param(self, "head", (cfg.vocab_size, cfg.embed_dim))
        # `x` goes on without the norm, as it stands for the next feature.
        return linear(RMSNorm(eps, name="final_norm")(outputs), head), x, cache


def fuse(params: Params, features: Float[Array, "b t l d"]) -> Float32[Array, "b t d"]:
    """Returns one feature a token of the outputs of the target's `feature_layers`, [b t l d]."""
    b, t = features.shape[:2]
    # Layers side by side, [b t l·d], in the order of `feature_layers`.
    return linear(features.reshape(b, t, -1), params["fc"])


def apply_head(
    config: EagleConfig,
    params: Params,
    embedded: Float[Array, "b t d"],
    features: Float[Array, "b t d"],
    cache: KVCache,
    *,
    logits_at: Int[Array, "b"] | None = None,
    positions: Int[Array, "b t"] | None = None,
    block_mask: Bool[Array, "#b t s"] | None = None,
) -> tuple[Float32[Array, "b l u"], Float32[Array, "b t d"], KVCache]:
    """Runs the head on one block of pairs (feature of token i, embedding of token i + 1).

    Args:
      config: the head's.
      params: see `init_eagle_params`.
      embedded: the target's embeddings of the later tokens.
      features: fused features of the earlier ones, or the head's own outputs for them.
      cache: the head's; pair i has position and slot i.
      logits_at: compute logits at this one index of each row's block only.
      positions: of the pairs; None for a chain.
      block_mask: which pairs of the block each sees; see `ApplyFn`.

    Returns:
      logits: of the tokens after the later ones, among those the head can propose, [b t u] or
        [b 1 u].
      hidden: what takes the place of the later tokens' features, [b t d].
      cache: with the block written and nothing committed.
    """
    return EagleHead(config).apply(  # type: ignore[return-value]
        {"params": params["head"]},
        embedded,
        features,
        cache,
        logits_at=logits_at,
        positions=positions,
        block_mask=block_mask,
    )


def init_eagle_params(config: EagleConfig, rng_key: Array) -> dict[str, Any]:
    """Returns a head without training that can propose the first tokens; the key is consumed.

    Its parameters: `fc` [d l·d], `head` (the module's) and `ids` [u], the target's ids of the
    tokens that it can propose.
    """
    shape = config.layer
    head_key, fc_key = jax.random.split(rng_key)
    # Flax only needs shapes here; nothing in the cache is kept.
    cache = init_cache(shape, batch_size=1, capacity=2, dtype=jnp.float32)
    some = jnp.zeros([1, 1, shape.embed_dim], jnp.float32)
    fc = nn.initializers.normal(0.02)(fc_key, (shape.embed_dim, config.feature_dim))
    return {
        "fc": fc,
        "head": EagleHead(config).init(head_key, some, some, cache)["params"],
        "ids": jnp.arange(shape.vocab_size, dtype=jnp.int32),
    }
