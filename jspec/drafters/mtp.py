"""The layer that a target has for multi-token prediction proposes (MiMo, arXiv 2505.07608).

The layer was trained to say the token after the next. It lies in the target's folder, its
embeddings and its head are the target's, and a feature is the target's normed last output. For a
second draft and further ones it reads its own outputs, for which it was not trained.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jspec.common.errors import InputError
from jspec.common.typing import Params, Tokens
from jspec.drafters.features import PairDrafter
from jspec.drafters.spec import BuiltDrafter, DrafterSpec, growing_fields
from jspec.models.cache import KVCache
from jspec.models.config import DecoderConfig
from jspec.models.decoder import apply_mtp, mtp_config
from jspec.models.layers import finish_logits, head_kernel, linear, look_up, normed_outputs, scaled
from jspec.speculation.types import Kind, RoundInputs


@dataclasses.dataclass(frozen=True)
class MtpDrafter(PairDrafter):
    """Proposes what the layer draws, or what it finds likeliest; its parameters are the target's.

    Attributes:
      config: the target's.
    """

    config: DecoderConfig = dataclasses.field(kw_only=True)
    kind = Kind("mtp", 0.6, 0.5, is_certain=True)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The target's last layer."""
        return (self.config.num_layers,)

    @property
    def layer(self) -> DecoderConfig:
        """The shape of the layer."""
        return mtp_config(self.config)

    def fuse(self, params: Params, hidden: Float[Array, "b t l d"]) -> Float[Array, "b t d"]:
        """Returns the target's outputs before its norm, whose scale is not at hand here."""
        return hidden[:, :, 0]

    def read_features(
        self, inputs: RoundInputs, features: Float[Array, "b t d"]
    ) -> Float32[Array, "b t d"]:
        """Returns them normed, as the layer's own outputs are."""
        return normed_outputs(self.config, inputs.view.params, features.astype(jnp.float32))

    def feed(
        self,
        params: Params,
        inputs: RoundInputs,
        tokens: Tokens,
        features: Float[Array, "b t d"],
        cache: KVCache,
        *,
        logits_at: Any = None,
        **options: Any,
    ) -> tuple[Float32[Array, "b l u"], Float32[Array, "b t d"], KVCache]:
        """Runs the layer, see `apply_mtp`, and the target's head on its outputs."""
        target, cfg = inputs.view.params, self.config
        embedded = scaled(look_up(target["embedding"], tokens), cfg.embedding_scale)
        hidden, cache = apply_mtp(cfg, target, embedded, features, cache, **options)
        outputs = hidden
        if logits_at is not None:
            # Before the head, the largest product of all: one row of logits instead of t.
            outputs = jnp.take_along_axis(hidden, logits_at[:, None, None], axis=1)
        logits = finish_logits(cfg, linear(outputs, head_kernel(cfg, target)))
        return self.without_padding(params, logits), hidden, cache


def build(spec: DrafterSpec) -> BuiltDrafter:
    """Returns the drafter over the target's own layer."""
    config = spec.target_config
    if not config.num_mtp_layers:
        raise InputError(
            "the drafter 'mtp' expects a target with a layer for multi-token prediction, such as "
            f"a MiMoForCausalLM with num_nextn_predict_layers 1; got a {config.family} without one"
        )
    return BuiltDrafter(MtpDrafter(**growing_fields(spec), config=config, dtype=spec.dtype))
