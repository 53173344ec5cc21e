"""Speculative execution of any two functions (arXiv 2211.17192, section 6: "any two functions").

    state ──► f draws num_drafts values, one after another: the guesses
                   │
                   ▼
    ONE call of vmap(g) on the states before and after each guess gives g's distributions
                   │
                   ▼
    guesses are kept up to the first rejection, and one more value is drawn: g's, or the residual

`g` is an expensive random step, `f` a cheap guess at it. The values follow exactly the distribution
that g alone gives, whatever f is; a round of one call emits from 1 to num_drafts + 1 of them.

*State* is the past: a pytree of arrays whose shapes and types never change. `f(state)` and
`g(state)` return the distribution of the next value, a single array; see `distributions`.
`update(state, value)` returns the state after a value. All three are pure. Parameters belong in a
callable pytree, `jax.tree_util.Partial(apply, params)`: arrays that a plain function closes over
become constants of the program. The states of one round lie side by side, num_drafts + 1 copies.

*Seeds.* Under "coupled" (arXiv 2408.07978) the value of step t is drawn with the key of step t, by
f and by g, and a guess is kept if g draws the same: the values are those of g alone, whatever f and
num_drafts are. The rule "rejection" keys its noise by the first step of the round, as
`sampling.noise` explains. With num_drafts=0 f is not run, and both rules are g alone.

*One program.* Equal functions, shapes and counts share one compiled program, whose rounds are one
loop on the device. A lambda that is made anew for every call is compiled anew.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int32

from jspec.common.errors import InputError, check_among, check_count
from jspec.kernels import while_any
from jspec.sampling.noise import KEY_TYPE, AcceptanceNoise, Purpose
from jspec.speculation.acceptance import rejection
from jspec.speculation.distributions import (
    Categorical,
    draw,
    draw_after,
    gumbel,
    log_prob,
    log_ratio,
)
from jspec.speculation.function_checks import (
    GUESSES_AXIS,
    StepFn,
    UpdateFn,
    check_functions,
    check_key,
    check_mesh,
    is_pytree,
    latest,
)
from jspec.speculation.types import AcceptanceRule, Proposal

_MOST_STEPS, _MOST_DRAFTS = 10**8, 4096
_NO_FAULT, _FAULT_OF_F, _FAULT_OF_G = 0, 1, 2


class Speculation(struct.PyTreeNode):
    """The values of a chain, and what they took.

    Attributes:
      values: one a step, [num_steps, ...].
      is_guess: which of them were guesses of f, [num_steps].
      state: after the last value.
      num_values: how many of the values are real, []: all, unless a `log_prob` was NaN.
      num_rounds: calls of vmapped g, []; each computed num_drafts + 1 distributions side by side.
      num_proposed: guesses made, [], without those past the last step.
    """

    values: Array
    is_guess: Bool[Array, "n"]
    state: Any
    num_values: Int32[Array, ""]
    num_rounds: Int32[Array, ""]
    num_proposed: Int32[Array, ""]

    @property
    def num_accepted(self) -> Int32[Array, ""]:
        """Guesses kept, []."""
        return jnp.sum(self.is_guess, dtype=jnp.int32)


class RoundKeys(NamedTuple):
    """The randomness of one round.

    Attributes:
      draft: with which f draws, [w].
      accept: for the uniform numbers that decide, [w].
      after: for the value after the kept guesses, [].
      plain: with which g alone would draw at the round's steps, [w + 1].
    """

    draft: Array
    accept: Array
    after: Array
    plain: Array


class Rule(NamedTuple):
    """How guesses are judged.

    Attributes:
      judge: (g's distributions [w + 1], f's [w], guesses [w], `RoundKeys`) -> how many guesses are
        kept, and the value after them.
      is_shared: whether f draws with the keys with which g alone would.
    """

    judge: Callable[[Any, Any, Array, RoundKeys], tuple[Array, Array]]
    is_shared: bool


def speculate(
    f: StepFn,
    g: StepFn,
    state: Any,
    rng_key: Array,
    *,
    num_steps: int,
    num_drafts: int,
    update: UpdateFn = latest,
    acceptance: str = "rejection",
) -> Speculation:
    """Runs a chain of values drawn from g, with fewer calls of g in turn; f guesses ahead.

    Example:
      >>> f = lambda x: jspec.Gaussian(0.9 * x, 1.0)
      >>> g = lambda x: jspec.Gaussian(expensive_mean(x), 1.0)
      >>> key = jax.random.key(0)
      >>> chain = jspec.speculate(f, g, jnp.float32(0), key, num_steps=1000, num_drafts=4)

    Args:
      f: the cheap guess: state -> distribution.
      g: the step itself: state -> distribution.
      state: the past, a pytree of arrays.
      rng_key: for all draws; the key is consumed.
      num_steps: values wanted, from 1 on.
      num_drafts: guesses a round; 0 runs g alone.
      update: (state, value) -> the state after the value.
      acceptance: "rejection" (arXiv 2211.17192), or "coupled" (arXiv 2408.07978).

    Returns:
      The values, the state after them, and counts.

    Raises:
      InputError: a number out of range; no function, or not one key; f and g give values of other
        shapes, types or supports; one of them cannot be traced; the state changes its shape; or a
        `log_prob` is NaN, as of a Gaussian whose scale is not above 0, which a
        surrounding jit or vmap hides: `num_values` is then below num_steps.
    """
    check_count("num_steps", num_steps, 1, _MOST_STEPS)
    check_count("num_drafts", num_drafts, 0, _MOST_DRAFTS)
    check_among("acceptance", acceptance, RULES)
    for name, function in (("f", f), ("g", g), ("update", update)):
        if not callable(function):
            raise InputError(f"expected {name} to be a function, got {function!r}")
    check_key(rng_key)
    state = jax.tree.map(jnp.asarray, state)
    check_functions(f, g, update, state)
    check_mesh(num_drafts)
    if num_drafts == 0:
        acceptance = "coupled"
    functions = [function if is_pytree(function) else jax.tree_util.Partial(function)
                 for function in (f, g, update)]  # fmt: skip
    chain, fault = run_rounds(
        *functions, state, _chain_key(rng_key), num_steps=num_steps, num_drafts=num_drafts,
        rule=RULES[acceptance],
    )  # fmt: skip
    if not isinstance(fault, Tracer) and fault != _NO_FAULT:
        name = "f" if fault == _FAULT_OF_F else "g"
        raise InputError(
            f"expected log_prob to be a number; that of {name} is NaN at step {chain.num_values} "
            "(for a Gaussian: a scale that is not above 0, or a number that is not finite)"
        )
    return chain


def _chain_key(rng_key: Array) -> Array:
    """Returns a key whose numbers do not depend on what is computed beside them."""
    return jax.random.wrap_key_data(jax.random.bits(rng_key, [2], jnp.uint32), impl=KEY_TYPE)


def _keys(chain_key: Array, step: int | Array, purpose: Purpose, count: int) -> Array:
    """Returns keys of one purpose in the round that begins at a step, [count]."""
    key = jax.random.fold_in(jax.random.fold_in(chain_key, purpose), step)
    return jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(count))


class _Carry(NamedTuple):
    chain: Speculation
    fault: Int32[Array, ""]


@functools.partial(jax.jit, static_argnames=("num_steps", "num_drafts", "rule"))
def run_rounds(
    f: StepFn,
    g: StepFn,
    update: UpdateFn,
    state: Any,
    chain_key: Array,
    *,
    num_steps: int,
    num_drafts: int,
    rule: Rule,
) -> tuple[Speculation, Int32[Array, ""]]:
    """Returns the chain, and whose `log_prob` was NaN."""

    def is_going(carry: _Carry) -> Bool[Array, "1"]:
        return ((carry.chain.num_values < num_steps) & (carry.fault == _NO_FAULT))[None]

    def one_round(carry: _Carry) -> _Carry:
        step = carry.chain.num_values
        keys = round_keys(chain_key, step, num_drafts, rule.is_shared)
        guesses = guess(f, update, carry.chain.state, draw, keys.draft)
        targets = side_by_side(g)(guesses.states)
        num_accepted, value = rule.judge(targets, guesses.drafts, guesses.values, keys)
        return commit(carry.chain, guesses, targets, num_accepted, value, update)

    value = jax.eval_shape(lambda s, key: draw(g(s), key), state, chain_key)
    zero = jnp.int32(0)
    chain = Speculation(
        values=jnp.zeros([num_steps, *value.shape], value.dtype),
        is_guess=jnp.zeros([num_steps], bool),
        state=jax.tree.map(_strongly_typed, state, state),
        num_values=zero,
        num_rounds=zero,
        num_proposed=zero,
    )
    chain, fault = while_any(is_going, one_round, _Carry(chain, zero))
    return chain, fault


def _strongly_typed(leaf: Any, like: Any) -> Array:
    """Returns a leaf as a loop may carry it: a number of Python takes the type of another array."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return leaf
    return jax.lax.convert_element_type(leaf, like.dtype)


