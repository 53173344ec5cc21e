"""Answers of a target, packed into rows of equal length, in an order that a seed decides."""

import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int32, Shaped

from jspec.common.errors import InputError


class Text(NamedTuple):
    """One prompt and the target's answer to it.

    Attributes:
      prompt: ids.
      answer: ids.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """Returns the prompt's and the answer's."""
        return (*self.prompt, *self.answer)


class Rows(NamedTuple):
    """Several texts a row, one behind another.

    Attributes:
      tokens: [r t], 0 behind the end.
      text: which text each belongs to, counted from 1 in each row; 0 behind the end, [r t].
      positions: in the text, [r t].
      is_answer: the tokens of answers, [r t].
      outputs: of layers of the target at the tokens, where they were computed before,
        [r t l d]; see `StateStore`.
      is_known: places whose next token a draft trained before says as the target does, [r t],
        where they were marked; see `make_marks`.
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


def pack(texts: Sequence[Text], seq_len: int) -> Rows:
    """Returns rows of texts, each whole in the first row with room; one longer than a row is cut.

    Args:
      texts: what to pack.
      seq_len: tokens of a row, t.
    """
    ids = [text.ids[:seq_len] for text in texts]
    rows = _first_fit([len(one) for one in ids], seq_len)
    packed = Rows(
        *(np.zeros([len(rows), seq_len], np.int32) for _ in range(3)),
        np.zeros([len(rows), seq_len], bool),  # type: ignore
    )
    for row, members in enumerate(rows):
        begin = 0
        for number, index in enumerate(members, 1):
            end = begin + len(ids[index])
            packed.tokens[row, begin:end] = ids[index]
            packed.text[row, begin:end] = number
            packed.positions[row, begin:end] = np.arange(end - begin)
            packed.is_answer[row, begin + len(texts[index].prompt) : end] = True
            begin = end
    return packed


def _first_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Returns which of things of those lengths, at most `size`, go into which bin of that size."""
    room = np.full([len(lengths)], size)
    bins: list[list[int]] = [[] for _ in lengths]
    for index, length in enumerate(lengths):
        first = int(np.argmax(room >= length))
        bins[first].append(index)
        room[first] -= length
    return [members for members in bins if members]


class Batches:
    """The batches of a training run: batch k is a function of the texts, the seed and k alone."""

    def __init__(
        self,
        texts: Sequence[Text],
        *,
        batch_size: int,
        seq_len: int,
        seed: int,
        fill: Callable[[Rows], Rows] = lambda rows: rows,
    ) -> None:
        """Prepares; every epoch is another order of the texts, packed anew.

        Args:
          texts: to train on.
          batch_size: rows of a batch.
          seq_len: tokens of a row.
          seed: of the orders.
          fill: adds what is stored of a batch.

        Raises:
          InputError: there are not enough texts for one batch.
        """
        self._texts, self._seed, self._fill = list(texts), seed, fill
        self._batch_size, self._seq_len = batch_size, seq_len
        self._epoch, self._rows = -1, None
        self._num_batches = len(self._rows_of(0).tokens) // batch_size
        if not self._num_batches:
            raise InputError(
                f"expected texts for {batch_size} rows of {seq_len} tokens, got "
                f"{len(self._rows_of(0).tokens)}"
            )

    def __getitem__(self, index: int) -> Rows:
        """Returns a batch; epochs have as many as the first one."""
        epoch, place = divmod(index, self._num_batches)
        rows = self._rows_of(epoch)
        if len(rows.tokens) < self._batch_size:  # an order that happens to be packed more tightly
            rows = self._rows_of(0)
        begin = min(place * self._batch_size, len(rows.tokens) - self._batch_size)
        return self._fill(rows.pick(slice(begin, begin + self._batch_size)))

    @property
    def num_batches(self) -> int:
        """Batches of an epoch."""
        return self._num_batches

    def _rows_of(self, epoch: int) -> Rows:
        if self._rows is None or epoch != self._epoch:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self._texts))
            self._rows = pack([self._texts[i] for i in order], self._seq_len)
            self._epoch = epoch
        return self._rows


def most_frequent(texts: Sequence[Text], vocab_size: int, size: int) -> Int32[np.ndarray, "u"]:
    """Returns the ids that answers use most, rising; ties go to the smaller id.

    Args:
      texts: whose answers.
      vocab_size: of the target.
      size: how many, u.
    """
    counts = np.zeros([vocab_size], np.int64)
    for text in texts:
        counts += np.bincount(np.array(text.answer, int), minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def split(texts: Sequence[Text], num_held_out: int) -> tuple[list[Text], list[Text]]:
    """Returns the texts to train on and the held-out ones, evenly spaced over the file."""
    every = max(len(texts) // max(num_held_out, 1), 1)
    held_out = set(range(0, len(texts), every)[:num_held_out]) if num_held_out else set()
    training = [text for index, text in enumerate(texts) if index not in held_out]
    return training, [texts[index] for index in sorted(held_out)]


def write_texts(path: pathlib.Path, texts: Sequence[Text]) -> None:
    """Writes texts in the form that `corpus.read_texts` reads."""
    lines = (
        json.dumps({"prompt_token_ids": list(text.prompt), "token_ids": list(text.answer)})
        for text in texts
    )
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def iterate_rows(rows: Rows, batch_size: int) -> Iterator[Rows]:
    """Yields all rows in batches; the last one is filled up with empty rows."""
    for begin in range(0, len(rows.tokens), batch_size):
        batch = rows.pick(slice(begin, begin + batch_size))
        missing = ((0, batch_size - len(batch.tokens)), (0, 0))
        yield jax.tree.map(lambda leaf, missing=missing: np.pad(leaf, missing), batch)


def spans(rows: Rows) -> Iterator[tuple[int, slice, bytes]]:
    """Yields the texts of rows: the row, the place in it, and the tokens as bytes."""
    for row, (tokens, text) in enumerate(zip(rows.tokens, rows.text, strict=True)):
        begins = np.flatnonzero(np.diff(text, prepend=0))
        ends = [*begins, len(text)][1:]
        for begin, end in zip(begins, ends, strict=True):
            if text[begin]:
                yield row, slice(int(begin), int(end)), tokens[begin:end].tobytes()
