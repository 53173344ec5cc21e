"""A text in the tokens of another vocabulary, on the device: tables instead of tokenizers.

    the target's tokens   | def | _is | _even | ( | x | ): | \\n |
    the draft reads       | def | _is | _even | ( | x |  ):\\n   |     neighbours are joined
    target tokens read    | 1   | 2   | 3     | 4 | 5 |  5   7   |     `ends`, in draft tokens

`segment` cuts a sequence of tokens into as few tokens of another vocabulary as possible. A token is
taken alone, for one or more of that vocabulary, or is joined with its neighbours where there is one
token for the bytes of all. That is nearly what the other tokenizer does with the text: 0.97 of its
tokens on Python code, between SmolLM2 and Qwen2.5, and 0.82 to 0.87 without joining neighbours.

A text grows, and another token may change how those before it are cut. So tokens are joined only
inside of blocks of `BLOCK` tokens: the reading of a block follows from its own tokens, whenever and
in whatever parts they came, and only that of the last block changes.
"""

import functools
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int32, UInt32

from jspec.common.typing import BlockFlags, RowCounts, RowTokens, Tokens
from jspec.drafters.memory import History
from jspec.drafters.vocabulary_map import Hashes, Lists, Reading, TextTable, VocabularyMap

BLOCK = 32  # tokens of a text that are cut together; a page is whole blocks
MOST_JOINED = 8  # tokens that one of another vocabulary may stand for
_NOT_JOINED, _COVERED = -1, -2  # see `TranslatedText.joined`
_NEVER = 2**30


class Segments(NamedTuple):
    """How sequences of tokens are cut.

    Attributes:
      lengths: of the segment that begins at each token, if one begins there, [b n].
      joined: the other vocabulary's token for the segment, [b n]; negative for a token taken alone.
    """

    lengths: Int32[Array, "b n"]
    joined: Int32[Array, "b n"]


def segment(
    hashes: Hashes, table: TextTable, counts: Int32[Array, "b n"], length: RowCounts, num_alike: int
) -> Segments:
    """Cuts the first `length` tokens of each row into the fewest tokens of another vocabulary.

    Args:
      hashes: of the rows' tokens, [b n 2].
      table: the other vocabulary.
      counts: how many of its tokens each token is if it is taken alone, [b n].
      length: tokens of each row, [b].
      num_alike: see `vocabulary_map.most_alike`.
    """
    b, n = counts.shape
    ahead = ((0, 0), (0, MOST_JOINED - 1), (0, 0))
    values, powers = (jnp.pad(leaf, ahead) for leaf in hashes)
    total, joined = values[:, :n], [jnp.full([b, n], _NOT_JOINED, jnp.int32)]
    for size in range(2, MOST_JOINED + 1):
        begin = size - 1
        total = total * powers[:, begin : begin + n] + values[:, begin : begin + n]
        ends_inside = jnp.arange(n) + size <= length[:, None]
        joined.append(jnp.where(ends_inside, _look_up(table, total, num_alike), _NOT_JOINED))
    by_size = jnp.stack(joined, axis=2)  # [b n s]
    costs = jnp.where(by_size >= 0, 1, _NEVER).at[:, :, 0].set(counts)
    is_real = jnp.arange(n) < length[:, None]

    def choose(after: Array, place: tuple[Array, Array]) -> tuple[Array, Array]:
        costs, is_real = place  # `after` has the fewest tokens from the next ones on, [b s]
        totals = jnp.minimum(costs + after, _NEVER)
        # Of equally few the longest segment, so that the cut is one and the same.
        size = MOST_JOINED - jnp.argmin(totals[:, ::-1], axis=1).astype(jnp.int32)
        fewest = jnp.where(is_real, jnp.min(totals, axis=1), 0)
        return jnp.concatenate([fewest[:, None], after[:, :-1]], axis=1), size

    nothing = jnp.zeros([b, MOST_JOINED], jnp.int32)
    places = costs.transpose(1, 0, 2), is_real.T
    sizes = jax.lax.scan(choose, nothing, places, reverse=True)[1].T
    chosen = jnp.take_along_axis(by_size, sizes[..., None] - 1, axis=2)[..., 0]
    return Segments(sizes, chosen)


def _look_up(table: TextTable, keys: UInt32[Array, "b n 2"], num_alike: int) -> Int32[Array, "b n"]:
    """Returns the tokens whose texts have these hashes; `_NOT_JOINED` where there is none."""
    first = jnp.searchsorted(table.keys[:, 0], keys[..., 0], method="scan_unrolled")
    tokens = jnp.full(first.shape, _NOT_JOINED, jnp.int32)
    for step in range(num_alike):
        place = jnp.minimum(first + step, len(table.ids) - 1)
        is_same = (table.keys[place] == keys).all(axis=-1)
        tokens = jnp.where(is_same, table.ids[place], tokens)
    return tokens


