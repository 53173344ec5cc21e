"""The rows of a batch as the scheduler's slots, their pages, and the prefix cache.

    row 0    | shared | shared | own | own |
    row 1    | shared | own |                     shared pages are those of nodes of the tree
    tree     | node   | node   | node |

A row reads shared pages and never writes them: they hold full chunks of its prompt, and it writes
from the end of its text on. The nodes are pinned as long as the row has them. A chunk that was read
becomes a node, which then owns the row's pages of it; so do, once an answer has ended, the chunks
that it has filled with tokens. With them the nodes get the drafter's pages, each node those of the
chunk before it: a drafter's slot may also follow from the token after its token, and the newest
slot that it has may be rewritten.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from jspec.common.memory import tree_bytes
from jspec.generation.answer import Round
from jspec.generation.batch import Reading, Snapshot
from jspec.generation.paged_batch import PAGE, PagedBatch
from jspec.generation.rows import Row
from jspec.serving.prefix_tree import Node, PageTokens, PrefixTree, path


class PagePool:
    """Which pages, from 1 to `num_pages`, are free, by number; their contents are elsewhere.

    A page has one owner, a row or a node of the prefix tree, which others may hold on to.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))  # the lowest number goes first
        self._is_taken = [False] * (num_pages + 1)

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Takes free pages, and returns them; there must be enough."""
        assert 0 <= count <= self.num_free, "more pages are taken than are free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_taken[page] = True
        return pages

    def give_back(self, pages: list[int]) -> None:
        """Makes taken pages free."""
        for page in reversed(pages):
            assert self._is_taken[page], f"page {page} is given back twice"
            self._is_taken[page] = False
            self._free.append(page)

    def truncate_to(self, pages: list[int], count: int) -> None:
        """Gives back all but the first `count` of an owner's pages, and takes them off the list."""
        self.give_back(pages[count:])
        del pages[count:]


@dataclasses.dataclass
class Shared:
    """The contents of a node of the tree.

    Attributes:
      pages: those of its chunk.
      snapshot: the other state after reading it.
      draft_pages: the drafter's, of the chunk before, whose last slot may follow from this chunk's
        first token; none until all its caches have read that chunk.
    """

    pages: list[int]
    snapshot: Snapshot
    draft_pages: list[int] = dataclasses.field(default_factory=list)


class _Held:
    """A slot that is taken: its request, its own pages of each part, its node, which is pinned.

    Of the drafter's pages it shares those that were there when it began.
    """

    def __init__(self, request: Row, node: Node, draft_pages: list[int]) -> None:
        self.request, self.node, self.draft_pages = request, node, draft_pages
        self.private: tuple[list[int], list[int]] = [], []

    @property
    def shared(self) -> list[int]:
        """The pages of its nodes."""
        return [page for node in path(self.node) for page in node.page.pages]

    @property
    def pages(self) -> list[list[int]]:
        """The pages of each part, in the order of the slots."""
        return [self.shared + self.private[0], self.draft_pages + self.private[1]]


