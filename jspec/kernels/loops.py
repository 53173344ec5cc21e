"""Loops inside a round's program: a loop of one trip or none, and a loop while a row is going.

Both carry an integer and go on while it is above 0. On a GPU a run is one CUDA graph (`backend`),
in which XLA orders a loop after the kernels that its condition needs. A condition that only reads a
carried value needs no kernel: the loop would start at once, beside what should come before it, and
on a stale condition. A comparison is a kernel. So every loop of a round whose condition is a flag
comes from here; `tests/generation/test_one_graph.py` compiles all programs and looks for others.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

_Carry = TypeVar("_Carry")


def run_if(
    condition: Bool[Array, ""], function: Callable[[_Carry], _Carry], operand: _Carry
) -> _Carry:
    """Returns `function(operand)` where the condition holds, and else the operand.

    Caches in the operand stay in place; `lax.cond` copies what passes through its branches.
    """

    def run(carry: tuple[Array, _Carry]) -> tuple[Array, _Carry]:
        return jnp.int32(0), function(carry[1])

    return _while_positive(run, (condition.astype(jnp.int32), operand))


def while_any(
    is_going: Callable[[_Carry], Bool[Array, "b"]],
    function: Callable[[_Carry], _Carry],
    operand: _Carry,
) -> _Carry:
    """Applies a function again and again, as long as any row is going.

    Where none is, nothing is computed, and caches in the operand stay in place.
    """

    def num_going(operand: _Carry) -> Array:
        return jnp.sum(is_going(operand), dtype=jnp.int32)

    def run(carry: tuple[Array, _Carry]) -> tuple[Array, _Carry]:
        operand = function(carry[1])
        return num_going(operand), operand

    return _while_positive(run, (num_going(operand), operand))


def _while_positive(
    run: Callable[[tuple[Array, _Carry]], tuple[Array, _Carry]], carry: tuple[Array, _Carry]
) -> _Carry:
    return jax.lax.while_loop(lambda carry: carry[0] > 0, run, carry)[1]