def round_keys(chain_key: Array, step: Array, num_drafts: int, is_shared: bool) -> RoundKeys:
    """Returns the keys of the round that begins at a step."""
    steps = step + jnp.arange(num_drafts + 1)
    plain = jax.vmap(lambda step: _keys(chain_key, step, Purpose.PLAIN, 1)[0])(steps)
    return RoundKeys(
        draft=plain[:-1] if is_shared else _keys(chain_key, step, Purpose.DRAFT, num_drafts),
        accept=_keys(chain_key, step, Purpose.ACCEPT, num_drafts),
        after=_keys(chain_key, step, Purpose.NEXT, 1)[0],
        plain=plain,
    )


class Guesses(NamedTuple):
    """The guesses of one round.

    Attributes:
      states: before each guess, and after the last, [w + 1, ...].
      values: the guesses, [w, ...].
      drafts: the distributions that they were drawn from, [w].
    """

    states: Any
    values: Array
    drafts: Any


def guess(
    f: StepFn, update: UpdateFn, state: Any, choose: Callable[[Any, Array], Array], keys: Array
) -> Guesses:
    """Returns the guesses after a state; `choose` draws each from its distribution with a key."""

    def step(state: Any, key: Array) -> tuple[Any, tuple[Any, Array, Any]]:
        draft = f(state)
        value = choose(draft, key)
        after = jax.tree.map(_strongly_typed, update(state, value), state)
        return after, (state, value, jax.tree.map(jnp.asarray, draft))

    last, (states, values, drafts) = jax.lax.scan(step, state, keys)
    states = jax.tree.map(lambda all, leaf: jnp.concatenate([all, leaf[None]]), states, last)
    return Guesses(states, values, drafts)


