"""A pattern as tables over tokens: where each token leads, and which tokens are forced.

    pattern  \\{"age": [0-9]+\\}      state after {"a      after {"age": 4
    next byte                        g, no other          a digit or }
    forced                           ge":_                nothing

State 0 is that of a text in which nothing of the pattern has been matched.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jspec.common.errors import InputError
from jspec.sampling.pattern_regex import MAX_NODES, ByteGraph

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
    found, waiting = set(nodes), list(nodes)
    while waiting:
        for node in graph.skips[waiting.pop()]:
            if node not in found:
                found.add(node)
                waiting.append(node)
    return frozenset(found)


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
