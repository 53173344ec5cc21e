"""Answers of a target, packed into rows of equal length, in an order that a seed decides."""

import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from jspec.errors import InputError


class Text(NamedTuple):
    """One prompt and the target's answer to it.

    Attributes:
      prompt: ids.
      answer: ids.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class Rows(NamedTuple):
    """Several texts a row, one behind another; the last one of a row is cut.

    Attributes:
      tokens: [r t], 0 behind the end.
      text: which text each belongs to, counted from 1 in each row; 0 behind the end, [r t].
      positions: in the text, [r t].
      is_answer: the tokens of answers, [r t].
    """

    tokens: Int32[np.ndarray, "r t"]
    text: Int32[np.ndarray, "r t"]
    positions: Int32[np.ndarray, "r t"]
    is_answer: Bool[np.ndarray, "r t"]

    def pick(self, rows: slice) -> "Rows":
        """Returns some of the rows."""
        return Rows(*(leaf[rows] for leaf in self))


def pack(texts: Sequence[Text], seq_len: int) -> Rows:
    """Returns rows filled with the texts in their order; what does not fit in a row is cut.

    Args:
      texts: what to pack.
      seq_len: tokens of a row, t.
    """
    rows: list[list[Text]] = []
    room = 0
    for text in texts:
        if room < len(text.prompt) + 8:  # no answer to speak of would fit
            rows.append([])
            room = seq_len
        rows[-1].append(text)
        room -= len(text.prompt) + len(text.answer)
    packed = Rows(
        *(np.zeros([len(rows), seq_len], np.int32) for _ in range(3)),
        np.zeros([len(rows), seq_len], bool),  # type: ignore
    )
    for row, members in enumerate(rows):
        begin = 0
        for index, text in enumerate(members):
            ids = [*text.prompt, *text.answer][: seq_len - begin]
            place = slice(begin, begin + len(ids))
            packed.tokens[row, place] = ids
            packed.text[row, place] = index + 1
            packed.positions[row, place] = np.arange(len(ids))
            packed.is_answer[row, begin + len(text.prompt) : begin + len(ids)] = True
            begin += len(ids)
    return packed


class Batches:
    """The batches of a training run: batch k is a function of the texts, the seed and k alone."""

    def __init__(self, texts: Sequence[Text], *, batch_size: int, seq_len: int, seed: int) -> None:
        """Prepares; every epoch is another order of the texts, packed anew.

        Args:
          texts: to train on.
          batch_size: rows of a batch.
          seq_len: tokens of a row.
          seed: of the orders.

        Raises:
          InputError: there are not enough texts for one batch.
        """
        self._texts, self._seed = list(texts), seed
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
        begin = min(place * self._batch_size, len(rows.tokens) - self._batch_size)
        return rows.pick(slice(begin, begin + self._batch_size))

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
        missing = batch_size - len(batch.tokens)
        yield Rows(*(np.pad(leaf, ((0, missing), (0, 0))) for leaf in batch))