def side_by_side(g: StepFn) -> StepFn:
    """Returns g for states [w + 1, ...], divided between devices if a mesh has an axis for them."""
    mapped = jax.vmap(lambda state: jax.tree.map(jnp.asarray, g(state)))
    if GUESSES_AXIS not in jax.sharding.get_abstract_mesh().axis_names:
        return mapped
    spec = PartitionSpec(GUESSES_AXIS)
    return jax.shard_map(
        mapped, in_specs=spec, out_specs=spec, axis_names={GUESSES_AXIS}, check_vma=False
    )


def commit(
    chain: Speculation,
    guesses: Guesses,
    targets: Any,
    num_accepted: Array,
    value: Array,
    update: UpdateFn,
) -> _Carry:
    """Returns the chain with the kept guesses and the value after them, up to the last step."""
    num_steps, width = len(chain.values), len(guesses.values)
    index = jnp.arange(width + 1)
    block = jnp.concatenate([guesses.values, value[None]]).at[num_accepted].set(value)
    first_fault, fault = find_fault(guesses, targets, num_accepted, value)
    left = num_steps - chain.num_values
    num_new = jnp.minimum(jnp.minimum(num_accepted + 1, left), first_fault)
    after = jax.tree.map(
        _strongly_typed, update(_at(guesses.states, num_accepted), value), chain.state
    )
    # If the chain ends among the guesses, its state is the one before the next guess.
    has_last, within = num_new > num_accepted, _at(guesses.states, jnp.minimum(num_new, width))
    place = jnp.where(index < num_new, chain.num_values + index, num_steps)
    return _Carry(
        Speculation(
            values=chain.values.at[place].set(block, mode="drop"),
            is_guess=chain.is_guess.at[place].set(index < num_accepted, mode="drop"),
            state=jax.tree.map(functools.partial(jnp.where, has_last), after, within),
            num_values=chain.num_values + num_new,
            num_rounds=chain.num_rounds + 1,
            num_proposed=chain.num_proposed + jnp.minimum(width, left),
        ),
        fault,
    )


