"""Look-ahead embeddings (PaSS, arXiv 2311.13581) as a trainee; the target stays as it is.

    text slots    t0 t1 t2 t3 t4 t5 ...        a call without gradients writes their keys and values
    block         [LA 0] [LA 1] behind t1  |  [LA 0] [LA 1] behind t5  | ...      a second call

Each group of embeddings stands behind one place of a text, an anchor. It sees the text up to there
and itself. The paper takes one random place of a text; here every few places are anchors, and where
they begin follows from the text itself, so that a step is a function of its batch.
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
from jspec.drafters.heads.lookahead_checkpoint import save_lookahead
from jspec.drafters.heads.lookahead_module import LookaheadConfig, init_lookahead_params
from jspec.models import init_cache, make_apply
from jspec.models.cache import KVCache
from jspec.training.chain_loss import Seen, ahead, chain_loss, report, weigh
from jspec.training.eagle_unroll import Places
from jspec.training.packed import places_of
from jspec.training.texts import Rows, Text
from jspec.training.trainee import SCORE, Trainee
from jspec.training.training import Training
from jspec.weights.resolver import LoadedModel


@dataclasses.dataclass(frozen=True)
class LookaheadTraining(Training):
    """A training run of look-ahead embeddings; see `Training`.

    Attributes:
      num_tokens: how many; a round has one draft more.
      stride: places of a text from one anchor to the next.
      decay: weight of each embedding's loss relative to the one before.
    """

    OUTPUT = "head"

    drafter: str = "lookahead"
    num_tokens: int = 4
    stride: int = 8
    decay: float = 1.0

    def make_trainee(self, target: LoadedModel, texts: Sequence[Text]) -> Trainee:
        """Returns embeddings that mean nothing yet; see `Training.make_trainee`."""
        del texts
        check_range("num_tokens", self.num_tokens, 1, 63)
        check_range("decay", self.decay, 0, 10)
        check_range("stride", self.stride, 1, self.seq_len)
        config = LookaheadConfig(target.config.embed_dim, self.num_tokens)
        key = jax.random.key(self.recipe.seed)
        first = init_lookahead_params(config, target.params["embedding"], key)
        return make_lookahead_trainee(target, config, first, stride=self.stride, decay=self.decay)


def make_lookahead_trainee(
    target: LoadedModel, config: LookaheadConfig, first: Params, *, stride: int, decay: float
) -> Trainee:
    """Returns embeddings to train; the score counts both calls of a round.

    Args:
      target: the frozen target.
      config: shape of the embeddings.
      first: they before the first step.
      stride: places from one anchor to the next.
      decay: weight of each embedding's loss relative to the one before.
    """
    shape, num = target.config, config.num_tokens
    apply, dtype = make_apply(shape), target.params["embedding"].dtype

    def read(params: Params, rows: Rows) -> tuple[Array, KVCache]:
        """Returns the target's logits at every token, [b t v], and its keys and values."""
        tokens, places = jnp.asarray(rows.tokens), places_of(rows)
        b, t = tokens.shape
        room = t + t // stride * num
        cache = init_cache(shape, batch_size=b, capacity=room, dtype=dtype)
        mask = places.visible()
        logits, _, cache = apply(params, tokens, cache, positions=places.positions, block_mask=mask)
        return logits, cache

    def loss(params: Params, target_params: Params, rows: Rows) -> tuple[jax.Array, dict]:
        target_logits, cache = jax.lax.stop_gradient(read(target_params, rows))
        places, anchors = places_of(rows), anchors_of(rows, stride)
        b, n = anchors.shape
        block = jnp.broadcast_to(params["embeddings"], (b, n, num, config.embed_dim))
        positions = _take(places.positions, anchors)[..., None] + 1 + jnp.arange(num)
        logits, _, _ = apply(
            target_params,
            block.reshape(b, n * num, -1),
            cache,
            positions=positions.reshape(b, -1),
            block_mask=look_mask(places, anchors, num),
        )
        logits = logits.reshape(b, n, num, -1)
        value, metrics = chain_loss(
            lambda step: logits[:, :, step],
            see_at(rows, anchors, target_logits),
            num_steps=num,
            decay=decay,
        )
        return value, report(metrics) | {SCORE: (1 + metrics.length) / 2}

    def evaluate(params: Params, target_params: Params, rows: Rows) -> tuple[dict, jax.Array]:
        return weigh(loss(params, target_params, rows)[1], rows)

    def save(params: Params, folder: pathlib.Path) -> None:
        save_lookahead(folder, config, params, shape)

    return Trainee(first, loss, evaluate, save)


def anchors_of(rows: Rows, stride: int) -> Int32[Array, "b n"]:
    """Returns the places behind which is looked ahead, beginning where the row's tokens say."""
    tokens = jnp.asarray(rows.tokens)
    begin = jnp.sum(tokens, axis=1, keepdims=True) % stride
    return begin + stride * jnp.arange(tokens.shape[1] // stride, dtype=jnp.int32)


def look_mask(places: Places, anchors: Int32[Array, "b n"], num: int) -> Bool[Array, "b m u"]:
    """Returns what each embedding of each group sees: its text up to the anchor, and its group.

    Args:
      places: of the text's tokens, [b t].
      anchors: [b n].
      num: embeddings of a group; m = n · num, u = t + m.
    """
    b, n = anchors.shape
    text = jnp.take_along_axis(places.visible(), anchors[..., None], axis=1)
    group = jnp.asarray(np.kron(np.eye(n), np.tril(np.ones([num, num]))).astype(bool))
    group = jnp.broadcast_to(group, (b, n * num, n * num))
    return jnp.concatenate([jnp.repeat(text, num, axis=1), group], axis=2)


def see_at(
    rows: Rows, anchors: Int32[Array, "b n"], logits: Float32[Array, "b t v"]
) -> Callable[[int], Seen]:
    """Returns the target's side of chains that begin behind the anchors; see `chain_loss`.

    Args:
      rows: the texts.
      anchors: [b n].
      logits: the target's, at every token.
    """
    places, is_answer = places_of(rows), jnp.asarray(rows.is_answer)

    def see(step: int) -> Seen:
        by = 2 + step
        is_scored = _take(ahead(is_answer, by) & places.has_ahead(by), anchors)
        at = anchors[..., None] + by - 1
        there = jnp.take_along_axis(logits, at, axis=1, mode="clip")
        distribution = jax.nn.softmax(there), jnp.argmax(there, axis=-1)
        return Seen(*distribution, is_scored, is_scored)

    return see


def _take(leaf: Array, anchors: Int32[Array, "b n"]) -> Array:
    """Returns the entries [b n] of [b t] at the anchors."""
    return jnp.take_along_axis(leaf, anchors, axis=1)
