"""A head of DFlash (arXiv 2602.06036) or DSpark (2607.05147) as a trainee; the target stays.

    text        t0 t1 t2 t3 t4 t5 ...            features of the target at every token
    blocks      [t1 mask mask] | [t4 mask mask] | ...                       one call for all of them

A block begins with a token of an answer, its anchor, and sees the features before it in its text,
and itself. A number of anchors of each row is drawn; which ones depends on the row alone, so that a
step is a function of its batch.

Every slot learns the target's distribution of its token, with a weight that falls from slot to
slot, as a draft counts only if all before it are accepted. A Markov head gets the text's previous
token. The confidence head learns the overlap of draft and target, which is how often `rejection`
accepts the draft.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from jspec.common.errors import check_range
from jspec.common.typing import Params
from jspec.drafters.dflash_head import (
    DflashConfig,
    confidence_of,
    fuse,
    init_dflash_params,
    markov_bias,
    markov_embedding,
    read_block,
    read_context,
    save_dflash,
)
from jspec.drafters.eagle_head import default_feature_layers
from jspec.models import init_cache
from jspec.models.layers import finish_logits, head_kernel, linear, look_up
from jspec.training.chain_loss import TargetStep, chain_loss, masked_mean, steps_after
from jspec.training.config import Trainee, TrainingConfig, cast
from jspec.training.heads import frequent_ids
from jspec.training.packing import Rows, block_mask
from jspec.training.target_states import TargetStates, target_states
from jspec.training.texts import Text
from jspec.weights.resolver import LoadedModel

_LEAST = 1e-6  # of a probability whose logarithm is taken


@dataclasses.dataclass(frozen=True)
class DflashTraining(TrainingConfig):
    """A training run of a head of DFlash.

    Attributes:
      num_layers: of the head.
      block_size: slots of a block, the anchor's included.
      num_anchors: blocks of each row.
      decay: weight of each slot's loss relative to the one before.
      vocab_size: tokens that the head can propose: the most frequent ones of the texts' answers; 0
        for all of the target's.
      feature_layers: of the target; empty takes a low, a middle and a high layer.
      hidden_dim: inner width of its feed-forward layers; 0 takes that of the target.
      markov_rank: of a Markov head; 0 for none.
      confidence_weight: of the confidence head's loss; 0 for no such head.
    """

    SAYS_NEXT: ClassVar[bool] = False

    drafter: str = "dflash"
    num_layers: int = 2
    block_size: int = 8
    num_anchors: int = 32
    decay: float = 0.8
    vocab_size: int = 0
    feature_layers: tuple[int, ...] = ()
    hidden_dim: int = 0
    markov_rank: int = 0
    confidence_weight: float = 0.0

    def make_trainee(self, target: LoadedModel, texts: Sequence[Text]) -> Trainee:
        """Returns a head without training, whose embeddings and head are the target's."""
        check_range("num_layers", self.num_layers, 1, 64)
        check_range("block_size", self.block_size, 2, 64)
        check_range("num_anchors", self.num_anchors, 1, self.seq_len)
        check_range("decay", self.decay, 0, 1)
        check_range("vocab_size", self.vocab_size, 0, 10**9)
        check_range("hidden_dim", self.hidden_dim, 0, 10**6)
        check_range("markov_rank", self.markov_rank, 0, 10**4)
        check_range("confidence_weight", self.confidence_weight, 0, 10**3)
        size = target.config.vocab_size
        ids = frequent_ids(texts, size, self.vocab_size) if self.vocab_size else np.arange(size)
        config = self._config(target, len(ids))
        for layer in config.feature_layers:
            check_range("feature_layers", layer, 0, target.config.num_layers)
        layers = (*config.feature_layers, target.config.num_layers)
        first = init_dflash_params(config, jax.random.key(self.recipe.seed))
        # These follow from the target, and are not trained.
        first = {name: leaf for name, leaf in first.items() if name not in ("ids", "head")}
        mean = jnp.mean(look_up(target.params["embedding"], jnp.asarray(ids)[None])[0], axis=0)
        first["mask"] = mean.astype(jnp.float32)

        def loss(params: Params, frozen: Params, rows: Rows) -> tuple[jax.Array, dict]:
            states = target_states(target.config, frozen, rows, ids, layers)
            states = jax.lax.stop_gradient(states)
            head = look_up(head_kernel(target.config, frozen), jnp.asarray(ids)[None])[0]
            return self._loss(config, params, head, states, rows, ids)

        def save(params: Params, folder: pathlib.Path) -> None:
            stored = cast(params, jnp.bfloat16)
            if config.is_cut:
                head = look_up(head_kernel(target.config, target.params), jnp.asarray(ids)[None])[0]
                stored |= {"head": head.astype(jnp.bfloat16), "ids": jnp.asarray(ids)}
            save_dflash(folder, config, stored)

        return Trainee(first, target.params, loss, save, layers)

    def _config(self, target: LoadedModel, num_ids: int) -> DflashConfig:
        """Returns the head's shape: layers of Qwen3 in the sizes of the target's."""
        shape = target.config
        layer = dataclasses.replace(
            shape.as_llama(), num_layers=self.num_layers, vocab_size=num_ids, tie_embeddings=False,
            hidden_dim=self.hidden_dim or shape.hidden_dim, family="qwen3", qk_norm="head",
            qkv_bias=False, out_bias=False, mlp_bias=False, logits_scale=shape.logits_scale,
            logits_softcap=shape.logits_softcap,
        )  # fmt: skip
        return DflashConfig(
            layer,
            shape.vocab_size,
            self.feature_layers or default_feature_layers(shape.num_layers),
            block_size=self.block_size,
            says_next=self.SAYS_NEXT,
            markov_rank=self.markov_rank,
            has_confidence=self.confidence_weight > 0,
            confidence_reads_markov=self.confidence_weight > 0 and self.markov_rank > 0,
            has_head=num_ids < shape.vocab_size,
            target_num_layers=shape.num_layers,
        )

    def _loss(
        self,
        config: DflashConfig,
        params: Params,
        head: Float32[Array, "u d"],
        states: TargetStates,
        rows: Rows,
        ids: Int32[np.ndarray, "u"],
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the loss of all blocks of a batch, and metrics."""
        anchors = draw_anchors(rows, self.num_anchors)
        hidden = block_outputs(config, params, states, rows, anchors)
        tokens = jnp.asarray(rows.tokens)

        def before(step: int) -> Float32[Array, "b n r"] | None:
            if not config.markov_rank:
                return None
            token = jnp.take_along_axis(tokens, anchors + step, axis=1, mode="clip")
            return markov_embedding(params, token)

        def draft_logits(step: int) -> Float32[Array, "b n u"]:
            logits = finish_logits(config.layer, linear(hidden[:, :, step], head))
            if (embedded := before(step)) is not None:
                logits += markov_bias(params, embedded)
            return logits

        target_step = steps_after(rows, states.logits, anchors, ids, first=1)
        sizes = {"num_steps": config.most_drafts, "decay": self.decay}
        value, metrics = chain_loss(draft_logits, target_step, is_frugal=True, **sizes)
        if config.has_confidence:
            error = jnp.stack([
                _confidence_loss(config, params, hidden[:, :, step], before(step),
                                 draft_logits(step), target_step(step))
                for step in range(config.most_drafts)
            ])  # fmt: skip
            weights = jnp.float32(self.decay) ** jnp.arange(len(error), dtype=jnp.float32)
            value += self.confidence_weight * jnp.sum(weights * error)
            metrics |= {"confidence_losses": error}
        return value, metrics


@dataclasses.dataclass(frozen=True)
class DsparkTraining(DflashTraining):
    """A training run of a head of DSpark: a slot says the token after it, and there are two heads.

    The fields are those of `DflashTraining`.
    """

    SAYS_NEXT: ClassVar[bool] = True

    drafter: str = "dspark"
    block_size: int = 7
    markov_rank: int = 128
    confidence_weight: float = 0.5


def _confidence_loss(
    config: DflashConfig,
    params: Params,
    hidden: Float32[Array, "b n d"],
    before: Float32[Array, "b n r"] | None,
    logits: Float32[Array, "b n u"],
    target: TargetStep,
) -> Float32[Array, ""]:
    """Returns the cross-entropy of the estimates to the share of drafts that is kept."""
    shared = jnp.sum(jnp.minimum(target.probs, jax.nn.softmax(logits)), axis=-1)
    shared = jax.lax.stop_gradient(shared)
    flat = None if before is None else before.reshape(-1, before.shape[-1])
    said = confidence_of(config, params, hidden.reshape(-1, hidden.shape[-1]), flat)
    said = jnp.clip(said.reshape(shared.shape), _LEAST, 1 - _LEAST)
    loss = -shared * jnp.log(said) - (1 - shared) * jnp.log1p(-said)
    return masked_mean(loss, target.can_hit)


def draw_anchors(rows: Rows, number: int) -> Int32[Array, "b n"]:
    """Returns the places of tokens that are followed by an answer's, drawn without replacement.

    A row with fewer of them is filled up with places that are not scored.
    """
    tokens = jnp.asarray(rows.tokens)
    t = tokens.shape[1]
    # A number that only this row has, so that a batch's anchors follow from its rows.
    seeds = jnp.sum(tokens * (1 + jnp.arange(t)), axis=1)
    keys = jax.vmap(jax.random.key)(seeds)
    noise = jax.vmap(lambda key: jax.random.uniform(key, [t]))(keys)
    noise = jnp.where(rows.is_scored(1), noise, -1.0)
    return jnp.sort(jax.lax.top_k(noise, min(number, t))[1].astype(jnp.int32), axis=1)


def block_outputs(
    config: DflashConfig,
    params: Params,
    states: TargetStates,
    rows: Rows,
    anchors: Int32[Array, "b n"],
) -> Float32[Array, "b n w d"]:
    """Returns what the head reads of every draft of the blocks after the anchors."""
    (b, n), t, size = anchors.shape, rows.tokens.shape[1], config.block_size
    positions = jnp.asarray(rows.positions)
    cache = init_cache(config.layer, batch_size=b, capacity=t + n * size, dtype=jnp.float32)
    features = fuse(config, params, states.features)
    cache = read_context(config, params, features, cache, positions=positions)
    cache = cache.commit(jnp.full([b], t, jnp.int32))
    first = jnp.take_along_axis(states.embedded, anchors[..., None], axis=1).astype(jnp.float32)
    masks = jnp.broadcast_to(params["mask"], (b, n, size - 1, first.shape[-1]))
    embedded = jnp.concatenate([first[:, :, None], masks], axis=2)
    places = jnp.take_along_axis(positions, anchors, axis=1)[..., None] + jnp.arange(size)
    # The anchor is in its block, and its feature is not known when that is drafted.
    mask = block_mask(rows, anchors, np.ones([size, size]), sees_anchor=False)
    mask = jnp.pad(mask, ((0, 0), (0, 0), (0, cache.num_slots - mask.shape[2])))
    hidden, _ = read_block(
        config, params, embedded.reshape(b, n * size, -1), cache,
        positions=places.reshape(b, -1), visible=mask,
    )  # fmt: skip
    return hidden.reshape(b, n, size, -1)[:, :, size - config.most_drafts :]