def find_fault(
    guesses: Guesses, targets: Any, num_accepted: Array, value: Array
) -> tuple[Array, Array]:
    """Returns the index in the round of the first `log_prob` that is NaN, and whose it is.

    Those after the first rejection do not count.
    """
    width = len(guesses.values)
    is_read = jnp.arange(width) <= num_accepted
    of_f = is_read & jnp.isnan(_log_probs(guesses.drafts, guesses.values))
    of_g = is_read & jnp.isnan(_log_probs(_first(targets, width), guesses.values))
    is_last_bad = jnp.isnan(log_prob(_at(targets, num_accepted), value))
    of_f, of_g = jnp.pad(of_f, (0, 1)), jnp.pad(of_g, (0, 1)).at[num_accepted].max(is_last_bad)
    is_fault = of_f | of_g
    first = jnp.where(is_fault.any(), jnp.argmax(is_fault), width + 1)
    kind = jnp.where(of_f[jnp.minimum(first, width)], _FAULT_OF_F, _FAULT_OF_G)
    return first.astype(jnp.int32), jnp.where(is_fault.any(), kind, _NO_FAULT).astype(jnp.int32)


def _log_probs(distributions: Any, values: Array) -> Array:
    return jax.vmap(log_prob)(distributions, values)


def _at(tree: Any, index: Array) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


def _first(tree: Any, count: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[:count], tree)


def judge_by_ratio(
    targets: Any,
    drafts: Any,
    values: Array,
    keys: RoundKeys,
    *,
    after: Callable[[Any, Any, Array, Array, Array], Array] = draw_after,
) -> tuple[Array, Array]:
    """Keeps a guess with probability min(1, target / draft), up to the first that is not kept."""
    width = len(values)
    uniforms = jax.vmap(lambda key: jax.random.uniform(key, [], jnp.float32))(keys.accept)
    # Strictly: a guess of density 0 is rejected even where the uniform is 0.
    is_kept = jnp.log(uniforms) < jax.vmap(log_ratio)(_first(targets, width), drafts, values)
    num_accepted = _num_kept(is_kept)
    index = jnp.minimum(num_accepted, width - 1)
    value = after(
        _at(targets, num_accepted), _at(drafts, index), values[index], num_accepted < width,
        keys.after,
    )  # fmt: skip
    return num_accepted, value


def _num_kept(is_kept: Bool[Array, "w"]) -> Int32[Array, ""]:
    return jnp.sum(jnp.cumprod(is_kept, dtype=jnp.int32), dtype=jnp.int32)


def judge_categories(
    targets: Categorical,
    drafts: Categorical,
    values: Array,
    keys: RoundKeys,
    *,
    rule: AcceptanceRule = rejection.RULE,
) -> tuple[Array, Array]:
    """Judges categories as a chain of draft tokens, by the rule of `acceptance.rejection`."""
    target_probs, proposal = as_proposal(targets, drafts, values)
    uniforms = jax.vmap(lambda key: jax.random.uniform(key, [], jnp.float32))(keys.accept)
    noise = AcceptanceNoise(uniforms[None], gumbel(keys.after, target_probs.shape[-1])[None])
    verdict = rule.accept(target_probs, proposal, noise)
    return verdict.num_accepted[0], verdict.next_token[0]


def as_proposal(targets: Categorical, drafts: Categorical, values: Array) -> tuple[Array, Proposal]:
    """Returns g's probabilities, [1 w+1 v], and the guesses as a proposal of one row."""
    probs = jax.vmap(lambda distribution: distribution.probs)
    num_tokens = jnp.full([1], len(values), jnp.int32)
    return probs(targets)[None], Proposal(values[None], num_tokens, probs(drafts)[None])


def judge_by_match(
    targets: Any, drafts: Any, values: Array, keys: RoundKeys
) -> tuple[Array, Array]:
    """Keeps guesses while they are what g draws with the same keys."""
    del drafts
    drawn = jax.vmap(draw)(targets, keys.plain)
    is_same = (drawn[:-1] == values).all(axis=tuple(range(1, values.ndim)))
    num_accepted = _num_kept(is_same)
    return num_accepted, drawn[num_accepted]


def judge(targets: Any, drafts: Any, values: Array, keys: RoundKeys) -> tuple[Array, Array]:
    """Judges by the formulas for categories, or by those for densities."""
    are_categories = type(targets) is type(drafts) is Categorical
    by_kind = judge_categories if are_categories else judge_by_ratio
    return by_kind(targets, drafts, values, keys)


RULES = {"rejection": Rule(judge, False), "coupled": Rule(judge_by_match, True)}
