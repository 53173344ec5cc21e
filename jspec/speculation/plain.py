"""Plain decoding, which speculation must equal and must beat: prefill, a step, and the loop.

Prefill makes of a prompt the state of one row, which is then inserted into a batch. The loop runs
many rounds, plain or speculative, on the device before the host looks again, to stream text and to
check stop strings.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jspec.common.typing import ApplyFn, RowCounts, Tokens
from jspec.kernels import whole
from jspec.sampling.distribution import TokenLogprobs, draw_next, token_logprobs
from jspec.speculation.round import as_read, cut_at_end, silence
from jspec.speculation.types import Drafter, ModelParams, SpecState, StepInfo


def plain_step(
    params: ModelParams, state: SpecState, *, target: ApplyFn
) -> tuple[SpecState, StepInfo]:
    """Feeds the newest token of every row to the target, and draws the next token."""
    cache = state.target_cache
    # The last token is in no cache yet: it has position `length`, and the drawn one `length + 1`.
    with jax.named_scope("target"):
        logits, _, cache = target(params.target, state.last_token[:, None], cache)
    settings = state.settings.after(state.last_token)
    logits = as_read(logits, settings)
    with jax.named_scope("choice"):
        token, probs = draw_next(logits[:, 0], settings, state.seed, cache.length + 1)
    token = token[:, None]
    ones = jnp.ones_like(state.last_token)
    num_tokens, is_done = cut_at_end(state, token, ones)
    state = state.replace(
        target_cache=cache.commit(num_tokens),
        # A done row goes through the motions, but keeps its last token and commits nothing.
        last_token=jnp.where(state.is_done, state.last_token, token[:, 0]),
        settings=settings,
    )
    zeros = jnp.zeros_like(num_tokens)
    logprobs = None if probs is None else token_logprobs(logits, probs, token, settings)
    return silence(state, is_done), StepInfo(token, num_tokens, zeros, zeros, zeros, logprobs)


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
    the tokens that follow those of the chunk, [b t], their log-probabilities are returned, too;
    then the logits of all are computed.
    """
    options: dict[str, Any] = {} if following is not None else {"logits_at": num_tokens - 1}
    logits, hidden, cache = target(
        params.target,
        tokens,
        state.target_cache,
        hidden_layers=() if drafter is None else drafter.hidden_layers,
        **options,
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
    return jax.tree.map(lambda batch, leaf: put(batch, leaf, row, axis=0), state, prefilled)


def run_rounds(
    params: ModelParams,
    state: Any,
    num_rounds: Int32[Array, ""],
    *,
    step: Callable[[ModelParams, Any], tuple[Any, Any]],
    max_rounds: int,
) -> tuple[Any, Any, Int32[Array, ""]]:
    """Runs rounds until every row is done, `num_rounds` at most.

    `num_rounds` is traced, so that another number compiles nothing. The state, of rows or of beams,
    is meant to be donated. The infos of all rounds are stacked on a new first axis of `max_rounds`,
    and the last result is how many were run.
    """
    # A loop's carry has a fixed shape, so room for all infos is made before the first round. Under
    # jit the step is traced once for its shapes and for the loop; inlined, it leaves no call.
    step = jax.jit(step, inline=True)
    info = jax.eval_shape(step, params, state)[1]
    infos = jax.tree.map(lambda leaf: jnp.zeros((max_rounds, *leaf.shape), leaf.dtype), info)

    def is_wanted(carry: tuple[Array, Any, Any]) -> Array:
        index, state, _ = carry
        return (index < num_rounds) & ~state.is_done.all()

    def one_round(carry: tuple[Array, Any, Any]) -> tuple[Array, Any, Any]:
        index, state, infos = carry
        state, info = step(params, state)
        infos = jax.tree.map(lambda all_, new: all_.at[index].set(new), infos, info)
        return index + 1, state, infos

    index, state, infos = jax.lax.while_loop(is_wanted, one_round, (jnp.int32(0), state, infos))
    return state, infos, index
