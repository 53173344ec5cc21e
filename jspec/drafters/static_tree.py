"""A tree of one shape for every round, by how often the token of each rank is kept.

    rates    depth 1: 0.4 0.2 0.1       path    rank 0   0.40        the best nodes by the product
             depth 2: 0.5 0.1                   0, 0     0.20        of the rates on their paths
                                                rank 1   0.20

For drafters that know the best tokens of a position in order, but not how likely each is in this
round (Medusa, arXiv 2401.10774, section 2.3.3; Token Recycling, 2408.08696).
"""

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple


class StaticTree(NamedTuple):
    """A tree's nodes, the best first, and so each after its parent.

    Attributes:
      parents: of each node, -1 for the root.
      ranks: of each node's token among the tokens of its position.
      depths: 1 for the children of the root.
      scores: the logarithms of the estimated probabilities that the nodes are kept.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    depths: tuple[int, ...]
    scores: tuple[float, ...]

    @property
    def widths(self) -> tuple[int, ...]:
        """How many tokens of a position are asked for, by depth."""
        pairs = list(zip(self.depths, self.ranks, strict=True))
        return tuple(
            1 + max(rank for at, rank in pairs if at == depth)
            for depth in range(1, max(self.depths) + 1)
        )


def best_static_tree(rates: Sequence[Sequence[float]], num_nodes: int) -> StaticTree:
    """Returns the tree of at most `num_nodes` nodes that promises the most accepted drafts.

    `rates[d][r]` is how often the token of rank r is kept at depth d + 1, once its parent is; there
    are no deeper nodes than rates. Nodes that are never kept are left out.
    """
    nodes: list[tuple[int, int, int, float]] = []
    heap: list[tuple[float, int, int, int]] = []  # (-score, parent, rank, depth)

    def offer(parent: int, depth: int, score: float) -> None:
        for rank, rate in enumerate(rates[depth - 1] if depth <= len(rates) else ()):
            if rate > 0:
                heapq.heappush(heap, (-(score + math.log(rate)), parent, rank, depth))

    offer(-1, 1, 0.0)
    # A child's score is at most its parent's, so no better node comes later.
    while heap and len(nodes) < num_nodes:
        loss, parent, rank, depth = heapq.heappop(heap)
        nodes.append((parent, rank, depth, -loss))
        offer(len(nodes) - 1, depth + 1, -loss)
    return StaticTree(*map(tuple, zip(*nodes, strict=True)))  # type: ignore[arg-type]
