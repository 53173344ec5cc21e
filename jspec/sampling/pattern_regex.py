"""A regular expression as a nondeterministic automaton over the bytes of UTF-8.

Python's own parser reads the expression. Supported are literals, classes, groups, `|` and
repetitions, greedy or not; `\\d`, `\\w` and `\\s` are ASCII. Anchors, look-around, references and
flags are refused: the drafter only asks how a text that follows the expression may go on.
"""

import re
import re._parser as parser  # type: ignore[import-untyped]
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jspec.common.errors import InputError

MAX_NODES = 10_000
_LAST = 0x10FFFF
_CLASSES = {
    "CATEGORY_DIGIT": [(0x30, 0x39)],
    "CATEGORY_WORD": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
    "CATEGORY_SPACE": [(0x09, 0x0D), (0x20, 0x20)],
}
Ranges = Sequence[tuple[int, int]]
_Items = Any  # the pairs (operation, value) of Python's parser


class ByteGraph:
    """The automaton: nodes from 0, the start.

    Attributes:
      edges: of each node, (first byte, last byte, node).
      skips: of each node, the nodes reached without a byte.
      end: the node in which the expression is matched.
    """

    def __init__(self, pattern: str, max_nodes: int, max_states: int) -> None:
        """Reads an expression; an InputError where it is none, too large or not supported."""
        self._max_nodes, self._max_states = max_nodes, max_states
        self.edges: list[list[tuple[int, int, int]]] = []
        self.skips: list[list[int]] = []
        self._pattern = pattern
        try:
            parsed: _Items = parser.parse(pattern, re.ASCII)
            # Python sets ASCII itself; verbose only drops spaces of the expression.
            if parsed.state.flags & ~(re.ASCII | re.VERBOSE):
                raise self._error("flags are not supported")
            self.end = self._sequence(parsed, self._node())
        except re.error as error:
            raise self._error(f"{error.msg} at position {error.pos}") from None
        except (ValueError, OverflowError, RecursionError, Warning) as error:
            if isinstance(error, InputError):
                raise
            raise self._error(str(error) or "too deep") from None

    def _error(self, reason: str) -> InputError:
        return InputError(f"expected a regular expression, got {self._pattern[:200]!r}: {reason}")

    def _node(self, skip_from: int | None = None) -> int:
        if len(self.edges) >= self._max_nodes:
            # Nested repetitions multiply: the cap stops them before memory runs out.
            raise self._error("it is too large")
        self.edges.append([])
        self.skips.append([])
        if skip_from is not None:
            self.skips[skip_from].append(len(self.edges) - 1)
        return len(self.edges) - 1

    def _sequence(self, items: _Items, start: int) -> int:
        for op, value in items:
            start = self._item(str(op), value, start)
        return start

    def _item(self, op: str, value: Any, start: int) -> int:
        """Adds one part of an expression after a node; returns the node after it."""
        if op in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            return self._character(ranges_of(op, value), start)
        if op == "SUBPATTERN":
            _, added, removed, items = value
            if added or removed:
                raise self._error("flags are not supported")
            return self._sequence(items, start)
        if op == "BRANCH":
            ends = [self._sequence(items, self._node(start)) for items in value[1]]
            return self._join(ends)
        # Greedy or not, the set of texts is the same.
        if op in ("MAX_REPEAT", "MIN_REPEAT"):
            fewest, most, items = value
            return self._repeat(fewest, most, items, start)
        raise self._error(f"{op.lower()} is not supported")

    def _join(self, nodes: Iterable[int]) -> int:
        joined = self._node()
        for node in nodes:
            self.skips[node].append(joined)
        return joined

    def _repeat(self, fewest: int, most: Any, items: _Items, start: int) -> int:
        # Repetitions are unrolled: an automaton cannot count. Each takes a state at least. Too many
        # are refused before they are made, which would take seconds.
        if max(fewest, 0 if str(most) == "MAXREPEAT" else most) > self._max_states:
            raise InputError(
                f"expected a pattern of at most {self._max_states} states, got more: "
                f"{self._pattern[:60]!r}"
            )
        for _ in range(fewest):
            start = self._sequence(items, self._node(start))
        if str(most) == "MAXREPEAT":
            # A node of its own: a jump back to `start` would also repeat what else leaves it.
            loop = self._node(start)
            self.skips[self._sequence(items, self._node(loop))].append(loop)
            return self._node(loop)
        ends = [start]
        # Every optional repetition may be the last, so each one's end is joined.
        for _ in range(most - fewest):
            ends.append(self._sequence(items, self._node(ends[-1])))
        return self._join(ends)

    def _character(self, ranges: Ranges, start: int) -> int:
        """Adds one character; what follows a first byte is shared by all that it follows."""
        end = self._node()
        nodes: dict[tuple[tuple[int, int], ...], int] = {(): end}

        def node_before(rest: tuple[tuple[int, int], ...]) -> int:
            if rest not in nodes:
                node = nodes[rest] = self._node()
                self.edges[node].append((*rest[0], node_before(rest[1:])))
            return nodes[rest]

        for low, high in ranges:
            # One edge for each range of first bytes; the nodes after it are shared.
            for first, *rest in utf8_ranges(low, high):
                self.edges[start].append((*first, node_before(tuple(rest))))
        return end


def ranges_of(op: str, value: Any) -> Ranges:
    """Returns the characters that one part of a class, or a class, stands for."""
    if op == "ANY":
        # Without DOTALL a dot is any character but a line break.
        return complement([(0x0A, 0x0A)])
    if op == "LITERAL":
        return [(value, value)]
    if op == "NOT_LITERAL":
        return complement([(value, value)])
    if op == "RANGE":
        return [value]
    if op == "CATEGORY":
        name = str(value)
        ranges = _CLASSES[name.replace("NOT_", "")]
        return complement(ranges) if "NOT_" in name else ranges
    is_negated = str(value[0][0]) == "NEGATE"
    parts = [one for part, what in value[is_negated:] for one in ranges_of(str(part), what)]
    return complement(parts) if is_negated else parts


def complement(ranges: Ranges) -> Ranges:
    """Returns all other characters."""
    found, begin = [], 0
    for low, high in sorted(ranges):
        if low > begin:
            found.append((begin, low - 1))
        # Ranges may overlap, so the bound never falls.
        begin = max(begin, high + 1)
    return [*found, (begin, _LAST)] if begin <= _LAST else found


def utf8_ranges(low: int, high: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yields the encodings of the characters from `low` to `high`, as ranges of each byte.

    Surrogates between them are left out, as UTF-8 has none.
    """
    # Cuts between encodings of different lengths, and around the surrogates.
    for cut in (0x80, 0x800, 0xD800, 0xE000, 0x10000):
        if low < cut <= high:
            yield from utf8_ranges(low, cut - 1)
            yield from utf8_ranges(cut, high)
            return
    if low > high or 0xD800 <= low < 0xE000:
        return
    for num_bits in (6, 12, 18) if high >= 0x80 else ():
        mask = (1 << num_bits) - 1
        if low & ~mask != high & ~mask:
            # Whole blocks of the last bytes only; the rest on either side is cut off.
            if low & mask:
                cut = (low | mask) + 1
            elif high & mask != mask:
                cut = high & ~mask
            else:
                continue
            yield from utf8_ranges(low, cut - 1)
            yield from utf8_ranges(cut, high)
            return
    yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))
