"""Blockwise parallel decoding (Stern et al., arXiv 1811.03115): greedy heads for later positions.

    target   | ... tn-1  tn | last |          `last` came from the hidden state at tn
    heads    |           tn | head 0: d1 | head 1: d2 | head 2: d3

    normed output of the last layer at token i  -- up, relu -->  inner [h·f]
    inner -- down of head j, + the normed output -- the target's own head -->  token i + 2 + j

One feed-forward layer of h times the width, h outputs with a residual connection each and the same
projection onto the vocabulary for all (section 6; the paper's first output, for token i + 1, is
left to the target as it is). Each head proposes its most likely token under the row's processors.
The draft follows from the context alone, so it has no distribution to report.

A folder holds

```
  config.json           blockwise_num_heads, blockwise_hidden_size (F), and the target's sizes
  model.safetensors
    up.weight           [H·F, D]   and up.bias [H·F]
    down.{i}.weight     [D, H·F]   and down.{i}.bias [D], of head i of H
```
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Float32, Int32, Key

from jspec.common.typing import Params, RowTokens
from jspec.drafters.chain import ChainDrafter
from jspec.drafters.head_folder import HeadFormat, HeadSizes, load_head, save_head
from jspec.drafters.memory import ReadingLastOutput
from jspec.drafters.spec import BuiltDrafter, DrafterSpec
from jspec.models import DecoderConfig
from jspec.models.layers import finish_logits, head_kernel, linear
from jspec.sampling.distribution import best_token
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.types import Kind, Proposal, RoundInputs
from jspec.weights.parameter import Parameter, one_tensor

_KEYS = {"num_heads": "blockwise_num_heads", "hidden_dim": "blockwise_hidden_size"}


@dataclasses.dataclass(frozen=True)
class BlockwiseConfig(HeadSizes):
    """The shape of the heads.

    Attributes:
      embed_dim: width of the target's residual stream, d.
      hidden_dim: inner width for each head, f.
      num_heads: positions ahead, h.
    """

    embed_dim: int
    hidden_dim: int
    num_heads: int


def inner_layer(params: Params, hidden: Float[Array, "b t d"]) -> Float32[Array, "b t f"]:
    """Returns what every head reads, [b t h·f], from the target's last hidden states, normed."""
    return jax.nn.relu(_affine(params["up"], hidden))


def place_output(
    params: Params, index: int, inner: Float32[Array, "b t f"], hidden: Float[Array, "b t d"]
) -> Float32[Array, "b t d"]:
    """Returns head `index`'s stand-in for the normed output at a later position.

    `inner` is that of `inner_layer`; the target's own head reads the result.
    """
    # The residual of the paper's section 6: the target's own head can read the sum.
    return hidden.astype(jnp.float32) + _affine(params[f"down_{index}"], inner)


def _affine(params: Params, inputs: Float[Array, "b t i"]) -> Float32[Array, "b t o"]:
    return linear(inputs, params["kernel"]) + params["bias"].astype(jnp.float32)


def init_blockwise_params(config: BlockwiseConfig, rng_key: Array) -> dict[str, Any]:
    """Returns heads that all predict what the target's own head predicts; the key is consumed.

    Returns:
      `up` and `down_0`, `down_1`, ..., each with `kernel` ([h·f d]; [d h·f]) and `bias`; float32.
    """
    # Zeros below: the heads begin as the target's own head.
    d, wide = config.embed_dim, config.num_heads * config.hidden_dim
    up = {"kernel": jax.random.normal(rng_key, (wide, d)) * d**-0.5, "bias": jnp.zeros([wide])}
    downs = {
        f"down_{index}": {"kernel": jnp.zeros([d, wide]), "bias": jnp.zeros([d])}
        for index in range(config.num_heads)
    }
    return {"up": up} | downs


def blockwise_rules(config: BlockwiseConfig) -> list[Parameter]:
    """Returns the table from the heads' tensors to their parameters."""
    d, wide = config.embed_dim, config.num_heads * config.hidden_dim
    rules = [
        one_tensor(("up", "kernel"), "up.weight", (wide, d)),
        one_tensor(("up", "bias"), "up.bias", (wide,)),
    ]
    for index in range(config.num_heads):
        path, name = f"down_{index}", f"down.{index}"
        rules.append(one_tensor((path, "kernel"), f"{name}.weight", (d, wide)))
        rules.append(one_tensor((path, "bias"), f"{name}.bias", (d,)))
    return rules


