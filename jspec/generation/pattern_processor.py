"""A pattern that the answer must match: only tokens are allowed after which it still can.

The automaton over bytes becomes one over tokens (arXiv 2307.09702). Most tokens lead to the same
place from every state, such as all words inside a string: they share one column, and the table of a
request is small enough to be carried in its row. What follows a draft that is not allowed, and is
therefore rejected, does not matter: there, as in rows without pattern, everything is allowed.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int16, Int32

from jspec.common.errors import InputError
from jspec.common.typing import RowTokens
from jspec.sampling.patterns import ByteAutomaton, compile_pattern
from jspec.sampling.settings import Processor
from jspec.weights.resolver import LoadedModel

# Of every row, whatever its pattern: one shape compiles once.
MAX_STATES = 4096
MAX_CLASSES = 512
_MAX_NODES = 60_000
_CACHED = 16  # patterns
_FREE = 0  # the state in which everything is allowed; no token leads to it that is allowed


class PatternState(NamedTuple):
    """Where each row is in its pattern.

    Attributes:
      next_state: after a token of each class; 0 where none is allowed, [b n c].
      class_of: of each token, [b v].
      here: the state; 0 without a pattern, [b].
    """

    next_state: Int16[Array, "b n c"]
    class_of: Int16[Array, "b v"]
    here: Int32[Array, "b"]


def make_pattern_processor(target: LoadedModel) -> Processor:
    """Returns the processor of `SamplingParams.pattern`, for the tokens of a target."""

    @functools.lru_cache(_CACHED)
    def tables(pattern: str) -> tuple[np.ndarray, np.ndarray]:
        return make_tables(pattern, target.tokenizer.token_bytes(), target.config.vocab_size)

    def init(
        settings: Any, *, prompt: list[int], stop_ids: list[int], vocab_size: int
    ) -> PatternState:
        del prompt
        if settings.pattern is None:
            shape = MAX_STATES, MAX_CLASSES
            nothing = jnp.zeros(shape, jnp.int16), jnp.zeros([vocab_size], jnp.int16)
            return PatternState(*nothing, jnp.int32(_FREE))
        table, class_of = tables(settings.pattern)
        class_of = class_of.copy()
        # Whatever ends an answer has the last class, that of the pattern's end.
        class_of[[token_id for token_id in stop_ids if token_id < vocab_size]] = MAX_CLASSES - 1
        # Not `jnp.asarray`, for which JAX compiles something.
        return PatternState(jax.device_put(table), jax.device_put(class_of), jnp.int32(1))

    return Processor("pattern", lambda settings: settings.pattern is not None, init, apply, update)


def apply(state: PatternState, logits: Float32[Array, "b v"]) -> Float32[Array, "b v"]:
    """Returns the logits, with -inf for tokens after which the pattern cannot be matched."""

    def masked() -> Float32[Array, "b v"]:
        row = jnp.take_along_axis(state.next_state, state.here[:, None, None], axis=1)[:, 0]
        goal = jnp.take_along_axis(row, state.class_of.astype(jnp.int32), axis=1)
        return jnp.where((goal != _FREE) | (state.here == _FREE)[:, None], logits, -jnp.inf)

    # Where no row has a pattern, nothing is looked up for each token of the vocabulary.
    return jax.lax.cond((state.here != _FREE).any(), masked, lambda: logits)


def update(state: PatternState, token: RowTokens) -> PatternState:
    """Follows one more token."""
    rows = jnp.arange(len(token))
    # No token, -1, is drawn by a row that has failed: where it goes does not matter.
    kind = state.class_of[rows, jnp.maximum(token, 0)]
    return state._replace(here=state.next_state[rows, state.here, kind].astype(jnp.int32))


def make_tables(
    pattern: str, token_bytes: Sequence[bytes], vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the state after tokens of each class, [n c], and the class of each token, [v].

    State 1 is the pattern's beginning. The last class leads on from its ends alone.

    Raises:
      InputError: a pattern that is not supported, is too large, or that no tokens can spell.
    """
    automaton = compile_pattern(pattern, MAX_STATES - 1, _MAX_NODES)
    goals, goal_of = _follow(automaton, list(token_bytes)[:vocab_size])
    goals = _without_dead_ends(goals, automaton.is_end)
    columns, class_of_goal = np.unique(goals, axis=1, return_inverse=True)
    if columns.shape[1] >= MAX_CLASSES:
        raise _too_large(columns.shape[1])
    table = np.zeros([MAX_STATES, MAX_CLASSES], np.int16)
    table[1 : len(goals) + 1, : columns.shape[1]] = columns
    table[1 : len(goals) + 1, -1] = np.where(automaton.is_end, 1 + np.arange(len(goals)), _FREE)
    class_of = np.zeros(vocab_size, np.int16)
    class_of[: len(goal_of)] = class_of_goal.reshape(-1)[goal_of]
    return table, class_of


def _too_large(count: int) -> InputError:
    return InputError(
        f"expected a simpler pattern, of fewer than {MAX_CLASSES} classes of tokens, got {count}"
    )


def _follow(automaton: ByteAutomaton, texts: Sequence[bytes]) -> tuple[np.ndarray, list[int]]:
    """Returns columns, [n s], and each text's: the state after it from each state.

    States count from 1; 0 is nowhere. Bytes that lead to the same states from everywhere are one
    letter, and texts that do share a column, by which the texts that begin with them go on.
    """
    table, letter_of = np.unique(automaton.next_state, axis=1, return_inverse=True)
    steps = np.zeros([len(table) + 1, table.shape[1]], np.int16)
    steps[1:] = table + 1
    letters = bytes(letter_of.reshape(-1).tolist())
    nowhere, begin = np.zeros(len(steps), np.int16), np.arange(len(steps), dtype=np.int16)
    columns = [nowhere, begin]
    number_of = {column.tobytes(): number for number, column in enumerate(columns)}
    after: dict[tuple[int, int], int] = {}
    numbers = []
    for text in texts:
        number = 1 if text else 0  # special tokens have no text
        for letter in text.translate(letters):
            if (number, letter) not in after:
                column = steps[columns[number], letter]
                after[number, letter] = number_of.setdefault(column.tobytes(), len(columns))
                if len(number_of) > len(columns):
                    columns.append(column)
                if len(columns) > 16 * MAX_CLASSES:  # beginnings of tokens have columns as well
                    raise _too_large(len(columns))
            number = after[number, letter]
        numbers.append(number)
    used, index = np.unique(numbers, return_inverse=True)
    return np.stack([columns[number][1:] for number in used], axis=1), index.reshape(-1).tolist()


def _without_dead_ends(goals: np.ndarray, is_end: np.ndarray) -> np.ndarray:
    """Returns the states after each text, with 0 in the place of those that lead to no end.

    Raises:
      InputError: not even from the beginning do tokens lead to an end.
    """
    is_alive, before = np.concatenate([[False], is_end]), -1
    while before != is_alive.sum():
        before = is_alive.sum()
        # Backwards: states far from the beginning have high numbers.
        for state in range(len(goals), 0, -1):
            is_alive[state] |= is_alive[goals[state - 1]].any()
    if not is_alive[1]:
        raise InputError("expected a pattern that the model's tokens can spell, got another")
    return np.where(is_alive[goals], goals, _FREE)
