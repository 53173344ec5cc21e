"""Look-ahead embeddings (PaSS, arXiv 2311.13581) as a trainee; the target stays as it is.

    text        t0 t1 t2 t3 t4 t5 ...          a call without gradients writes its keys and values
    block       [L0 L1] after t1 | [L0 L1] after t5 | ...                        a second call

Each group of embeddings follows one position of a text, its anchor. It sees the text up to the
anchor and itself. The paper takes one random anchor a text; here there is one every few positions.
Where the first one lies depends on the text alone, so that a step is a function of its batch.
"""

import dataclasses
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jspec.common.errors import check_range
from jspec.common.typing import Params
from jspec.drafters.lookahead import (
    LookaheadConfig,
    init_lookahead_params,
    save_lookahead,
)
from jspec.models import init_cache, make_apply
from jspec.training.chain_loss import SCORE, chain_loss, steps_after
from jspec.training.config import LossFn, Trainee, TrainingConfig
from jspec.training.packing import Rows, block_mask
from jspec.training.texts import Text
from jspec.weights.resolver import LoadedModel


@dataclasses.dataclass(frozen=True)
class LookaheadTraining(TrainingConfig):
    """A training run of look-ahead embeddings.

    Attributes:
      num_tokens: number of embeddings; a round has one draft more.
      stride: positions from one anchor to the next.
      decay: weight of each embedding's loss relative to the one before.
    """

    drafter: str = "lookahead"
    num_tokens: int = 4
    stride: int = 8
    decay: float = 1.0

    def make_trainee(self, target: LoadedModel, texts: Sequence[Text]) -> Trainee:
        """Returns untrained embeddings; the score counts both target calls of a round."""
        check_range("num_tokens", self.num_tokens, 1, 63)
        check_range("decay", self.decay, 0, 10)
        check_range("stride", self.stride, 1, self.seq_len)
        config = LookaheadConfig(target.config.embed_dim, self.num_tokens)
        key = jax.random.key(self.recipe.seed)
        first = init_lookahead_params(config, target.params["embedding"], key)

        def save(params: Params, folder: pathlib.Path) -> None:
            save_lookahead(folder, config, params, target.config)

        return Trainee(first, target.params, self._make_loss(target), save)

    def _make_loss(self, target: LoadedModel) -> LossFn:
        """Returns the loss of all groups of embeddings, which are one block of a second call."""
        shape, num, stride = target.config, self.num_tokens, self.stride
        ids = np.arange(shape.vocab_size)
        apply, dtype = make_apply(shape), target.params["embedding"].dtype

        def loss(params: Params, target_params: Params, rows: Rows) -> tuple[jax.Array, dict]:
            (b, t), positions = rows.tokens.shape, jnp.asarray(rows.positions)
            cache = init_cache(shape, batch_size=b, capacity=t + t // stride * num, dtype=dtype)
            tokens, mask = jnp.asarray(rows.tokens), rows.visible()
            read = apply(target_params, tokens, cache, positions=positions, block_mask=mask)
            target_logits, _, cache = jax.lax.stop_gradient(read)
            anchors = anchors_of(rows, stride)
            n = anchors.shape[1]
            positions = jnp.take_along_axis(positions, anchors, axis=1)[..., None]
            positions = (positions + 1 + jnp.arange(num)).reshape(b, -1)
            block = jnp.tile(params["embeddings"], (b, n, 1))
            # Each embedding sees its group up to itself.
            mask = block_mask(rows, anchors, np.tril(np.ones([num, num])), sees_anchor=True)
            logits = apply(target_params, block, cache, positions=positions, block_mask=mask)[0]
            logits = logits.reshape(b, n, num, -1)
            target_step = steps_after(rows, target_logits, anchors, ids, first=2)
            value, metrics = chain_loss(
                lambda step: logits[:, :, step], target_step, num_steps=num, decay=self.decay
            )
            return value, metrics | {SCORE: (1 + metrics[SCORE]) / 2}

        return loss


def anchors_of(rows: Rows, stride: int) -> Int32[Array, "b n"]:
    """Returns the positions after which embeddings look ahead."""
    tokens = jnp.asarray(rows.tokens)
    begin = jnp.sum(tokens, axis=1, keepdims=True) % stride  # arbitrary, but the row's own
    return begin + stride * jnp.arange(tokens.shape[1] // stride, dtype=jnp.int32)
