"""Look-ahead embeddings (PaSS, arXiv 2311.13581) as a trainee; the target stays as it is.

    text        t0 t1 t2 t3 t4 t5 ...          a call without gradients writes its keys and values
    block       [L0 L1] after t1 | [L0 L1] after t5 | ...                        a second call

Each group of embeddings follows one position of a text, its anchor. It sees the text up to the
anchor and itself. The paper takes one random anchor a text; here there is one every few positions.
Where the first one lies depends on the text alone, so that a step is a function of its batch.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from jspec.common.errors import check_range
from jspec.common.typing import Params
from jspec.drafters.heads.lookahead_embeddings import (
    LookaheadConfig,
    init_lookahead_params,
    save_lookahead,
)
from jspec.models import init_cache, make_apply
from jspec.models.cache import KVCache
from jspec.training.chain_loss import TargetStep, chain_loss
from jspec.training.config import TrainingConfig
from jspec.training.packing import Rows
from jspec.training.texts import Text
from jspec.training.trainee import SCORE, LossFn, Trainee
from jspec.weights.resolver import LoadedModel


@dataclasses.dataclass(frozen=True)
class LookaheadTraining(TrainingConfig):
    """A training run of look-ahead embeddings.

    Attributes:
      num_tokens: number of embeddings; a round has one draft more.
      stride: positions from one anchor to the next.
      decay: weight of each embedding's loss relative to the one before.
    """

    OUTPUT = "head"

    drafter: str = "lookahead"
    num_tokens: int = 4
    stride: int = 8
    decay: float = 1.0

    def make_trainee(self, target: LoadedModel, texts: Sequence[Text]) -> Trainee:
        """Returns untrained embeddings; the score counts both target calls of a round."""
        del texts
        check_range("num_tokens", self.num_tokens, 1, 63)
        check_range("decay", self.decay, 0, 10)
        check_range("stride", self.stride, 1, self.seq_len)
        config = LookaheadConfig(target.config.embed_dim, self.num_tokens)
        key = jax.random.key(self.recipe.seed)
        first = init_lookahead_params(config, target.params["embedding"], key)

        def save(params: Params, folder: pathlib.Path) -> None:
            save_lookahead(folder, config, params, target.config)

        return Trainee(first, self._make_loss(target), save)

    def _make_loss(self, target: LoadedModel) -> LossFn:
        """Returns the loss of all groups of embeddings, which are one block of a second call."""
        shape, num, stride = target.config, self.num_tokens, self.stride
        apply, dtype = make_apply(shape), target.params["embedding"].dtype

        def read(params: Params, rows: Rows) -> tuple[Array, KVCache]:
            """Returns the target's logits at every token, [b t v], and its keys and values."""
            b, t = rows.tokens.shape
            capacity = t + t // stride * num
            cache = init_cache(shape, batch_size=b, capacity=capacity, dtype=dtype)
            positions, mask = jnp.asarray(rows.positions), rows.visible()
            tokens = jnp.asarray(rows.tokens)
            logits, _, cache = apply(params, tokens, cache, positions=positions, block_mask=mask)
            return logits, cache

        def loss(params: Params, target_params: Params, rows: Rows) -> tuple[jax.Array, dict]:
            target_logits, cache = jax.lax.stop_gradient(read(target_params, rows))
            anchors = anchors_of(rows, stride)
            b, n = anchors.shape
            block = jnp.broadcast_to(params["embeddings"], (b, n, num, shape.embed_dim))
            positions = _take(jnp.asarray(rows.positions), anchors)[..., None] + 1 + jnp.arange(num)
            logits, _, _ = apply(
                target_params,
                block.reshape(b, n * num, -1),
                cache,
                positions=positions.reshape(b, -1),
                block_mask=group_mask(rows, anchors, num),
            )
            logits = logits.reshape(b, n, num, -1)
            value, metrics = chain_loss(
                lambda step: logits[:, :, step],
                _anchored_steps(rows, anchors, target_logits),
                num_steps=num,
                decay=self.decay,
            )
            return value, metrics | {SCORE: (1 + metrics[SCORE]) / 2}

        return loss


def anchors_of(rows: Rows, stride: int) -> Int32[Array, "b n"]:
    """Returns the positions after which embeddings look ahead."""
    tokens = jnp.asarray(rows.tokens)
    begin = jnp.sum(tokens, axis=1, keepdims=True) % stride  # arbitrary, but the row's own
    return begin + stride * jnp.arange(tokens.shape[1] // stride, dtype=jnp.int32)


def group_mask(rows: Rows, anchors: Int32[Array, "b n"], num: int) -> Bool[Array, "b m u"]:
    """Returns what each embedding sees: its text up to the anchor, and its group up to itself.

    Groups have `num` embeddings; m = n · num, u = t + m.
    """
    b, n = anchors.shape
    text = jnp.take_along_axis(rows.visible(), anchors[..., None], axis=1)
    group = jnp.asarray(np.kron(np.eye(n), np.tril(np.ones([num, num]))).astype(bool))
    group = jnp.broadcast_to(group, (b, n * num, n * num))
    return jnp.concatenate([jnp.repeat(text, num, axis=1), group], axis=2)


def _anchored_steps(
    rows: Rows, anchors: Int32[Array, "b n"], logits: Float32[Array, "b t v"]
) -> Callable[[int], TargetStep]:
    """Returns the target's side of chains that begin after the anchors, from its logits."""

    def target_step(step: int) -> TargetStep:
        ahead = 2 + step
        is_scored = _take(rows.is_scored(ahead), anchors)
        at = anchors[..., None] + ahead - 1
        here = jnp.take_along_axis(logits, at, axis=1, mode="clip")
        return TargetStep(jax.nn.softmax(here), jnp.argmax(here, axis=-1), is_scored, is_scored)

    return target_step


def _take(leaf: Array, anchors: Int32[Array, "b n"]) -> Array:
    """Returns the entries [b n] of [b t] at the anchors."""
    return jnp.take_along_axis(leaf, anchors, axis=1)
