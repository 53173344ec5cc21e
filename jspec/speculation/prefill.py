"""Prefill: a prompt becomes the state of one row, which is then inserted into a batch."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jspec.common.typing import ApplyFn, RowCounts, Tokens
from jspec.kernels import whole
from jspec.speculation.logprobs import TokenLogprobs, token_logprobs
from jspec.speculation.plain import draw_next
from jspec.speculation.round import as_read
from jspec.speculation.types import Drafter, ModelParams, SpecState, observed_layers


def prefill_chunk(
    params: ModelParams,
    state: SpecState,
    tokens: Tokens,
    num_tokens: RowCounts,
    following: Tokens | None = None,
    *,
    target: ApplyFn,
    drafter: Drafter | None,
) -> tuple[SpecState, TokenLogprobs | None]:
    """Consumes one chunk of the prompt and draws the token after it.

    After the last chunk that token is the row's first output. After an earlier one it means
    nothing, and the next call overwrites it. The chunk is padded; at least one token counts. With
    the tokens that follow each of its own, [b t], their log-probabilities are returned, too; then
    the logits of all are computed.
    """
    one: dict[str, Any] = {} if following is not None else {"logits_at": num_tokens - 1}
    logits, hidden, cache = target(
        params.target,
        tokens,
        state.target_cache,
        hidden_layers=observed_layers(drafter),
        **one,
    )
    logits, scores = as_read(logits, state.settings), None
    if following is not None:
        logits = whole(logits)
        scores = token_logprobs(logits, jax.nn.softmax(logits), following, state.settings)
        logits = jnp.take_along_axis(logits, (num_tokens - 1)[:, None, None], axis=1)
    valid = jnp.arange(tokens.shape[1]) < num_tokens[:, None]
    # Padding was written after the chunk's tokens; it is not committed, and is overwritten later.
    cache = cache.commit(num_tokens)
    # All `length` tokens of the prompt are committed, so the next one has position `length`.
    last, probs = draw_next(logits[:, 0], state.settings, state.seed, cache.length)
    is_stop = (last[:, None] == state.stop_ids).any(axis=1) | (last < 0)
    # The drafter sees the prompt in the same chunks, with the target's hidden states.
    draft = state.draft
    if drafter is not None:
        draft = drafter.observe(params.draft, draft, tokens, hidden, valid)
    logprobs = None
    if probs is not None:
        logprobs = token_logprobs(logits, probs, last[:, None], state.settings)
    state = state.replace(
        target_cache=cache,
        draft=draft,
        last_token=last,
        is_done=is_stop | (cache.length + 1 >= state.max_length),
        last_logprobs=logprobs,
    )
    return state, scores


def insert(state: SpecState, row: Int32[Array, ""], prefilled: SpecState) -> SpecState:
    """Replaces one row of a batch by a prefilled request, a state of one row.

    Every leaf is per row, so nothing of the old request is left, and no other row changes.
    """
    # No `.at[row].set`: on a CPU that scatter converts the whole of a bfloat16 cache, and back.
    put = jax.lax.dynamic_update_slice_in_dim
    return jax.tree.map(lambda batch, one: put(batch, one, row, axis=0), state, prefilled)