class BatchSlots:
    """The device, as the scheduler sees it. One prompt is read at a time.

    Attributes:
      tree: what was read of earlier prompts.
      pools: the pages of the target's cache, and those of the drafter's.
    """

    def __init__(self, batch: PagedBatch, prefix_cache_bytes: int, widest_chunk: int) -> None:
        self.pools = [PagePool(batch.num_pages) for _ in batch.page_bytes]
        self.tree = PrefixTree(prefix_cache_bytes, self._give_back)
        self._batch, self._widest_chunk = batch, max(widest_chunk, PAGE)
        self._held: dict[int, _Held] = {}  # by row
        self._reading: tuple[int, Reading, Any] | None = None  # with its row and what was saved
        self._is_adding = False
        batch.warm_up(self._widest_chunk)

    def _give_back(self, node: Node) -> None:
        for pool, pages in zip(self.pools, (node.page.pages, node.page.draft_pages), strict=True):
            pool.give_back(pages)

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
        draft = len({page for held in rows for page in held.draft_pages})
        private = [
            sum(map(len, part)) for part in zip(*(held.private for held in rows), strict=True)
        ]
        return [target + private[0], draft + private[1]] if rows else [0, 0]

    def begin(self, row: int, request: Row, saved: Any = None) -> int | None:
        """Begins to read a prompt; returns how many of its tokens need not be read again.

        To go on with what `pause` has saved, the prompt is all tokens but the newest. Returns None,
        and does nothing, if there are not enough pages for it yet.
        """
        assert self._reading is None
        # Scores are those of every token of the prompt, in narrow chunks, which are compiled.
        is_scored = request.settings.prompt_logprobs and saved is None
        widest = 0 if is_scored else self._widest_chunk
        nodes = [] if is_scored else self._find(request)
        draft_pages = self._read_by_drafter(request, nodes)
        held = _Held(request, nodes[-1] if nodes else self.tree.root, draft_pages)
        self.tree.pin(held.node)
        # A page for each row that runs stays free: else it would be taken back at once.
        num_others = len(self._held)
        self._held[row] = held
        if not self._resize(held, len(request.prompt), 1, spare=num_others):
            self.tree.unpin(self._held.pop(row).node)
            return None
        snapshots = [node.page.snapshot for node in nodes]
        num_found, calls = 0, list[tuple[int, int]]()
        for node in nodes:  # calls that are not made
            calls.append((num_found, len(node.chunk)))
            num_found += len(node.chunk)
        rest = self._batch.chunks(len(request.prompt) - num_found, widest)
        calls += [(num_found + begin, width) for begin, width in rest]
        reading = self._batch.begin_in(
            request, held.pages, widest, snapshots, is_scored,
            calls=calls, draft_length=len(draft_pages) * PAGE,
        )  # fmt: skip
        self._reading = row, reading, saved
        # No chunks that others would not read; what an answer said comes when it has ended.
        self._is_adding = self.tree.max_bytes > 0 and saved is None and not is_scored
        return num_found

    def _find(self, request: Row) -> list[Node]:
        """Returns the nodes of the chunks that need not be read; the last token always is."""
        nodes, begin, prompt = list[Node](), 0, request.prompt
        while True:
            # As the rest would be read; what answers have said is in chunks of one page.
            planned = self._batch.chunks(len(prompt) - begin, self._widest_chunk)[0][1]
            node = nodes[-1] if nodes else self.tree.root
            for width in dict.fromkeys((planned, PAGE)):
                chunk = tuple(prompt[begin : begin + width])
                known = self.tree.find(node, chunk) if begin + width < len(prompt) else None
                if known is not None:
                    nodes.append(known)
                    begin += width
                    break
            else:
                return nodes

    def _read_by_drafter(self, request: Row, nodes: Sequence[Node]) -> list[int]:
        """Returns the drafter's pages of these nodes, up to a node without any."""
        if not self._batch.shares_drafter_pages(request):
            return []
        shared = [node.page.draft_pages for node in nodes[1:]]
        return [page for pages in itertools.takewhile(bool, shared) for page in pages]

    def _resize(
        self, held: _Held, length: int, num_rounds: int, *, spare: int = 0, is_extra: bool = False
    ) -> bool:
        """Gives a row of this length pages for rounds, and takes back what it has beyond that.

        Returns False, and gives none, where there are too few; where they are extra, too few free
        ones: what the tree has stays there.
        """
        needed = self._batch.needed(length, held.request.max_length, num_rounds)
        counts = [n - len(pages) for n, pages in zip(needed, held.pages, strict=True)]
        if max(counts) > 0:  # else nothing is counted: that takes a while
            for count, num_held in zip(counts, self._num_held(), strict=True):
                if count > 0 and num_held + count + spare > self._batch.num_pages:
                    return False
        while any(pool.num_free < n for pool, n in zip(self.pools, counts, strict=True)):
            if is_extra:
                return False
            is_dropped = self.tree.drop_one() or self._drop_draft_pages()
            assert is_dropped, "pages that no row has are neither free nor in the tree"
        for pool, pages, count in zip(self.pools, held.private, counts, strict=True):
            pages += pool.take(max(count, 0))
            pool.truncate_to(pages, max(len(pages) + min(count, 0), 0))
        return True

    def _drop_draft_pages(self) -> bool:
        """Frees the drafter's pages of nodes that rows have, where the rows have others there."""
        rows = self._held.values()
        used = {page for held in rows for page in held.draft_pages}
        nodes = {id(node): node for held in rows for node in path(held.node)}
        unused = [
            node for node in nodes.values()
            if node.page.draft_pages and used.isdisjoint(node.page.draft_pages)
        ]  # fmt: skip
        for node in unused:
            self.tree.enlarge(node, -len(node.page.draft_pages) * self._batch.page_bytes[1])
            self.pools[1].truncate_to(node.page.draft_pages, 0)
        return bool(unused)

    def reserve(self, row: int, num_rounds: int, is_extra: bool = False) -> bool:
        """Gives a row that runs pages for this many rounds; False where there are too few.

        Those that are `is_extra` are none of the tree's, and the next call takes them back.
        """
        held, length = self._held[row], int(self._batch.lengths[row])
        if not self._resize(held, length, num_rounds, is_extra=is_extra):
            return False
        self._batch.set_pages(row, held.pages)
        return True

    def read(self, row: int) -> tuple[int, Round | None]:
        """Reads a chunk; returns its length, and after the last one the first token.

        If it goes on with what was saved, the round after the last chunk has no tokens.
        """
        assert self._reading is not None
        reading_row, reading, saved = self._reading
        assert reading_row == row
        begin, width = reading.next_chunk
        num_tokens = self._batch.read(reading)
        if not reading.is_done:
            if self._is_adding and width % PAGE == 0:  # what is less stays its row's own
                self._add(self._held[row], reading, begin, width)
            return num_tokens, None
        self._reading = None
        if saved is None:
            return num_tokens, self._batch.insert(row, reading)
        self._batch.insert_saved(row, reading, saved)
        return num_tokens, Round([])

    def _add(self, held: _Held, reading: Reading, begin: int, width: int) -> None:
        """Makes a node of the chunk that was read last, to which its pages then belong."""
        chunk = tuple(reading.prompt[begin : begin + width])
        # No room: a chunk without the chunk before it would never match.
        self._is_adding = self._give(held, chunk, self._batch.snapshot(reading, begin, width))

    def _give(self, held: _Held, chunk: PageTokens, snapshot: Snapshot) -> bool:
        """Gives a row's next pages to a new node; False where it exists, or has no room."""
        count = len(chunk) // PAGE
        shared = Shared(held.private[0][:count], snapshot)
        num_bytes = count * self._batch.page_bytes[0] + tree_bytes(snapshot)
        added = self.tree.add(held.node, chunk, shared, num_bytes)
        if added is None or added.page is not shared:
            return False
        del held.private[0][:count]
        self.tree.pin(added)
        self.tree.unpin(held.node)
        held.node = added
        return True

    def _keep(self, row: int, held: _Held, text: Sequence[int]) -> None:
        """Gives the tree the full pages of a row's text, of which the newest token has no slot.

        None of them has a slot that is not committed, so no draft that was rejected.
        """
        if not self.tree.max_bytes or not self._batch.keeps_answers:
            return
        end = min(int(self._batch.lengths[row]), len(text) - 1) // PAGE * PAGE
        for begin in range(len(held.shared) * PAGE, end, PAGE):
            chunk = tuple(text[begin : begin + PAGE])
            known = self.tree.find(held.node, chunk)
            if known is not None:  # said before: the nodes after it may be new
                self._replace(held, known)
            elif not self._give(held, chunk, self._batch.snapshot_of(row, begin, PAGE)):
                break
        if self._batch.shares_drafter_pages():
            self._give_draft_pages(held, self._batch.draft_length(row) // PAGE)

    def _replace(self, held: _Held, node: Node) -> None:
        """Takes a node of the same tokens in the place of a row's own pages."""
        pages = held.private[0][: len(node.page.pages)]
        self.pools[0].give_back(pages)
        del held.private[0][: len(pages)]
        self.tree.pin(node)
        self.tree.unpin(held.node)
        held.node = node

    def _give_draft_pages(self, held: _Held, num_full: int) -> None:
        """Gives the drafter's first pages of a row that has ended to the nodes that have none."""
        begin, pages = 0, (held.draft_pages + held.private[1])[:num_full]
        for node, after in itertools.pairwise(path(held.node)):
            count = len(node.page.pages)
            end = begin + count
            is_new = begin >= len(held.draft_pages) and not after.page.draft_pages
            if end > len(pages):
                break
            if is_new and self.tree.enlarge(after, count * self._batch.page_bytes[1]):
                after.page.draft_pages = pages[begin:end]
            begin = end
        given = {page for node in path(held.node) for page in node.page.draft_pages}
        held.private = held.private[0], [page for page in held.private[1] if page not in given]

    def run(self, num_rounds: int) -> float:
        """Runs rounds of all slots; returns the seconds that they took."""
        return self._batch.run(num_rounds)

    def rounds(self, row: int) -> Iterable[Round]:
        """Returns what the rounds of the last run did in a slot."""
        return self._batch.rounds(row)

    def finish(self, row: int, answer: Sequence[int] = (), text: Sequence[int] = ()) -> None:
        """Marks a slot as done, its prompt read or not: it emits nothing until it is filled.

        The drafter may look a whole answer up for later ones. A text, of prompt and answer, goes
        to the tree.
        """
        held = self._held[row]
        if self._reading is not None and self._reading[0] == row:
            self._reading = None
        else:
            if text:
                self._keep(row, held, text)
            self._batch.finish(row)
        del self._held[row]
        for pool, pages in zip(self.pools, held.private, strict=True):
            pool.truncate_to(pages, 0)
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
        """Does nothing: only several processes need it."""

    def stop(self) -> None:
        """Does nothing: only several processes need it."""

    def pause(self, row: int) -> Any:
        """Finishes a slot; returns what `begin` takes to go on; None if it has no token yet."""
        mine = self._reading if self._reading is not None and self._reading[0] == row else None
        # Of a row that is read anew what was saved before stands as it was.
        saved = self._batch.save(row) if mine is None else mine[2]
        self.finish(row)
        return saved
