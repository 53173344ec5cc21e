"""Structured output: propose what a pattern leaves no choice about.

An automaton follows the text, prompt included; where the pattern has begun and only one text can
come next, the tokens of that text are proposed. Nothing is enforced: the target is free to say
anything, and a text that leaves the pattern is matched again from the pattern's beginning. Drafts
follow from the text alone, so their distribution is one-hot. (The automaton over tokens is that of
arXiv 2307.09702, which constrains the model with it.)
"""

import dataclasses
import functools
import json
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int16, Int32

from jspec.common.errors import InputError
from jspec.common.typing import BlockFlags, Params, RowCounts, RowTokens, Tokens
from jspec.drafters.spec import BuiltDrafter, DrafterSpec
from jspec.sampling.patterns import compile_pattern, forced_tokens, token_table
from jspec.speculation.types import Drafter, Kind, Proposal, RoundInputs
from jspec.weights import TokenizerLike

_INTEGER = r"-?(?:0|[1-9][0-9]*)"
_VALUES = {
    "string": r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4}))*"',
    "number": _INTEGER + r"(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?",
    "integer": _INTEGER,
    "boolean": "(?:true|false)",
}
_PLACEHOLDER = re.compile('"<([^"<>]*)>"')


class PatternParams(NamedTuple):
    """The automaton's tables, by state."""

    next_state: Int16[Array, "n v"]  # after each token
    forced: Int32[Array, "n w"]  # the tokens that have to come
    num_forced: Int32[Array, "n"]


def make_tables(
    pattern: str, tokenizer: TokenizerLike, *, vocab_size: int, num_draft_tokens: int
) -> PatternParams:
    """Returns the tables of a regular expression, see `sampling.patterns`, over a target's tokens.

    Raises:
      InputError: an expression that is not supported or too large, or such a tokenizer.
    """
    automaton, token_bytes = compile_pattern(pattern), tokenizer.token_bytes()
    encode = functools.partial(tokenizer.encode, add_bos=False)
    tokens, counts = forced_tokens(automaton, token_bytes, encode, num_draft_tokens)
    table = token_table(automaton, token_bytes, vocab_size)
    return PatternParams(jnp.asarray(table), jnp.asarray(tokens), jnp.asarray(counts))


@dataclasses.dataclass(frozen=True)
class PatternDrafter(Drafter):
    """Proposes forced tokens. Its state is the automaton's, [b]."""

    num_draft_tokens: int
    kinds = (Kind("pattern", 0.8, 0.9),)  # acceptance before it is known

    def init(self, batch_size: int, capacity: int) -> RowCounts:
        """Returns the state of rows that have seen nothing."""
        return jnp.zeros([batch_size], jnp.int32)

    def observe(
        self, params: Params, state: RowCounts, tokens: Tokens, hidden: Array, valid: BlockFlags
    ) -> RowCounts:
        """Follows committed tokens."""

        def follow(i: Int32[Array, ""], state: RowCounts) -> RowCounts:
            return jnp.where(valid[:, i], _advance(params, state, tokens[:, i]), state)

        # One token after another: where a token leads depends on the state before it.
        return jax.lax.fori_loop(0, tokens.shape[1], follow, state)

    def propose(
        self, params: PatternParams, state: RowCounts, inputs: RoundInputs
    ) -> tuple[Proposal, RowCounts]:
        """Looks up what the state after the last token forces."""
        here = _advance(params, state, inputs.last_token)
        num_tokens = jnp.minimum(params.num_forced[here], inputs.wanted())
        # The state stays as it was: `last_token` is observed when it is committed.
        return Proposal(params.forced[here], num_tokens), state


def _advance(params: PatternParams, state: RowCounts, token: RowTokens) -> RowCounts:
    # The table is int16 to stay small; states are carried as int32.
    return params.next_state[state, token].astype(jnp.int32)


def skeleton_pattern(skeleton: str) -> str:
    """Returns the regular expression of a JSON text with placeholders.

    An example is {"name": "<string>", "age": "<integer>"}. All but the placeholders stands as it is
    written, spaces and line breaks included.

    Raises:
      InputError: no JSON object or array, or an unknown placeholder.
    """
    skeleton = skeleton.strip()
    if not skeleton:
        raise InputError("expected a JSON skeleton (--draft_json), got an empty text")
    try:
        # Parsed only as a check: the pattern is made from the text, layout included.
        value = json.loads(skeleton)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"expected a JSON skeleton (--draft_json), got {skeleton[:60]!r}: {error}"
        ) from None
    if not isinstance(value, dict | list):
        raise InputError(f"expected a JSON object or array as skeleton, got {skeleton[:60]!r}")
    # A split by one group alternates: literal, name, literal, name, ..., literal.
    literal, *rest = _PLACEHOLDER.split(skeleton)
    pattern = re.escape(literal)
    for name, literal in zip(rest[::2], rest[1::2], strict=True):
        if name not in _VALUES:
            known = ", ".join(f"<{known}>" for known in _VALUES)
            raise InputError(f"expected placeholders among {known}; got <{name}>")
        # A placeholder stands for any value of its kind.
        pattern += _VALUES[name] + re.escape(literal)
    return pattern


def build(spec: DrafterSpec) -> BuiltDrafter:
    """Returns the drafter of the automaton that the options describe."""
    pattern, skeleton = spec.options.pattern, spec.options.json_skeleton
    # Exactly one of the two must be given.
    if (pattern is None) == (skeleton is None):
        given = "neither" if pattern is None else "both"
        raise InputError(
            "the drafter 'pattern' expects pattern (--draft_pattern), a regular expression, or "
            f"json_skeleton (--draft_json); got {given}"
        )
    if skeleton is not None:
        pattern = skeleton_pattern(skeleton)
    assert pattern is not None
    assert spec.tokenizer is not None
    tables = make_tables(
        pattern,
        spec.tokenizer,
        vocab_size=spec.target_config.vocab_size,
        num_draft_tokens=spec.num_draft_tokens,
    )
    return BuiltDrafter(PatternDrafter(spec.num_draft_tokens), tables)
