"""Which pages are free, by number; their contents are elsewhere."""


class PagePool:
    """Pages from 1 to `num_pages`, each free or owned.

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