_FORMAT = HeadFormat(
    what="heads of blockwise decoding",
    architecture="BlockwiseHeads",
    keys=_KEYS,
    read_config=lambda raw, target, _: BlockwiseConfig(
        target.embed_dim, raw.get(_KEYS["hidden_dim"], 0), raw[_KEYS["num_heads"]]
    ),
    rules=blockwise_rules,
)
load_blockwise = functools.partial(load_head, _FORMAT)
save_blockwise = functools.partial(save_head, _FORMAT)


class _Asking(struct.PyTreeNode):
    inner: Float32[Array, "b 1 f"]  # output of the layer that they share, [b 1 h·f]
    index: Int32[Array, ""]  # of the head whose turn it is


def take_best(
    logits: Float32[Array, "b v"], settings: SamplingSettings, rng_keys: Key[Array, "b"]
) -> tuple[RowTokens, Float32[Array, "b v"]]:
    """Takes each row's most likely token, whatever its temperature; see `draw_from_distribution`.

    The distribution has all probability on it. Where every token is forbidden it is `NO_TOKEN`.
    """
    # With processors, so that a token they forbid is never proposed.
    best = best_token(settings.process(logits))
    return best, jax.nn.one_hot(best, logits.shape[-1], dtype=jnp.float32)


@dataclasses.dataclass(frozen=True)
class BlockwiseDrafter(ReadingLastOutput, ChainDrafter):
    """Proposes every head's most likely token.

    Attributes:
      config: of the heads, of which there are at least as many as drafts.
      target: the target's shape.
    """

    config: BlockwiseConfig = dataclasses.field(kw_only=True)
    target: DecoderConfig = dataclasses.field(kw_only=True)
    kind = Kind("blockwise", 0.5, 0.4, is_certain=True)

    def propose(
        self, params: Params, state: Float32[Array, "b d"], inputs: RoundInputs
    ) -> tuple[Proposal, Float32[Array, "b d"]]:
        """Asks the heads in turn, in a loop on the device, for as long as any is wanted."""
        target_params = inputs.view.params
        hidden = self.read(target_params, state)
        # The target's own kernel, tied or not: the heads have no vocabulary matrix.
        head = head_kernel(self.target, target_params)

        places = [
            functools.partial(place_output, params, index, hidden=hidden)
            for index in range(self.num_draft_tokens)
        ]

        def first(asking: _Asking, token: RowTokens) -> tuple[Array, _Asking]:
            # The shared layer runs once a round.
            return later(asking.replace(inner=inner_layer(params, hidden)), token)

        def later(asking: _Asking, token: RowTokens) -> tuple[Array, _Asking]:
            # Only the head whose turn it is goes through the projection, the expensive part.
            outputs = jax.lax.switch(asking.index, places, asking.inner)
            logits = finish_logits(self.target, linear(outputs, head))
            return logits[:, 0, : self.vocab_size], asking.replace(index=asking.index + 1)

        # The loop's state needs the shape of the inner layer before it has run.
        width = self.config.num_heads * self.config.hidden_dim
        nothing = jnp.zeros([state.shape[0], 1, width], jnp.float32)
        asking = _Asking(nothing, jnp.int32(0))
        proposal, _, _ = self.draw_chain(first, later, asking, inputs, draw=take_best)
        # None stands for certain drafts: no [b w v] array goes to the verify call.
        return proposal.replace(probs=None), state


def build(spec: DrafterSpec) -> BuiltDrafter:
    """Returns the drafter over a trained head."""
    target = spec.target_config
    heads = load_blockwise(spec.head_folder("blockwise"), target, spec.dtype)
    fields = spec.with_at_most(heads.config.num_heads).chain_fields
    # `draft_confidence` is another member's, if it is set: certain drafts are never unsure.
    fields["min_confidence"] = 0.0
    drafter = BlockwiseDrafter(config=heads.config, target=target, **fields)
    return BuiltDrafter(drafter, heads.params)
