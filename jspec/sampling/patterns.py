"""A regular expression as an automaton over bytes, and as tables over tokens.

    pattern  \\{"age": [0-9]+\\}      state after {"a      after {"age": 4
    next byte                        g, no other          a digit or }
    forced                           ge":_                nothing

State 0 is that of a text in which nothing of the pattern has been matched.

Python's own parser reads the expression. Supported are literals, classes, groups, `|` and
repetitions, greedy or not; `\\d`, `\\w` and `\\s` are ASCII. Anchors, look-around, references and
flags are refused: the only question is how a text that follows the expression may go on.
"""

import itertools
import re
import re._parser as parser  # type: ignore[import-untyped]
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jspec.common.errors import InputError

MAX_NODES = 10_000
_LAST = 0x10FFFF
_CLASSES = {
    "CATEGORY_DIGIT": [(0x30, 0x39)],
    "CATEGORY_WORD": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
    "CATEGORY_SPACE": [(0x09, 0x0D), (0x20, 0x20)],
}
Ranges = Sequence[tuple[int, int]]
# What Python's parser calls a part that is refused, and what its author calls it.
_UNSUPPORTED = {
    "AT": "^, $ and \\b inside it are not supported",
    "ASSERT": "look-around is not supported",
    "ASSERT_NOT": "look-around is not supported",
    "GROUPREF": "references to groups are not supported",
}
_Items = Any  # the pairs (operation, value) of Python's parser


def why_unsupported(op: str) -> str:
    """Returns what is said of a part of an expression that is refused, by its parser's name."""
    return _UNSUPPORTED.get(op, f"{op.lower()} is not supported")


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
        raise self._error(why_unsupported(op))

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
            # A separate node: a jump back to `start` would also repeat what else leaves it.
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
    parts = [
        character_range
        for part, what in value[is_negated:]
        for character_range in ranges_of(str(part), what)
    ]
    return complement(parts) if is_negated else parts


def complement(ranges: Ranges) -> Ranges:
    """Returns all other characters."""
    rest, begin = [], 0
    for low, high in sorted(ranges):
        if low > begin:
            rest.append((begin, low - 1))
        # Ranges may overlap, so the bound never falls.
        begin = max(begin, high + 1)
    return [*rest, (begin, _LAST)] if begin <= _LAST else rest


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


# A pattern is refused while its automaton grows. Libraries such as interegular build it to the end:
# with them `(a|b)*a(a|b){14}` takes over half a minute, and one with {20} does not end.
MAX_STATES = 512
MAX_TABLE_BYTES = 64 * 2**20
_MAX_FORCED_BYTES = 256
_MAX_WORK = 2_000_000  # nodes reached, and pairs of an edge and a range of bytes: seconds
_NOWHERE = -1


class ByteAutomaton(NamedTuple):
    """A deterministic automaton over bytes; no byte leads to the start, state 0."""

    next_state: np.ndarray  # [n 256], -1 where a byte leads nowhere
    is_end: np.ndarray  # states in which the pattern is matched, [n]


def compile_pattern(
    pattern: str, max_states: int = MAX_STATES, max_nodes: int = MAX_NODES
) -> ByteAutomaton:
    """Returns the automaton of a regular expression, by subset construction.

    Raises:
      InputError: no expression that is supported, or one of too many states.
    """
    graph = ByteGraph(pattern, max_nodes, max_states)
    sets = [_closure(graph, [0])]
    index: dict[frozenset[int], int] = {}
    table: list[np.ndarray] = []
    work = 0
    while len(table) < len(sets):
        row = np.full(256, _NOWHERE, np.int32)
        edges = [edge for node in sets[len(table)] for edge in graph.edges[node]]
        # Bytes in ranges instead of 256 single steps.
        cuts = sorted({edge[0] for edge in edges} | {edge[1] + 1 for edge in edges})
        work += len(edges) * len(cuts) + len(sets[len(table)])
        if work > _MAX_WORK:
            raise InputError(f"expected a pattern that is simpler, got {pattern[:60]!r}")
        # Between two cuts all bytes lead to the same nodes.
        for low, high in itertools.pairwise(cuts):
            goals = {goal for first, last, goal in edges if first <= low <= last}
            if not goals:
                continue
            reached = _closure(graph, goals)
            # The start is not in the index, so no byte ever leads to state 0.
            if reached not in index:
                index[reached] = len(sets)
                sets.append(reached)
            row[low:high] = index[reached]
        table.append(row)
        # Checked as it grows: some short expressions have millions of states.
        if len(sets) > max_states:
            raise InputError(
                f"expected a pattern of at most {max_states} states, got more: {pattern[:60]!r}"
            )
    return ByteAutomaton(np.stack(table), np.array([graph.end in nodes for nodes in sets]))


