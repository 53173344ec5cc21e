"""Texts packed into rows of equal length, and batches of rows in an order that a seed decides.

tokens      t0 t1 t2 t3 u0 u1 u2  0      a row holds several texts, one after another
text         1  1  1  1  2  2  2  0      which of them each token belongs to; 0 is padding
positions    0  1  2  3  0  1  2  0      of each token in its own text
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, Shaped

from jspec.common import processes
from jspec.common.errors import InputError
from jspec.common.typing import Params
from jspec.models import DecoderConfig, init_cache, make_apply
from jspec.training.texts import Text


class Rows(NamedTuple):
    """Rows that hold several texts.

    Attributes:
      tokens: [r t], 0 where padded.
      text: the number of each token's text in its row, from 1; 0 where padded, [r t].
      positions: of each token in its text, [r t].
      is_answer: whether each token belongs to an answer, [r t].
      outputs: of some of the target's layers at the tokens, [r t l d], if they were computed
        before; see `StateStore`.
      is_known: where an earlier draft agrees with the target, [r t]; see `boosted_loss`.
    """

    tokens: Int32[np.ndarray, "r t"]
    text: Int32[np.ndarray, "r t"]
    positions: Int32[np.ndarray, "r t"]
    is_answer: Bool[np.ndarray, "r t"]
    outputs: Shaped[np.ndarray, "r t l d"] | None = None
    is_known: Bool[np.ndarray, "r t"] | None = None

    def pick(self, rows: slice) -> "Rows":
        """Returns some of the rows."""
        return jax.tree.map(lambda leaf: leaf[rows], self)

    def visible(self) -> Bool[Array, "r t t"]:
        """Returns which tokens each token sees: itself and those before it in its text."""
        text = jnp.asarray(self.text)
        is_same = text[:, :, None] == text[:, None]
        return is_same & jnp.tril(jnp.ones([text.shape[1]] * 2, bool))

    def is_scored(self, ahead: int) -> Bool[Array, "r t"]:
        """Returns where the token `ahead` positions later is an answer's, in the same text."""
        text = jnp.asarray(self.text)
        goes_on = (shift_left(text, ahead) == text) & (text > 0)
        return shift_left(jnp.asarray(self.is_answer), ahead) & goes_on


def shift_left(leaf: Array, by: int) -> Array:
    """Moves [r t ...] along t, so that index i holds the value of index i + by; 0 past the end."""
    padding = [(0, 0), (0, by)] + [(0, 0)] * (leaf.ndim - 2)
    return jnp.pad(leaf, padding)[:, by:]


def block_mask(
    rows: Rows, anchors: Int32[Array, "b n"], block: np.ndarray, *, sees_anchor: bool
) -> Bool[Array, "b m u"]:
    """Returns what each slot of blocks after the t tokens of their row sees, one an anchor.

    That is its text up to the anchor and, of its block, what `block` [w w] says; m = n · w and
    u = t + m.
    """
    (b, n), width = anchors.shape, len(block)
    text = jnp.take_along_axis(rows.visible(), anchors[..., None], axis=1)
    if not sees_anchor:
        text &= jnp.arange(text.shape[2]) != anchors[..., None]
    blocks = jnp.asarray(np.kron(np.eye(n), block).astype(bool))
    blocks = jnp.broadcast_to(blocks, (b, *blocks.shape))
    return jnp.concatenate([jnp.repeat(text, width, axis=1), blocks], axis=2)


def pack(texts: Sequence[Text], seq_len: int) -> Rows:
    """Packs each text into the first row of `seq_len` tokens with room; longer texts are cut."""
    rows: list[Int32[np.ndarray, "4 t"]] = []
    room = np.full([len(texts)], seq_len)
    for text in texts:
        ids = text.ids[:seq_len]
        row = int(np.argmax(room >= len(ids)))
        if row == len(rows):
            rows.append(np.zeros([4, seq_len], np.int32))
        tokens, number, positions, is_answer = rows[row]
        begin = seq_len - room[row]
        span = slice(begin, begin + len(ids))
        tokens[span] = ids
        number[span] = number.max() + 1
        positions[span] = np.arange(len(ids))
        is_answer[begin + len(text.prompt) : begin + len(ids)] = 1
        room[row] -= len(ids)
    tokens, number, positions, is_answer = np.reshape(rows, [-1, 4, seq_len]).swapaxes(0, 1)
    return Rows(tokens, number, positions, is_answer.astype(bool))


