"""The rows of a batch as the scheduler's slots, with what was read of earlier prompts at hand."""

from collections.abc import Iterable, Sequence

from jspec.common.memory import tree_bytes
from jspec.generation.answer import Round
from jspec.generation.batch import Batch
from jspec.generation.reading import Reading
from jspec.generation.rows import Row
from jspec.serving.prefix_tree import Node, PrefixTree


class BatchSlots:
    """See `Slots`. One prompt is read at a time: a batch has memory for one beside its rows.

    Attributes:
      tree: what was read of earlier prompts.
    """

    def __init__(self, batch: Batch, prefix_cache_bytes: int, widest_chunk: int) -> None:
        self.tree = PrefixTree(prefix_cache_bytes)
        self._batch, self._widest_chunk = batch, widest_chunk
        self._reading: tuple[int, Reading] | None = None  # with its row
        self._node = self.tree.root  # the last chunk that was read and is in the tree; pinned
        self._is_adding = False
        if prefix_cache_bytes:
            batch.warm_up_pages(widest_chunk)

    @property
    def rows(self) -> Sequence[int]:
        """Indices of the slots."""
        return self._batch.rows

    def begin(self, row: int, request: Row) -> int:
        """Begins to read a prompt; returns how many of its tokens need not be read again."""
        assert self._reading is None
        self._is_adding = self.tree.max_bytes > 0
        reading = self._batch.begin(request, widest=self._widest_chunk)
        self._reading, num_known, found = (row, reading), 0, []
        self._node = self.tree.root
        self.tree.pin(self._node)
        while (chunk := reading.chunk(len(found))) is not None:
            node = self.tree.find(self._node, chunk)
            if node is None:
                break
            self._move_to(node)
            found.append(node.page)
            num_known += len(chunk)
        if found:
            reading.put(self._batch.pages, found)
        return num_known

    def read(self, row: int) -> tuple[int, Round | None]:
        """Reads a chunk of a prompt; returns its length, and the first token after the last."""
        assert self._reading is not None
        assert self._reading[0] == row
        reading = self._reading[1]
        chunk = reading.chunk()
        num_tokens = self._batch.read(reading)
        if chunk is not None and self._is_adding:
            self._add(reading, chunk)
        if not reading.is_done:
            return num_tokens, None
        self._end_reading()
        return num_tokens, self._batch.insert(row, reading)

    def _add(self, reading: Reading, chunk: tuple[int, ...]) -> None:
        page = reading.copy(self._batch.pages)
        added = self.tree.add(self._node, chunk, page, tree_bytes(page))
        if added is None:  # no room: a chunk without the one before it would never be found
            self._is_adding = False
        else:
            self._move_to(added)

    def _move_to(self, node: Node) -> None:
        # Pinned, so that it is still there when the next chunk is to be added to it.
        self.tree.pin(node)
        self.tree.unpin(self._node)
        self._node = node

    def _end_reading(self) -> None:
        self.tree.unpin(self._node)
        self._reading = None

    def run(self, num_rounds: int) -> float:
        """Runs rounds of all slots; returns the seconds that they took."""
        return self._batch.run(num_rounds)

    def rounds(self, row: int) -> Iterable[Round]:
        """Returns what the rounds of the last run did in a slot."""
        return self._batch.rounds(row)

    def finish(self, row: int) -> None:
        """Marks a slot as done, its prompt read or not: it emits nothing until it is filled."""
        if self._reading is not None and self._reading[0] == row:
            self._end_reading()
        else:
            self._batch.finish(row)
