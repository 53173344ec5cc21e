"""The verify call: the target on the newest token and the drafts, in the width that is needed.

And whether a call's logits are needed whole, where each device of a mesh has a part of them.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jspec.common.typing import AnyLogits, ApplyFn, Params, Tokens
from jspec.kernels import run_if, whole
from jspec.sampling.settings import SamplingSettings
from jspec.speculation.acceptance.tree import Tree, tree_call
from jspec.speculation.acceptance.types import Proposal
from jspec.speculation.runners_up import num_runners_up
from jspec.speculation.types import Drafter, observed_layers

_State = TypeVar("_State")


def call_on_block(
    target: ApplyFn,
    params: Params,
    block: Tokens,
    cache: Any,
    proposal: Proposal,
    tree: Tree | None,
    drafter: Drafter | None,
) -> tuple[AnyLogits, Array, Any]:
    """Returns the target's logits and hidden states on [newest token, drafts], and its cache."""
    inputs, first_layer = block, 0
    if proposal.prefix is not None:  # the drafter has run the first layers on this very block
        inputs, first_layer = proposal.prefix.hidden, proposal.prefix.num_layers
    return target(
        params,
        inputs,
        cache,
        hidden_layers=observed_layers(drafter),
        first_layer=first_layer,
        **tree_call(tree, cache.length),
    )


def with_whole_logits(target: ApplyFn) -> ApplyFn:
    """Returns the model with whole logits, as drafters and beams read them."""

    def apply(*arguments: Any, **options: Any) -> Any:
        logits, hidden, cache = target(*arguments, **options)
        return whole(logits), hidden, cache

    return apply


def as_read(
    logits: AnyLogits, settings: SamplingSettings, drafter: Drafter | None = None
) -> AnyLogits:
    """Returns logits whole if processors, log-probabilities or a drafter read them all."""
    switches = settings.switches
    is_read = switches.processors or switches.logprobs or num_runners_up(drafter)
    return whole(logits) if is_read else logits


def in_narrowest(
    verify: Callable[[_State, Proposal], tuple[_State, Any]],
    state: _State,
    proposal: Proposal,
    widths: Sequence[int],
) -> tuple[_State, Any]:
    """Returns what `verify` does with the proposal, cut to the smallest width that is enough.

    Which of `widths`, which rise, that is, or whether the whole proposal is needed, is known on the
    device only. The info, `verify`'s second result, is padded to its shape at full width.
    """
    widths = [width for width in widths if width < proposal.width] + [proposal.width]
    if len(widths) == 1:
        return verify(state, proposal)
    # The row with the most drafts decides: a batch has one width.
    num_needed = jnp.max(proposal.num_tokens)
    shapes = jax.eval_shape(verify, state, proposal)[1]
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    info = empty

    def pad(leaf: Array, wider: Array) -> Array:
        return jnp.pad(leaf, [(0, w - n) for n, w in zip(leaf.shape, wider.shape, strict=True)])

    for too_few, width in zip([-1, *widths], widths, strict=False):

        def verify_narrow(carry: tuple[_State, Any], width: int = width) -> tuple[_State, Any]:
            state, info = carry
            # Beside something that changes, or XLA cuts the proposal before the loop, for nothing.
            changing = jax.tree.leaves(info)[0]
            _, whole = jax.lax.optimization_barrier((changing, proposal))
            state, info = verify(state, whole.narrow(width))
            return state, jax.tree.map(pad, info, empty)

        is_fitting = (too_few < num_needed) & (num_needed <= width)
        state, info = run_if(is_fitting, verify_narrow, (state, info))
    return state, info
