"""The rows of a batch as the scheduler's slots, their pages, and what earlier prompts have left.

    row 0    | shared | shared | own | own |
    row 1    | shared | own |                     shared pages are those of nodes of the tree
    tree     | node   | node   | node |

A row reads shared pages and never writes them: they hold full chunks of its prompt, and it writes
from the end of its text on. The nodes are pinned as long as the row has them. A chunk that was read
becomes a node, which then owns the row's pages of it.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jspec.common.memory import tree_bytes
from jspec.generation.answer import Round
from jspec.generation.batch import Reading, Snapshot
from jspec.generation.paged_batch import PAGE, PagedBatch
from jspec.generation.rows import Row
from jspec.serving.page_pool import PagePool
from jspec.serving.prefix_tree import Node, PrefixTree, path


class Shared(NamedTuple):
    """What a node of the tree has: the pages of its chunk, and what else reading it has left."""

    pages: list[int]
    snapshot: Snapshot


class _Held:
    """A slot that is taken: its request, its own pages of each part, its node, which is pinned."""

    def __init__(self, request: Row, node: Node) -> None:
        self.request, self.node = request, node
        self.own: tuple[list[int], list[int]] = [], []

    @property
    def shared(self) -> list[int]:
        """The pages of its nodes."""
        return [page for node in path(self.node) for page in node.page.pages]

    @property
    def pages(self) -> list[list[int]]:
        """The pages of each part, in the order of the slots."""
        shared = self.shared
        return [shared + self.own[0], self.own[1]]


class BatchSlots:
    """See `Slots`. One prompt is read at a time.

    Attributes:
      tree: what was read of earlier prompts.
      pools: the pages of the target's cache, and those of the drafter's.
    """

    def __init__(self, batch: PagedBatch, prefix_cache_bytes: int, widest_chunk: int) -> None:
        self.pools = [PagePool(batch.num_pages) for _ in batch.page_bytes]
        self.tree = PrefixTree(
            prefix_cache_bytes, lambda node: self.pools[0].give_back(node.page.pages)
        )
        self._batch, self._widest_chunk = batch, widest_chunk
        self._held: dict[int, _Held] = {}  # by row
        self._reading: tuple[int, Reading, Any] | None = None  # with its row and what was saved
        self._is_adding = False
        batch.warm_up(widest_chunk)

    @property
    def rows(self) -> Sequence[int]:
        """Indices of the slots."""
        return self._batch.rows

    @property
    def usage(self) -> float:
        """The share of pages that rows hold, of the part that has fewest left, 0 to 1."""
        return max(self._num_held()) / self._batch.num_pages

    def _num_held(self) -> list[int]:
        """Returns the pages of each part that rows hold; the tree's others can be had."""
        rows = list(self._held.values())  # at once: another thread may ask
        shared = {id(node): node for held in rows for node in path(held.node)}
        target = sum(len(node.page.pages) for node in shared.values())
        own = [sum(map(len, part)) for part in zip(*(held.own for held in rows), strict=True)]
        return [target + own[0], own[1]] if rows else [0, 0]

    def begin(self, row: int, request: Row, saved: Any = None) -> int | None:
        """Begins to read a prompt; returns how many of its tokens need not be read again.

        With what was saved of a row the prompt is all its tokens but the newest. Returns None, and
        does nothing, where there are not enough pages for it now.
        """
        assert self._reading is None
        # Scores are those of every token of the prompt, and of narrow chunks: see `Batch.begin`.
        is_scored = request.settings.prompt_logprobs and saved is None
        widest = 0 if is_scored else self._widest_chunk
        nodes = [] if is_scored else self._find(request)
        held = _Held(request, nodes[-1] if nodes else self.tree.root)
        self.tree.pin(held.node)
        # A page for each row that runs stays free: else it would be taken back at once.
        num_others = len(self._held)
        self._held[row] = held
        if not self._grow(held, len(request.prompt), 1, spare=num_others):
            self.tree.unpin(self._held.pop(row).node)
            return None
        reading = self._batch.begin_in(
            request, held.pages, widest, [node.page.snapshot for node in nodes], is_scored
        )
        self._reading = row, reading, saved
        # No answers in the tree, and no chunks that others would not read.
        self._is_adding = self.tree.max_bytes > 0 and saved is None and not is_scored
        return len(held.shared) * PAGE

    def _find(self, request: Row) -> list[Node]:
        """Returns the nodes of the chunks that need not be read; the last chunk always is."""
        nodes, node = [], self.tree.root
        for begin, width in self._batch.chunks(len(request.prompt), self._widest_chunk)[:-1]:
            found = self.tree.find(node, tuple(request.prompt[begin : begin + width]))
            if found is None:
                break
            node = found
            nodes.append(node)
        return nodes

    def _grow(self, held: _Held, length: int, num_rounds: int, spare: int = 0) -> bool:
        """Gives a row of this length pages for rounds; False, and none, where there are too few."""
        needed = self._batch.needed(length, held.request.max_length, num_rounds)
        counts = [n - len(pages) for n, pages in zip(needed, held.pages, strict=True)]
        for count, num_held in zip(counts, self._num_held(), strict=True):
            if count > 0 and num_held + count + spare > self._batch.num_pages:
                return False
        while self.pools[0].num_free < counts[0]:
            is_dropped = self.tree.drop_one()
            assert is_dropped, "pages that no row has are neither free nor in the tree"
        for pool, own, count in zip(self.pools, held.own, counts, strict=True):
            own += pool.take(max(count, 0))
        return True

    def reserve(self, row: int, num_rounds: int) -> bool:
        """Gives a row that runs pages for this many rounds; False where there are too few."""
        held = self._held[row]
        if not self._grow(held, int(self._batch.lengths[row]), num_rounds):
            return False
        self._batch.set_pages(row, held.pages)
        return True

    def read(self, row: int) -> tuple[int, Round | None]:
        """Reads a chunk; returns its length, and after the last one the first token.

        Where a row was saved no token is new.
        """
        assert self._reading is not None
        reading_row, reading, saved = self._reading
        assert reading_row == row
        begin, width = reading.next_chunk
        num_tokens = self._batch.read(reading)
        if not reading.is_done:
            if self._is_adding:
                self._add(self._held[row], reading, begin, width)
            return num_tokens, None
        self._reading = None
        if saved is None:
            return num_tokens, self._batch.insert(row, reading)
        self._batch.insert_saved(row, reading, saved)
        return num_tokens, Round([])

    def _add(self, held: _Held, reading: Reading, begin: int, width: int) -> None:
        """Makes a node of the chunk that was read last, to which its pages then belong."""
        count = width // PAGE
        shared = Shared(held.own[0][:count], self._batch.snapshot(reading, begin, width))
        num_bytes = count * self._batch.page_bytes[0] + tree_bytes(shared.snapshot)
        chunk = tuple(reading.prompt[begin : begin + width])
        added = self.tree.add(held.node, chunk, shared, num_bytes)
        if added is None or added.page is not shared:
            # No free page: a chunk without the one before it would never be found.
            self._is_adding = False
            return
        del held.own[0][:count]
        self.tree.pin(added)
        self.tree.unpin(held.node)
        held.node = added

    def run(self, num_rounds: int) -> float:
        """Runs rounds of all slots; returns the seconds that they took."""
        return self._batch.run(num_rounds)

    def rounds(self, row: int) -> Iterable[Round]:
        """Returns what the rounds of the last run did in a slot."""
        return self._batch.rounds(row)

    def finish(self, row: int, answer: Sequence[int] = ()) -> None:
        """Marks a slot as done, its prompt read or not: it emits nothing until it is filled.

        The drafter may look a whole answer up for later ones.
        """
        if self._reading is not None and self._reading[0] == row:
            self._reading = None
        else:
            self._batch.finish(row)
        held = self._held.pop(row)
        for pool, own in zip(self.pools, held.own, strict=True):
            pool.truncate_to(own, 0)
        self.tree.unpin(held.node)
        if answer:
            self._batch.remember(answer)

    def clear(self) -> None:
        """Forgets what was read of earlier prompts, and earlier answers."""
        self.tree.clear()
        self._batch.forget()

    @property
    def has_memory(self) -> bool:
        """Whether the drafter looks up earlier answers."""
        return self._batch.has_memory

    def keep_alive(self) -> None:
        """Does nothing: one process need not be told that there is nothing to do."""

    def stop(self) -> None:
        """Does nothing: no other process waits for calls."""

    def pause(self, row: int) -> Any:
        """Finishes a slot; returns what `begin` takes to go on; None if it has no token yet."""
        mine = self._reading if self._reading is not None and self._reading[0] == row else None
        # Of a row that is read anew what was saved before stands as it was.
        saved = self._batch.save(row) if mine is None else mine[2]
        self.finish(row)
        return saved