def spell(
    tables: VocabularyMap, tokens: Tokens, num_tokens: RowCounts, width: int, num_alike: int
) -> tuple[Int32[Array, "b w"], RowCounts]:
    """Returns the text of draft tokens in target tokens, at most `width`, and their number.

    `tokens` [b n] count up to `num_tokens`, and up to the first that the target cannot write.
    """
    index = jnp.arange(tokens.shape[1])
    begins = tables.spellings.begins
    counts = jnp.where(index < num_tokens[:, None], begins[tokens + 1] - begins[tokens], 0)
    counts = jnp.where(jnp.cumprod(counts > 0, axis=1, dtype=jnp.int32) > 0, counts, 0)
    # Neighbours will be joined, so that more are needed than are asked for.
    slots, ends = jnp.arange(2 * width), jnp.cumsum(counts, axis=1)
    source = jnp.sum(ends[:, None, :] <= slots[:, None], axis=2)
    source = jnp.minimum(source, tokens.shape[1] - 1)
    offset = slots - jnp.take_along_axis(ends - counts, source, axis=1)
    begin = begins[jnp.take_along_axis(tokens, source, axis=1)]
    last = len(tables.spellings.tokens) - 1
    alone = tables.spellings.tokens[jnp.clip(begin + offset, 0, last)]
    length = jnp.minimum(ends[:, -1], 2 * width)
    hashes = Hashes(*(leaf[alone] for leaf in tables.target_hashes))
    cut = segment(hashes, tables.target_table, jnp.ones_like(alone), length, num_alike)
    whole = jnp.where(cut.joined >= 0, cut.joined, alone)

    def write(place: RowCounts, _: None) -> tuple[RowCounts, tuple[RowTokens, Array]]:
        at = jnp.minimum(place, 2 * width - 1)[:, None]
        token, size = (jnp.take_along_axis(leaf, at, axis=1)[:, 0] for leaf in (whole, cut.lengths))
        is_inside = place < length
        return place + jnp.where(is_inside, size, 0), (jnp.where(is_inside, token, 0), is_inside)

    written, is_inside = jax.lax.scan(write, jnp.zeros_like(length), None, length=width)[1]
    return written.T, jnp.sum(is_inside, axis=0, dtype=jnp.int32)