class Batches:
    """The batches of a run: batch k is a function of texts, seed and k; epochs differ in order."""

    def __init__(
        self,
        texts: Sequence[Text],
        *,
        batch_size: int,
        seq_len: int,
        seed: int,
    ) -> None:
        """Packs the first epoch.

        Raises:
          InputError: there are not enough texts for one batch.
        """
        self._texts, self._seed = texts, seed
        self._batch_size, self._seq_len = batch_size, seq_len
        self._epoch, self._rows = 0, self._pack(0)
        num_rows = len(self._rows.tokens)
        self.num_batches = num_rows // batch_size  # of an epoch
        if not self.num_batches:
            raise InputError(
                f"expected texts for {batch_size} rows of {seq_len} tokens, got {num_rows}: more "
                "texts, or a smaller batch_size or seq_len"
            )

    def __getitem__(self, index: int) -> Rows:
        """Returns a batch; every epoch has as many as the first."""
        epoch, number = divmod(index, self.num_batches)
        if epoch != self._epoch:
            self._epoch, self._rows = epoch, self._pack(epoch)
            if len(self._rows.tokens) < self._batch_size:  # an order that is packed more tightly
                self._rows = self._pack(0)
        begin = min(number * self._batch_size, len(self._rows.tokens) - self._batch_size)
        return self._rows.pick(slice(begin, begin + self._batch_size))

    def _pack(self, epoch: int) -> Rows:
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._texts))
        return pack([self._texts[i] for i in order], self._seq_len)


def iterate_rows(rows: Rows, batch_size: int) -> Iterator[Rows]:
    """Yields all rows in batches; empty rows complete the last."""
    missing = ((0, -len(rows.tokens) % batch_size), (0, 0))
    whole = jax.tree.map(lambda leaf: np.pad(leaf, missing), rows)
    for begin in range(0, len(whole.tokens), batch_size):
        yield whole.pick(slice(begin, begin + batch_size))


def compute_by_text(
    compute: Callable[[Rows], Array], texts: Sequence[Text], *, seq_len: int, batch_size: int
) -> dict[tuple[int, ...], Shaped[np.ndarray, "t *rest"]]:
    """Returns what `compute`, (rows) -> [r t ...], gives for each text, by its tokens."""
    longest_first = sorted(texts, key=lambda text: len(text.ids), reverse=True)  # packs tightly
    by_text = {}
    for batch in iterate_rows(pack(longest_first, seq_len), batch_size):
        values = processes.fetch(compute(batch))
        by_text |= {ids: values[span] for span, ids in _spans(batch)}
    return by_text


def take_by_text(by_text: Mapping[tuple[int, ...], np.ndarray], rows: Rows) -> np.ndarray:
    """Returns the values of `compute_by_text` for rows of the same texts; 0 where padded."""
    example = next(iter(by_text.values()))
    values = np.zeros([*rows.tokens.shape, *example.shape[1:]], example.dtype)
    for span, ids in _spans(rows):
        values[span] = by_text[ids]
    return values


def _spans(rows: Rows) -> Iterator[tuple[tuple[int, slice], tuple[int, ...]]]:
    """Yields where each text is, as an index (row, tokens), and its tokens."""
    for row, text in enumerate(rows.text):
        for number in range(1, text.max() + 1):
            first, last = np.flatnonzero(text == number)[[0, -1]]
            span = row, slice(int(first), int(last) + 1)
            yield span, tuple(rows.tokens[span].tolist())


def packed_hidden(
    config: DecoderConfig,
    params: Params,
    rows: Rows,
    dtype: jax.typing.DTypeLike,
    layers: tuple[int, ...] = (),
) -> Float32[Array, "r t *l d"]:
    """Returns a model's last hidden states at every token, normed, or the outputs of `layers`.

    See `ApplyFn`; keys and values have the type `dtype`.
    """
    r, t = rows.tokens.shape
    _, hidden, _ = make_apply(config)(
        params,
        jnp.asarray(rows.tokens),
        init_cache(config, batch_size=r, capacity=t, dtype=dtype),
        positions=jnp.asarray(rows.positions),
        block_mask=rows.visible(),
        hidden_layers=layers,
        logits_at=jnp.zeros([r], jnp.int32),
    )
    return hidden