def _closure(graph: ByteGraph, nodes: Sequence[int] | set[int]) -> frozenset[int]:
    reached, waiting = set(nodes), list(nodes)
    while waiting:
        for node in graph.skips[waiting.pop()]:
            if node not in reached:
                reached.add(node)
                waiting.append(node)
    return frozenset(reached)


def forced_bytes(automaton: ByteAutomaton, state: int) -> bytes:
    """Returns the longest run of bytes from a state along which nothing else may come."""
    run = bytearray()
    # Where the pattern may end, nothing is forced.
    while not automaton.is_end[state] and len(run) < _MAX_FORCED_BYTES:
        (choices,) = np.nonzero(automaton.next_state[state] != _NOWHERE)
        if len(choices) != 1:
            break
        run.append(int(choices[0]))
        state = int(automaton.next_state[state, choices[0]])
    return bytes(run)


def token_table(
    automaton: ByteAutomaton, token_bytes: Sequence[bytes], vocab_size: int
) -> np.ndarray:
    """Returns the state after each token, [n v] int16.

    A token that leads nowhere is tried again from the start; one that leads nowhere from there, or
    has no text, leads to the start.

    Raises:
      InputError: the table would be larger than MAX_TABLE_BYTES.
    """
    num_states = len(automaton.next_state)
    # Checked before the table is built.
    if 2 * num_states * vocab_size > MAX_TABLE_BYTES:
        raise InputError(
            f"expected a pattern of at most {MAX_TABLE_BYTES // (2 * vocab_size)} states for a "
            f"vocabulary of {vocab_size}, got {num_states}"
        )
    texts = list(token_bytes)[:vocab_size]
    lengths = np.array([len(text) for text in texts] + [0] * (vocab_size - len(texts)))
    letters = np.zeros([vocab_size, lengths.max(initial=1)], np.uint8)
    for token_id, text in enumerate(texts):
        letters[token_id, : len(text)] = np.frombuffer(text, np.uint8)
    table = np.full([num_states, vocab_size], _NOWHERE, np.int16)
    for state in range(num_states):
        alive = np.nonzero(lengths)[0]
        reached = np.full(len(alive), state)
        for i in range(letters.shape[1]):
            # All living tokens step at once; those that lead nowhere are dropped below.
            reached = automaton.next_state[reached, letters[alive, i]]
            is_over = (lengths[alive] == i + 1) & (reached != _NOWHERE)
            table[state, alive[is_over]] = reached[is_over]
            goes_on = (lengths[alive] > i + 1) & (reached != _NOWHERE)
            alive, reached = alive[goes_on], reached[goes_on]
    # The text may begin the pattern anew with this token.
    from_start = np.maximum(table[0], 0)
    return np.where(table == _NOWHERE, from_start, table)


def forced_tokens(
    automaton: ByteAutomaton,
    token_bytes: Sequence[bytes],
    encode: Callable[[str], list[int]],
    width: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens that are forced in each state, [n w], and how many they are, [n].

    Nothing is forced at the start. `encode` makes tokens of a text, without BOS.
    """
    # Of tokens with the same bytes any one will do: the last id is kept.
    by_bytes = {text: token_id for token_id, text in enumerate(token_bytes) if text}
    tokens = np.zeros([len(automaton.is_end), width], np.int32)
    counts = np.zeros(len(automaton.is_end), np.int32)
    # From 1: at the start any text may come.
    for state in range(1, len(counts)):
        run = forced_bytes(automaton, state)
        ids = _encode_run(run, token_bytes, by_bytes, encode)[:width]
        tokens[state, : len(ids)], counts[state] = ids, len(ids)
    return tokens, counts


def _encode_run(
    run: bytes,
    token_bytes: Sequence[bytes],
    by_bytes: Mapping[bytes, int],
    encode: Callable[[str], list[int]],
) -> list[int]:
    text = run.decode(errors="ignore")
    # The tokenizer's own split is what the model has learnt to say.
    if text and run.startswith(text.encode()):
        try:
            ids = encode(text)
        except InputError:  # a byte that the vocabulary lacks
            ids = []
        if b"".join(token_bytes[i] for i in ids) == text.encode():
            return ids
    # The run begins inside a character, or the tokenizer puts a space before every text: then the
    # longest token that fits comes first, and so on.
    ids, longest = [], max(map(len, by_bytes), default=0)
    while run:
        pieces = (run[:n] for n in range(min(longest, len(run)), 0, -1))
        piece = next((piece for piece in pieces if piece in by_bytes), None)
        if piece is None:
            break
        ids.append(by_bytes[piece])
        run = run[len(piece) :]
    return ids