class TranslatedText(struct.PyTreeNode):
    """The target's tokens of every row, and how the draft reads them.

    Attributes:
      history: the target's tokens.
      joined: for each of them the draft's token for a segment that ends with it, [b s]; `_COVERED`
        for another token of such a segment, `_NOT_JOINED` for one that is read alone.
      ends: draft tokens up to the end of each token, [b s].
      first: which token begins the printed text, [b]; `_NEVER` if none has yet.
    """

    history: History
    joined: Int32[Array, "b s"]
    ends: Int32[Array, "b s"]
    first: RowCounts

    @classmethod
    def init(cls, batch_size: int, capacity: int) -> Self:
        """Returns empty texts with room for `capacity` target tokens."""
        nothing = jnp.zeros([batch_size, capacity], jnp.int32)
        first = jnp.full([batch_size], _NEVER, jnp.int32)
        return cls(History.init(batch_size, capacity), nothing, nothing, first)

    def length(self, reading: Reading) -> RowCounts:
        """Returns the number of draft tokens, [b]."""
        return self._length_at(reading, self.history.length)

    def _length_at(self, reading: Reading, place: RowCounts) -> RowCounts:
        """Returns the number of draft tokens before a target token, [b]."""
        before = jnp.take_along_axis(self.ends, jnp.maximum(place - 1, 0)[:, None], axis=1)[:, 0]
        return jnp.where(place > 0, before, reading.num_before)

    def append(
        self, tables: VocabularyMap, reading: Reading, tokens: Tokens, valid: BlockFlags
    ) -> tuple["TranslatedText", RowCounts]:
        """Adds the valid tokens of each row, which come first in it.

        Returns:
          The texts, and how many draft tokens of each are the same as before for sure, [b].
        """
        b, t = tokens.shape
        history, old = self.history.append(tokens, valid), self.history.length
        prints = tables.prints[tokens] & valid
        newest = jnp.where(prints.any(axis=1), old + jnp.argmax(prints, axis=1), _NEVER)
        # After a text was cut short, its first token may have gone.
        first = jnp.where(self.first < old, self.first, newest).astype(jnp.int32)
        begin = old // BLOCK * BLOCK
        num_blocks = (t + 2 * BLOCK - 2) // BLOCK
        places = begin[:, None] + jnp.arange(num_blocks * BLOCK)
        window = history.window(begin, num_blocks * BLOCK)
        is_first = (places == first[:, None]) & reading.has_first
        hashes = Hashes(*(leaf[window] for leaf in tables.target_hashes))
        # The text may begin without the space that its first token has elsewhere.
        hashes = hashes._replace(powers=jnp.where(is_first[..., None], 0, hashes.powers),
            hashes=jnp.where(is_first[..., None], jnp.uint32(_NEVER), hashes.hashes))  # fmt: skip
        counts = _counts(tables.readings, _rows(tables, window, is_first))
        is_real = places < history.length[:, None]
        blocks = b * num_blocks, BLOCK
        cut = segment(
            Hashes(*(leaf.reshape(*blocks, 2) for leaf in hashes)),
            tables.draft_table,
            counts.reshape(blocks),
            jnp.sum(is_real.reshape(blocks), axis=1, dtype=jnp.int32),
            reading.num_alike,
        )
        joined = _at_ends(cut).reshape(places.shape)
        counts = jnp.where(joined == _NOT_JOINED, counts, (joined >= 0).astype(jnp.int32))
        same = self._length_at(reading, begin)
        ends = same[:, None] + jnp.cumsum(counts, axis=1)
        rows = jnp.arange(b)[:, None]
        slots = jnp.where(is_real, places, self.ends.shape[1])  # past the end: dropped
        grown = self.replace(
            history=history,
            joined=self.joined.at[rows, slots].set(joined, mode="drop"),
            ends=self.ends.at[rows, slots].set(ends, mode="drop"),
            first=first,
        )
        return grown, same

    def window(
        self, tables: VocabularyMap, reading: Reading, start: RowCounts, width: int
    ) -> Tokens:
        """Returns `width` draft tokens of each row, beginning at `start`.

        Callers ignore what lies past the length.
        """
        s = self.ends.shape[1]
        slots = start[:, None] + jnp.arange(width, dtype=jnp.int32)
        is_real = jnp.arange(s) < self.history.length[:, None]
        ends = jnp.where(is_real, self.ends, _NEVER)
        # The first token with more draft tokens up to its end than lie before the slot.
        search = functools.partial(jnp.searchsorted, side="right", method="scan_unrolled")
        place = jax.vmap(search)(ends, slots)
        place = jnp.minimum(place, s - 1)
        token, joined = (
            jnp.take_along_axis(leaf, place, axis=1) for leaf in (self.history.tokens, self.joined)
        )
        before = jnp.take_along_axis(self.ends, jnp.maximum(place - 1, 0), axis=1)
        offset = slots - jnp.where(place > 0, before, reading.num_before)
        is_first = (place == self.first[:, None]) & reading.has_first
        begin = tables.readings.begins[_rows(tables, token, is_first)]
        last = len(tables.readings.tokens) - 1
        alone = tables.readings.tokens[jnp.clip(begin + offset, 0, last)]
        draft_ids = jnp.where(joined >= 0, joined, alone)
        if reading.begin is None:
            return draft_ids
        return jnp.where(slots == 0, reading.begin, draft_ids)


def _rows(tables: VocabularyMap, tokens: Tokens, is_first: Bool[Array, "b t"]) -> Tokens:
    """Returns which of the readings are those of the tokens."""
    return tokens + jnp.where(is_first, len(tables.prints), 0)


def _counts(lists: Lists, rows: Tokens) -> Int32[Array, "b t"]:
    return jnp.asarray(lists.begins)[rows + 1] - jnp.asarray(lists.begins)[rows]


def _at_ends(cut: Segments) -> Int32[Array, "b n"]:
    """Returns, as `TranslatedText.joined` has it, what each token of the segments is read as."""

    def follow(
        carry: tuple[Array, Array], place: tuple[Array, Array]
    ) -> tuple[tuple[Array, Array], Array]:
        left, token = carry  # tokens left of the segment, and what it is joined to
        size, joined = place
        is_begin = left == 0
        left = jnp.where(is_begin, size, left) - 1
        token = jnp.where(is_begin, joined, token)
        return (left, token), jnp.where(left == 0, token, _COVERED)

    nothing = jnp.zeros(cut.lengths.shape[:1], jnp.int32)
    return jax.lax.scan(follow, (nothing, nothing), (cut.lengths.T, cut.joined.T))[1].T
