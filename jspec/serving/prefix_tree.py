"""Earlier prompts and their answers as a tree, in which equal beginnings are shared.

    root ── "You are a ..." ── "... helpful" ── "Tell me a joke"
                                            └── "What is the"

A node is one full chunk of a text, keyed by its token ids and so, with its ancestors, by all that
its page depends on: a tree belongs to one batch, and so to one model, type, drafter and capacity.
Texts are prompts, and answers that have ended; never drafts that were not committed. Pages are
never written. Over its budget, or where pages run out, the tree drops the leaf that was used
longest ago and that nobody refers to.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

PageTokens = tuple[int, ...]


class Node:
    """A chunk of a text.

    Attributes:
      parent: the chunk before it; None of the root, and of a node that was dropped.
      chunk: its token ids.
      page: what reading it has left.
      num_bytes: of the page.
      children: the chunks that have followed it.
      num_pins: how many rows have its page, and those of its ancestors.
    """

    __slots__ = ("children", "chunk", "num_bytes", "num_pins", "page", "parent")

    def __init__(self, parent: "Node | None", chunk: PageTokens, page: Any, num_bytes: int) -> None:
        self.parent, self.chunk, self.page, self.num_bytes = parent, chunk, page, num_bytes
        self.children: dict[PageTokens, Node] = {}
        self.num_pins = 0

    @property
    def num_references(self) -> int:
        """How many rows and children refer to the node: it is dropped only at 0."""
        return len(self.children) + self.num_pins


class PrefixTree:
    """Pages of texts, in at most `max_bytes`; 0 keeps none.

    Attributes:
      root: the beginning of every text; it has no page.
      num_bytes: of all pages.
      num_evicted: pages dropped so far.
    """

    def __init__(
        self, max_bytes: int, on_drop: Callable[[Node], object] = lambda node: None
    ) -> None:
        """Nothing is kept yet; `on_drop` is called with each node that is dropped."""
        self.max_bytes, self.num_bytes, self.num_evicted = max_bytes, 0, 0
        self._on_drop = on_drop
        self.root = Node(None, (), None, 0)
        # From the one used longest ago on. A parent stands after its children: whoever uses them
        # uses it. So the first of all is a leaf.
        self._by_use: OrderedDict[Node, None] = OrderedDict()

    def __len__(self) -> int:
        """Returns the number of pages."""
        return len(self._by_use)

    def find(self, node: Node, chunk: PageTokens) -> Node | None:
        """Returns the node of a chunk that follows another; None if there is none."""
        child = node.children.get(chunk)
        if child is not None:
            self._use(child)
        return child

    def add(self, node: Node, chunk: PageTokens, page: Any, num_bytes: int) -> Node | None:
        """Adds a chunk that follows another.

        Returns:
          The new node, or the one that is there; None if the cache is full.
        """
        if (known := self.find(node, chunk)) is not None:
            return known
        if not self._make_room(node, num_bytes):
            return None
        node.children[chunk] = added = Node(node, chunk, page, num_bytes)
        self.num_bytes += num_bytes
        self._use(added)
        return added

    def enlarge(self, node: Node, num_bytes: int) -> bool:
        """Gives a node more bytes, dropping other nodes; False, and none, if that is not enough.

        A negative number makes it smaller again, and always fits.
        """
        does_fit = self._make_room(node, num_bytes)
        if does_fit:
            node.num_bytes += num_bytes
            self.num_bytes += num_bytes
        return does_fit

    def _make_room(self, node: Node, num_bytes: int) -> bool:
        """Drops other nodes until more bytes fit; False, and none, if that is not enough."""
        self.pin(node)  # so that it is not dropped itself
        does_fit = num_bytes <= 0 or self._would_fit(num_bytes)
        while does_fit and self.num_bytes + num_bytes > self.max_bytes:
            is_dropped = self.drop_one()
            assert is_dropped, "it fits only if what nobody needs can be dropped"
        self.unpin(node)
        return does_fit

    def _would_fit(self, num_bytes: int) -> bool:
        # If others are dropped: what is pinned stays, and so do its ancestors.
        kept = {
            id(ancestor): ancestor
            for pinned in self._by_use
            if pinned.num_pins
            for ancestor in path(pinned)
        }
        return sum(ancestor.num_bytes for ancestor in kept.values()) + num_bytes <= self.max_bytes

    def pin(self, node: Node) -> None:
        """Keeps a node and those before it until `unpin`."""
        node.num_pins += 1

    def unpin(self, node: Node) -> None:
        """Undoes one `pin`."""
        assert node.num_pins > 0
        node.num_pins -= 1

    def drop_one(self) -> bool:
        """Drops the page that was used longest ago; False if all are needed."""
        node = next((unused for unused in self._by_use if not unused.num_references), None)
        if node is not None:
            self._drop(node)
        return node is not None

    def clear(self) -> None:
        """Drops every page, as if there had been none; nothing may be pinned."""
        while self._by_use:
            self._drop(next(iter(self._by_use)))
        self.num_evicted = 0

    def _use(self, node: Node) -> None:
        for ancestor in reversed(path(node)):
            self._by_use[ancestor] = None
            self._by_use.move_to_end(ancestor)

    def _drop(self, node: Node) -> None:
        assert node.parent is not None
        del self._by_use[node], node.parent.children[node.chunk]
        node.parent = None
        self.num_bytes -= node.num_bytes
        self.num_evicted += 1
        self._on_drop(node)


def path(node: Node) -> Sequence[Node]:
    """Returns the nodes from the first chunk to a node, without the root."""
    nodes = []
    while node.parent is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]
